"""A run on one page: `vitrail.report("runs/demo")` is `vitrail report runs/demo`."""

from __future__ import annotations

from vitrail.report.verbs import report
from vitrail.verb import callable_package

__all__ = ["report"]

callable_package(__name__, report)
