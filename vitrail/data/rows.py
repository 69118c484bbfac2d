"""Row numbers over all parts of a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from vitrail.data.dataset import Numbers
from vitrail.errors import UserError

T = TypeVar("T")


class GlobalRows(Generic[T]):
    """Global row numbers over all parts of a source, so a row finds its part after re-splitting."""

    def __init__(self, parts: Sequence[tuple[T, int]]):
        self._parts = [part for part, _ in parts]
        self._starts = np.cumsum([0, *(length for _, length in parts)])

    def rows(self) -> list[Numbers]:
        """The global row numbers of each part."""
        return [np.arange(a, b) for a, b in zip(self._starts, self._starts[1:], strict=False)]

    def locate(self, rows: Numbers) -> tuple[T, Numbers]:
        """The part that holds all of these global rows, and their row numbers within it."""
        first, last = np.searchsorted(self._starts, [rows.min(), rows.max()], side="right") - 1
        if first != last:
            raise UserError(
                "Cross-validation needs train and val in one file, but this data has a file for each. Drop --folds."
            )
        part = int(first)
        return self._parts[part], rows - self._starts[part]
