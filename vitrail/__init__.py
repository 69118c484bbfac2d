"""vitrail: the Vision Transformer as real software.

Every command-line verb is a function of the same name here. Verbs are imported on first use, so that `import vitrail`
is instant.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vitrail.amx import avoid_broken_amx
from vitrail.errors import UserError, nearest
from vitrail.verbs import VERBS
from vitrail.version import VERSION as __version__

if TYPE_CHECKING:
    from vitrail.models import create
    from vitrail.runs.predictor import Predictor
    from vitrail.verbs.check import check
    from vitrail.verbs.convert import convert
    from vitrail.verbs.embed import embed
    from vitrail.verbs.evaluate import evaluate
    from vitrail.verbs.explain import explain
    from vitrail.verbs.export import export
    from vitrail.verbs.models import models
    from vitrail.verbs.plan import plan
    from vitrail.verbs.predict import predict
    from vitrail.verbs.pretrain import pretrain
    from vitrail.verbs.recipes import recipes
    from vitrail.verbs.report import report
    from vitrail.verbs.run import Run
    from vitrail.verbs.search import search
    from vitrail.verbs.serve import serve
    from vitrail.verbs.shard import shard
    from vitrail.verbs.study import study
    from vitrail.verbs.train import train
    from vitrail.weights import load

avoid_broken_amx()  # before torch and OpenVINO compute

__all__ = [
    "Predictor",
    "Run",
    "UserError",
    "__version__",
    "check",
    "convert",
    "create",
    "embed",
    "evaluate",
    "explain",
    "export",
    "load",
    "models",
    "plan",
    "predict",
    "pretrain",
    "recipes",
    "report",
    "search",
    "serve",
    "shard",
    "study",
    "train",
]

_ROOMS = (
    "data",
    "evaluate",
    "explain",
    "export",
    "models",
    "plan",
    "report",
    "runs",
    "serve",
    "studies",
    "train",
    "weights",
)
_HOMES = {
    "Predictor": "vitrail.runs.predictor",
    "Run": "vitrail.verbs.run",
    "create": "vitrail.models",
    "load": "vitrail.weights",
} | {name: f"vitrail.verbs.{name}" for name in VERBS}


class _VerbRoom(ModuleType):
    """A package with the name of a verb: `vitrail.train(...)` is the verb, `vitrail.train.loop` a module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _checked(self.__wrapped__)(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:  # read by `inspect.signature`
        name = self.__name__.removeprefix("vitrail.")
        return getattr(importlib.import_module(f"vitrail.verbs.{name}"), name)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return inspect.getdoc(self.__wrapped__)


class _Vitrail(ModuleType):
    """This module. The import system assigns each subpackage to it as an attribute, whoever imports it first."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in VERBS and isinstance(value, ModuleType):
            value.__class__ = _VerbRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Vitrail


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"vitrail.{name}")
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        return _checked(found) if name in VERBS else found
    from vitrail.config import habits

    here = None if name.startswith("_") else habits.name(name)
    raise AttributeError(f"module 'vitrail' has no attribute '{name}'" + ("" if here is None else f": use {here}"))


def _checked(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A verb that answers keywords of other tools with vitrail's own, and too many arguments with the right form."""
    known = inspect.signature(verb).parameters
    places = [name for name, p in known.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(places):
            name = f"vitrail.{verb.__name__}"
            pair = f" Give images and labels as one pair: {name}((images, labels))." if places == ["data"] else ""
            rule = f"{name} takes {', '.join(places) or 'nothing'} by position and all else by keyword"
            raise UserError(f"{rule}, but got {len(args)} arguments.{pair}")
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            for name in kwargs.keys() - known.keys():
                from vitrail.config import habits

                hint = habits.keyword(verb.__name__, name, known) or nearest(name, known)
                raise UserError(f"vitrail.{verb.__name__} has no keyword '{name}'.{hint}")
        return verb(*args, **kwargs)

    return call


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})
