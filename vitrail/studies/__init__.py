"""The paper's experiments as lists of ordinary runs, one file each.

A study is a generator function with a docstring: it yields lists of runs, gets their results, and returns its findings.
`register` adds one under its name, from this package or from outside.
"""

from __future__ import annotations

from importlib import import_module

from vitrail.errors import UserError, nearest
from vitrail.studies.study import Study, register

__all__ = ["NAMES", "find", "register"]

NAMES = (
    "data-size",
    "scaling",
    "shape",
    "positions",
    "pooling",
    "optimiser",
    "resolution",
    "few-shot",
    "transfer",
    "attention",
    "attention-pattern",
    "self-supervised",
)


def find(name: str) -> Study:
    """The study of a name; an unknown name raises UserError."""
    from vitrail.studies.study import STUDIES

    if name in NAMES:
        import_module(f"vitrail.studies.{name.replace('-', '_')}")  # registers it
    if name not in STUDIES:
        known = [*NAMES, *(other for other in STUDIES if other not in NAMES)]
        raise UserError(f"There is no study '{name}'.{nearest(name, known)} The studies are {', '.join(known)}.")
    return STUDIES[name]
