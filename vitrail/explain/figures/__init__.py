"""The figures of `explain`, a file for each thing that is shown.

In each file `things(subject)` gives the figures of a subject, or a UserError with the reason why there are none, and
`draw_things(…)` draws arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vitrail.explain.figures import attention, data, relevance, weights, windows
from vitrail.explain.subject import Drawing, Subject

# What is drawn, in this order.
FIGURES: tuple[Callable[[Subject], Iterator[Drawing]], ...] = (
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
