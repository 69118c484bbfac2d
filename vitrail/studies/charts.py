"""Charts of results: one series per value of a label, with the range over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitrail.charts.kinds import Points, Series

Table = Mapping[str, Mapping[Any, Sequence[float]]]  # by series, by x, one value per seed


def series(
    table: Table,
    *,
    name: str,
    title: str,
    note: str,
    x: str,
    y: str = "test accuracy",
    names: Sequence[str] = (),
    log: bool = False,
    percent: bool = True,
    joined: bool = True,
    lines: Mapping[str, Mapping[float, float]] | None = None,  # fits or references, dashed
    help: str = "Points are means over seeds; bars reach from the lowest to the highest seed.",
) -> Series:
    """A chart of scores; with `names`, x is one of them."""
    found = []
    for tone, (label, values) in enumerate(table.items()):
        at = [list(names).index(str(where)) if names else float(where) for where in values]
        means, low, high = (np.array([f(each) for each in values.values()]) for f in (np.mean, np.min, np.max))
        found.append(Points(label, np.array(at, float), means, low, high, tone, joined))
    for tone, (label, line) in enumerate((lines or {}).items()):
        level = np.array(list(line.values()), float)
        nothing = np.full_like(level, np.nan)
        found.append(Points(label, np.array(list(line), float), level, nothing, nothing, tone, True, True))
    return Series(
        name=name,
        title=title,
        note=note,
        help=help,
        x=x,
        y=y,
        series=tuple(found),
        names=tuple(names),
        log=log,
        percent=percent,
    )
