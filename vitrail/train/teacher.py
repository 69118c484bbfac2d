"""A teacher: a frozen model that says what it sees in the images from which a student learns.

It sees what the student sees, augmented and mixed, but in its own size, channels and normalisation; and it answers in
the student's terms: the classes in the order of the data, numbers in the student's units.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.config import DistillConfig, Duration, Task
from vitrail.data.dataset import Numbers, Split
from vitrail.data.loader import batches
from vitrail.data.pixels import BIT_DEPTHS, WHITE
from vitrail.data.preprocess import Preprocess
from vitrail.data.targets import WORDS
from vitrail.errors import UserError, shortlist
from vitrail.evaluate.metrics import measure_model, shown
from vitrail.progress import log, track
from vitrail.train.frozen import Known, know, open_frozen
from vitrail.weights import Card

_BATCH = 256  # images, where all of a split are answered
_MOST_KEPT = 2**30  # bytes of answers that are kept in memory

# By the bits of the student's pixels and the teacher's: floats have no white point, so nothing else is made of them.
_DEPTHS = {(have, need) for have in WHITE for need in WHITE if have == need or 32 not in (have, need)}


class Teacher:
    """Gives its outputs, (B, K), for the images of a student; nothing of it ever changes."""

    def __init__(self, settings: DistillConfig, student: Card, device: str):
        assert settings.teacher is not None
        self.source = settings.teacher
        self.known = meet(settings, student.classes, student.task, student.preprocess)
        self._answer, self._fingerprint = open_frozen(settings.teacher, settings.teacher_model, device)
        self._student = student
        # It was trained on crops as the student's images are: a centre crop of these would only hide their edges.
        self._preprocess = replace(self.known.preprocess, crop=1.0)
        self._order = torch.tensor(_order(self.known, student.classes), device=device)
        self._metrics: dict[str, float] = {}
        self._kept: Tensor | None = None
        self._device = device

    def __call__(self, images: Tensor, numbers: Numbers) -> Tensor:
        """Its outputs for images as the student reads them, which have these numbers in their split."""
        if self._kept is not None:
            return self._kept[numbers % len(self._kept)].to(self._device)
        outputs = self._look(self._student.preprocess.restore(images))
        if torch.device(self._device).type == "cuda":
            torch.cuda.synchronize(self._device)  # or the student would wait for it, in time that counts as its own
        return outputs

    def introduce(self, split: Split, workers: int) -> dict[str, Any]:
        """Says what the teacher is and how well it knows these validation images; returns that for the card."""
        begun = time.monotonic()
        if not self._metrics:  # or it was measured before the run was interrupted
            outputs = self._answers(split, workers, "measuring the teacher")
            self._metrics = measure_model(self._student, outputs.numpy(), split.targets).row()
        known, (h, w) = self.known, self._preprocess.img_size
        name, score = next((name, self._metrics[name]) for name in ("top1", "map", "r2") if name in self._metrics)
        log.info(
            f"teacher   {known.model} at {h}x{w}x{self._preprocess.channels} in {self.source}: {known.size}; "
            f"{name} {shown(name, score)} on the validation images, in {Duration(time.monotonic() - begun)}"
        )
        return {"model": known.model, "source": self.source, "metrics": self._metrics}

    def answer_once(self, split: Split, workers: int) -> None:
        """Computes the outputs for all images of a split, which never change, if there is memory to keep them."""
        if 4 * len(split) * len(self._student.classes) > _MOST_KEPT:
            return
        begun = time.monotonic()
        self._kept = self._answers(split, workers, "asking the teacher")
        log.info(
            f"No image is augmented: the teacher was asked once about all {len(split):,}, "
            f"in {Duration(time.monotonic() - begun)}."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: enough to know it again, and none of its weights."""
        return {"fingerprint": self._fingerprint, "metrics": self._metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self._fingerprint:
            raise UserError(
                f"The teacher {self.source} is not the one with which the run began: its weights, classes or "
                "preprocessing have changed. Put the earlier one back, or start a new run."
            )
        self._metrics = state["metrics"]

    def _answers(self, split: Split, workers: int, title: str) -> Tensor:
        """Its outputs for all images of a split, in order."""
        read = batches(split, self._student.preprocess, _BATCH, workers)
        loader = track(read, title, math.ceil(len(split) / _BATCH), "batch")
        outputs = torch.cat([self._look(pixels.to(self._device)).cpu() for pixels, _ in loader])
        if not outputs.isfinite().all():
            raise UserError(
                f"The teacher {self.source} gives outputs that are no finite numbers, so nothing can be learnt from "
                "it. Was it trained to the end?"
            )
        return outputs

    @torch.no_grad()
    def _look(self, pixels: Tensor) -> Tensor:
        """Its outputs for pixels as the student has them, (B, C, H, W)."""
        seen = self._preprocess
        pixels = _as_bits(pixels, self._student.preprocess.bits, seen.bits)
        pixels = _as_channels(pixels, seen.channels, seen.bits)
        outputs = self._answer(seen.frame(pixels))[:, self._order]
        if self._student.task == "regression":
            outputs = outputs * self._numbers(self.known.target_std)[self._order]
            outputs = outputs + self._numbers(self.known.target_mean)[self._order]
            outputs = (outputs - self._numbers(self._student.target_mean)) / self._numbers(self._student.target_std)
        return outputs

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device)


def meet(settings: DistillConfig, classes: tuple[str, ...], task: Task, seen: Preprocess) -> Known:
    """What is known of a teacher; one that cannot teach these classes by images as the student sees them is refused."""
    assert settings.teacher is not None
    try:
        known = know(settings.teacher, settings.teacher_model)
    except UserError as error:
        hint = " For a teacher that is --teacher-model." if "give `model`" in str(error) else ""
        raise UserError(f"The teacher cannot be used. {error}{hint}") from error
    who, many = f"The teacher {settings.teacher}", WORDS[task].many
    if known.task != task:
        raise UserError(
            f"{who} learnt {WORDS[known.task].many}, but the data has {many}. Give one that learnt the same."
        )
    if len(known.classes) != len(classes) and known.numbered:
        raise UserError(
            f"{who} has {len(known.classes)} outputs, but the data has {len(classes)} {many}. Give a teacher that was "
            "trained on this data."
        )
    if set(known.classes) != set(classes) and not known.numbered:
        more, fewer = (
            shortlist(sorted(set(a) - set(b)), 5) or "none"
            for a, b in ((known.classes, classes), (classes, known.classes))
        )
        raise UserError(
            f"{who} must know the {many} of the data and no others. Only it has: {more}; only the data has: {fewer}. "
            "Give a teacher that was trained on this data."
        )
    have, need = seen.channels, known.preprocess.channels
    if have != need and (have, need) not in ((1, 3), (3, 1)):
        raise UserError(f"{who} reads {need} channels, which cannot be made of the student's {have}.")
    if (seen.bits, known.preprocess.bits) not in _DEPTHS:
        need_bits, have_bits = BIT_DEPTHS[known.preprocess.bits], BIT_DEPTHS[seen.bits]
        raise UserError(f"{who} reads {need_bits} images, which cannot be made of the student's {have_bits} ones.")
    return known


def _order(known: Known, ours: tuple[str, ...]) -> list[int]:
    """Which of the teacher's outputs is each class of the data."""
    if set(known.classes) == set(ours):
        return [known.classes.index(name) for name in ours]
    log.warning(
        f"The teacher's classes have no names: they are taken in the order of the data's, {shortlist(ours, 5)}."
    )
    return list(range(len(ours)))


def _as_channels(pixels: Tensor, channels: int, bits: int) -> Tensor:
    """Grey as colour, or colour as grey by the weights and the rounding of images that are read so."""
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
