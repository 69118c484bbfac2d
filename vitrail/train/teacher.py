"""A teacher: a frozen model whose outputs for the training images a student learns from.

It sees the student's augmented and mixed images, converted to its own size, channels and normalisation. Its outputs are
converted to the student's: classes in the order of the data, values in the student's units.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.config import DistillConfig, Duration
from vitrail.data.dataset import Split
from vitrail.data.loader import batches
from vitrail.data.pixels import BIT_DEPTHS, WHITE
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError, shortlist
from vitrail.progress import log, track
from vitrail.runs import EngineName
from vitrail.runs.exported import is_exported
from vitrail.runs.predictor import Predictor, source_card
from vitrail.tasks import Task
from vitrail.weights import Card
from vitrail.world import world

_BATCH = 256  # images per forward pass over a split
_MOST_KEPT = 2**30  # bytes of outputs that may be kept in memory

# Convertible bit depths of student and teacher. Floats have no white point, so they do not convert.
_DEPTHS = {(have, need) for have in WHITE for need in WHITE if have == need or 32 not in (have, need)}


class Teacher:
    """Computes outputs, (B, K), for a student's images; its weights never change."""

    def __init__(self, settings: DistillConfig, student: Card, device: str):
        assert settings.teacher is not None
        self.source = settings.teacher
        self.card = meet(settings, student.task, student.preprocess)
        # Not the fastest engine, which depends on measured times: a run must be reproducible.
        engine: EngineName = "auto" if is_exported(settings.teacher) else "torch"
        self._predictor = Predictor(settings.teacher, device, settings.teacher_model, engine)
        self._student = student
        # The student's images are already cropped: a centre crop would only cut their edges.
        self._preprocess = replace(self.card.preprocess, crop=1.0)
        self._order = torch.tensor(_order(self.card, student.task), device=device)
        self._metrics: dict[str, float] = {}
        self._kept: Tensor | None = None
        self._device = device

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        """The outputs for the student's images with these indices in the training split."""
        if self._kept is not None:
            return self._kept[numbers % len(self._kept)].to(self._device)
        outputs = self._look(self._student.preprocess.restore(images))
        if torch.device(self._device).type == "cuda":
            torch.cuda.synchronize(self._device)  # otherwise its time would count as the student's
        return outputs

    def introduce(self, split: Split, workers: int) -> dict[str, Any]:
        """Logs the teacher and its validation score; returns both for the card."""
        begun = time.monotonic()
        if not self._metrics:  # otherwise restored from the checkpoint
            outputs = self._answers(split, workers, "measuring the teacher")
            self._metrics = self._student.task.measure(outputs.numpy(), split.targets).row()
        h, w = self._preprocess.img_size
        main = self._student.task.measures[0]
        score = f"{main.name} {main.text(self._metrics[main.name], 2)}"
        log.info(
            f"teacher   {self.card.model} at {h}x{w}x{self._preprocess.channels} in {self.source}: "
            f"{self._predictor.size}; {score} on the validation images, in {Duration(time.monotonic() - begun)}"
        )
        return {"model": self.card.model, "source": self.source, "metrics": self._metrics}

    def answer_once(self, split: Split, workers: int) -> None:
        """Computes the outputs for all images of a split once, if they fit into memory."""
        if 4 * len(split) * self._student.task.outputs > _MOST_KEPT:
            return
        begun = time.monotonic()
        self._kept = self._answers(split, workers, "running the teacher")
        log.info(
            f"Images are not augmented, so the teacher's outputs for all {len(split):,} were computed once, "
            f"in {Duration(time.monotonic() - begun)}."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Teacher:
        return self  # its weights never change

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: a fingerprint and the scores, not the weights."""
        return {"fingerprint": self._predictor.fingerprint, "metrics": self._metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self._predictor.fingerprint:
            raise UserError(
                f"The teacher {self.source} has changed since the run began: its weights, classes or preprocessing "
                "differ. Restore it, or start a new run."
            )
        self._metrics = state["metrics"]

    def _answers(self, split: Split, workers: int, title: str) -> Tensor:
        """Its outputs for all images of a split, in order."""
        mine = world().part(range(len(split)))
        read = batches(split, self._student.preprocess, _BATCH, workers, mine)
        loader = track(read, title, math.ceil(len(mine) / _BATCH), "batch")
        looked = [self._look(pixels.to(self._device)).cpu() for pixels, _ in loader]
        outputs = torch.cat([part for parts in world().every(looked) for part in parts])
        if not outputs.isfinite().all():
            raise UserError(
                f"A teacher's outputs must be finite, but those of {self.source} are not. Choose another --teacher."
            )
        return outputs

    @torch.no_grad()
    def _look(self, pixels: Tensor) -> Tensor:
        """The outputs for the student's pixels, (B, C, H, W)."""
        seen = self._preprocess
        pixels = _as_bits(pixels, self._student.preprocess.bits, seen.bits)
        pixels = _as_channels(pixels, seen.channels, seen.bits)
        outputs = self._predictor.tensor_outputs(seen.frame(pixels))
        return self._student.task.translate(outputs, self.card.task)[:, self._order]


def meet(settings: DistillConfig, task: Task, seen: Preprocess) -> Card:
    """The card of a teacher. Raises UserError if it cannot teach this task from the student's images."""
    assert settings.teacher is not None
    try:
        known = source_card(settings.teacher, settings.teacher_model)
    except UserError as error:
        hint = " For a teacher, the option is --teacher-model." if "give `model`" in str(error) else ""
        raise UserError(f"The teacher cannot be used. {error}{hint}") from error
    who, many, classes = f"The teacher {settings.teacher}", task.many, task.classes
    if type(known.task) is not type(task):
        raise UserError(
            f"{who} predicts {known.task.many}, but the data has {many}. Choose one trained for the same task."
        )
    if len(known.classes) != len(classes) and known.numbered:
        raise UserError(
            f"{who} has {len(known.classes)} outputs, but the data has {len(classes)} {many}. Choose one trained on "
            "this data."
        )
    if set(known.classes) != set(classes) and not known.numbered:
        more, fewer = (
            shortlist(sorted(set(a) - set(b)), 5) or "none"
            for a, b in ((known.classes, classes), (classes, known.classes))
        )
        raise UserError(
            f"{who} must have the same {many} as the data. Only the teacher has: {more}; only the data has: {fewer}. "
            "Choose one trained on this data."
        )
    have, need = seen.channels, known.preprocess.channels
    if have != need and (have, need) not in ((1, 3), (3, 1)):
        raise UserError(
            f"{who} reads {need} channels, and the student's {have} cannot be converted. Choose another --teacher."
        )
    if (seen.bits, known.preprocess.bits) not in _DEPTHS:
        need_bits, have_bits = BIT_DEPTHS[known.preprocess.bits], BIT_DEPTHS[seen.bits]
        raise UserError(f"{who} reads {need_bits} images, and the student's {have_bits} ones cannot be converted.")
    return known


def _order(known: Card, task: Task) -> list[int]:
    """The index of the teacher's output for each of the student's."""
    if set(known.classes) != set(task.classes):
        log.warning(
            "The teacher's classes have no names. They are assumed to be in the order of the data's: "
            f"{shortlist(task.classes, 5)}."
        )
    return task.output_order(known.task)


def _as_channels(pixels: Tensor, channels: int, bits: int) -> Tensor:
    """Grey to colour, or colour to grey with the weights and rounding used for reading images."""
    if channels == pixels.shape[1]:
        return pixels
    if channels == 3:
        return pixels.expand(-1, 3, -1, -1)
    weights = torch.tensor([19595.0, 38470.0, 7471.0], device=pixels.device).view(3, 1, 1)
    grey = (pixels.float() * weights).sum(dim=1, keepdim=True) / 65536
    return grey if bits == 32 else (grey + 0.5).floor().to(pixels.dtype)


def _as_bits(pixels: Tensor, have: int, need: int) -> Tensor:
    if have == need:
        return pixels
    return (pixels.float() / 257).round().to(torch.uint8) if need == 8 else pixels.float() * 257
