"""The figures of `explain`, one file per topic.

A function `things(subject)` yields the figures of a subject, or raises a UserError if they do not apply to it;
`draw_things(…)` draws arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vitrail.explain.figures import attention, data, relevance, weights, windows
from vitrail.explain.subject import Drawing, Subject

Figures = Callable[[Subject], Iterator[Drawing]]  # of one kind

# In drawing order.
FIGURES: tuple[Figures, ...] = (
    attention.rollouts,
    relevance.relevances,
    attention.heads,
    attention.patches,
    windows.windows,
    attention.distance,
    weights.positions,
    weights.mixing,
    weights.filters,
    data.embedding,
    data.nearest,
    data.wrong,
    data.uncertain,
)
