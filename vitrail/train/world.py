"""The processes of a run; nothing else in the package knows their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from vitrail.data.dataset import Numbers
from vitrail.tasks.objective import Objective

T = TypeVar("T")


class World:
    """A single process, for which every method is the identity.

    The training loop calls these methods wherever several processes must act as one.
    """

    @classmethod
    def join(cls) -> World:
        """The world of this process."""
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
        """The merged meters of all processes, in order."""
        return measured
