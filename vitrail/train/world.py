"""The processes of a run. Nothing else in the package knows how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from vitrail.data.dataset import Numbers
from vitrail.tasks.objective import Objective

T = TypeVar("T")


class World:
    """A single process, for which every method is the identity.

    The training loop calls them wherever several processes must act as one, so it stays the same for many.
    """

    @classmethod
    def join(cls) -> World:
        """The world that this process belongs to."""
        return cls()

    def first(self) -> bool:
        """Whether this process writes the files."""
        return True

    def wrap(self, objective: Objective) -> Objective:
        """The objective, set up to average gradients over all processes."""
        return objective

    def share(self, numbers: Numbers) -> Numbers:
        """This process's share of a batch, by image number."""
        return numbers

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value averaged over all processes."""
        return dict(values)

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set in any process: all stop, save or go on together."""
        return flag

    def merge(self, measured: T) -> T:
        """What all processes measured, in order."""
        return measured
