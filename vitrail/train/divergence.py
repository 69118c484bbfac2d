"""Training that diverged: a loss, a gradient or weights that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import UserError
from vitrail.train.checkpoint import checkpoint_path


class Diverged(UserError):
    """Raised before anything that is not finite reaches a checkpoint."""

    def __init__(self, step: int, lr: float, loss: float, norm: float, hint: str = ""):
        self.numbers = step, lr, loss, norm
        super().__init__(
            f"Training diverged at step {step} with learning rate {lr:.3g}: the loss is {loss:.4g}, the gradient norm "
            f"{norm:.4g}. {hint}Start again with a lower --lr, a longer --warmup-epochs or --clip-grad 1."
        )


@contextmanager
def naming_checkpoint(run: Path) -> Iterator[None]:
    """Adds the run's last good checkpoint to the message of a divergence."""
    try:
        yield
    except Diverged as error:
        path = checkpoint_path(run)
        hint = f"The last good checkpoint is {path}. " if path.exists() else "There is no checkpoint yet. "
        raise Diverged(*error.numbers, hint) from error
