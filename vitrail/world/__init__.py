"""The processes of a run. Nothing else in the package knows how many there are.

`World` is a single process, for which every method is the identity. Under torchrun, `World.join` makes this process one
of several, `Processes` in `processes.py`, which act as one: every process has the weights and a share of each batch,
and whatever is drawn, measured, decided or normalised is that of the whole batch. Nothing here loads torch.
"""

# ruff: noqa: ARG002  # a single process has no use for most arguments

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vitrail.errors import explained

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    import torch
    from torch import Tensor, nn

T = TypeVar("T")
M = TypeVar("M", bound="nn.Module")

Shard = Literal["off", "full", "hybrid"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


class World:
    """A single process, for which every method is the identity."""

    size = 1
    rank = 0  # the number of this process
    restarted = False  # whether torchrun has started this command before, and it failed

    @classmethod
    def join(cls) -> World:
        """The world of this process: under torchrun, all of its processes, once they have met."""
        global _world
        if started() > 1 and _world.size == 1:
            from vitrail.world.processes import Processes

            _world = Processes()
        return _world

    def first(self) -> bool:
        """Whether this process writes the files."""
        return True

    def report(self, error: BaseException) -> int:
        """Prints an error in a sentence, once for all processes; returns the exit code."""
        sentence, code = self.explained(error)
        if self.speaks():
            print(f"vitrail: {sentence}", file=sys.stderr)
        return code

    def speaks(self) -> bool:
        """Whether this process reports its error: the first that has one."""
        return is_first()

    def explained(self, error: BaseException) -> tuple[str, int]:
        """An error in a sentence, and the exit code of the command line."""
        return explained(error)

    # Batches

    def share(self, rows: T) -> T:
        """This process's share of a batch: equal parts, in order."""
        return rows

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of any number of items: consecutive ones, so that results in rank order are in order."""
        return items

    def drawn(self, draw: Callable[[int], Tensor], rows: int, dim: int = 0) -> Tensor:
        """Random numbers for rows of this process: `draw(n)` for n rows along `dim`, drawn for the whole batch."""
        return draw(rows)

    def views(self, count: int) -> AbstractContextManager[None]:
        """A context in which rows are `count` views of each image: one view of all images after the other."""
        return nullcontext()

    def fetch(self, rows: Tensor, order: Tensor) -> Tensor:
        """The rows of the whole batch in another order, of which this process gets its share."""
        return rows.index_select(0, order.to(rows.device))

    # Statistics of the whole batch, through which gradients pass

    def gathered(self, rows: Tensor) -> Tensor:
        """The rows of the whole batch."""
        return rows

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        return value

    def average(self, value: Tensor) -> Tensor:
        """The mean over all processes."""
        return value

    def count(self, number: Tensor) -> Tensor:
        """What to divide a sum by to get the mean over the whole batch, if losses are averaged over the processes.

        This is the number of terms, at least 1 in all processes together, over the number of processes.
        """
        return number.clamp(min=1)

    # Decisions and results

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value averaged over all processes."""
        return dict(values)

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Which of the flags are set in any process: all stop, save or go on together."""
        return flags

    def every(self, thing: T) -> list[T]:
        """The thing of every process, in order."""
        return [thing]

    def merge(self, meter: T) -> T:
        """The merged meters of all processes, in order."""
        return meter

    def once(self, act: Callable[[], T]) -> T:
        """Lets the first process act, without the others; all get the result, or its error."""
        return act()

    def in_turn(self, act: Callable[[], T]) -> T:
        """Acts after the first process of the machine has, which may download and cache what the others then find."""
        return act()

    # Training

    def wrap(self, objective: M) -> M:
        """The objective, set up to average gradients over all processes."""
        return objective

    def accumulating(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of a forward and backward pass; gradients are averaged only in the `last` one of a step."""
        return nullcontext()

    def shard(self, objective: M, how: Shard, precision: torch.dtype | None) -> M:
        """Shards the weights of an objective, in place: those of its parameters, and so gradients and optimisers."""
        return objective

    def unsharded(self, objective: M) -> M:
        """The objective with all its weights, to validate and save."""
        return objective

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor with all its shards."""
        return tensor

    def saved(self, state: T) -> T:
        """A state dict for the first process to save; sharded tensors have a shape, but no values."""
        return state

    def save_shards(self, state: Any, folder: Path) -> Future[Any] | None:
        """Begins to write the sharded tensors of a state dict, each process its own; None if there are none."""
        return None

    def layout(self, parts: Mapping[str, Any]) -> dict[str, Tensor]:
        """The sharded tensors of parts of a run by their names in a state dict; for optimisers, the parameters."""
        return {}

    def local(self, tensor: Tensor) -> Tensor:
        """The shard of a tensor that this process has."""
        return tensor

    def like(self, tensor: Tensor, other: Tensor) -> Tensor:
        """A whole tensor, sharded as another one is."""
        return tensor

    def load(self, part: Any, state: Any) -> None:
        """Loads a state dict, with whole or sharded tensors, into a module, an optimiser or any other part of a run."""
        part.load_state_dict(state)


_world = World()


def world() -> World:
    """The world that this process has joined."""
    return _world


@contextmanager
def alone() -> Iterator[None]:
    """A context in which this process does not ask the others, for what it does without them."""
    global _world
    before, _world = _world, World()
    try:
        yield
    finally:
        _world = before


def started() -> int:
    """The number of processes that torchrun has started, this one among them; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _NEEDED) else 1


def launch() -> str:
    """A name of the command that torchrun runs, the same when it starts it again; empty without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{socket.gethostname()} {os.getppid()}" if name == "none" else name  # torchrun's default name


def is_first() -> bool:
    """Whether this process speaks for all: before they have met too."""
    return started() == 1 or os.environ["RANK"] == "0"
