"""Tasks whose targets have a place in the image: the base class of masks and boxes.

The loader places images and annotations together (`placement`); a dense head on a backbone computes the outputs; and
answers and scores refer to the original image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitrail.config import TrainConfig, override
from vitrail.errors import UserError
from vitrail.tasks.placement import Truth
from vitrail.tasks.scores import Numbers, Targets
from vitrail.tasks.task import Answer, Task

if TYPE_CHECKING:
    from vitrail.models import ModelConfig

# Augmentation that mixes images or moves pixels after the loader has placed them.
_MIXES = ("shift", "randaug", "reprob", "mixup", "cutmix", "smoothing")


@dataclass(frozen=True)
class Annotated(Task):
    """Base class of tasks with annotations."""

    annotated: ClassVar[bool] = True
    detail: ClassVar[int] = 2
    coarsest: ClassVar[int] = 8
    heads: ClassVar[tuple[str, ...]]  # the dense heads that compute its outputs
    zoom: ClassVar[float] = 0.25  # default of --crop-scale: sides are scaled by 0.5 to 2

    def architecture(self, body: ModelConfig, options: Mapping[str, Any]) -> ModelConfig:
        """A backbone with the head that was asked for; else with its own, or the first one that fits."""
        from vitrail.models.dense import with_head

        return with_head(body, self.heads, self.outputs, options)

    def adapt(self, config: TrainConfig) -> TrainConfig:
        """Whole images, padded; they are scaled and mirrored by the loader, and not mixed."""
        still: dict[str, object] = dict.fromkeys(_MIXES, 0)
        return override(config, {**still, "crop_scale": self.zoom, "fit": "pad", "crop": 1.0, "head": None})

    def check_settings(self, config: TrainConfig, given: Mapping[str, Any], source: str) -> TrainConfig:
        for name in (name for name in _MIXES if given.get(name)):
            raise UserError(
                f"--{name.replace('_', '-')} does not apply to {self.title} data: {self.many} would not move with the "
                "pixels. Remove it."
            )
        if config.input.fit != "pad":
            raise UserError(f"{self.title.capitalize()} data needs whole images: use --fit pad.")
        if config.arch.head is not None and config.arch.head not in self.heads:
            raise UserError(
                f"The head of {self.title} must be one of {', '.join(self.heads)}, but it is {config.arch.head}."
            )
        if config.distillation.teacher is not None:
            raise UserError(f"--teacher does not apply to {self.title} data yet. Remove it.")
        return super().check_settings(config, given, source)

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        return np.zeros(len(targets), np.int64)

    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        raise NotImplementedError("an annotated task has `located`")

    def measure(self, outputs: NDArray[np.floating], targets: Targets) -> Any:
        assert all(isinstance(target, Truth) for target in targets), "outputs are measured against `Truth`"
        return super().measure(outputs, targets)
