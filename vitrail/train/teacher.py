"""A teacher: a frozen model that says what it sees in the images from which a student learns.

It sees what the student sees, augmented and mixed, but in its own size, channels and normalisation; and it answers in
the student's terms: the classes in the order of the data, numbers in the student's units.
"""

from __future__ import annotations

import hashlib
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
from vitrail.data.pixels import NAMES, WHITE
from vitrail.data.preprocess import Preprocess
from vitrail.data.targets import WORDS
from vitrail.errors import UserError, some
from vitrail.evaluate.metrics import measure_model, shown
from vitrail.models import parameters
from vitrail.progress import log, track
from vitrail.weights import Card, open_card, open_run

_BATCH = 256  # images, where all of a split are answered
_MOST_KEPT = 2**30  # bytes of answers that are kept in memory

# By the bits of the student's pixels and the teacher's: floats have no white point, so nothing else is made of them.
_DEPTHS = {(have, need) for have in WHITE for need in WHITE if have == need or 32 not in (have, need)}


class Teacher:
    """Gives its outputs, (B, K), for the images of a student; nothing of it ever changes."""

    def __init__(self, settings: DistillConfig, student: Card, device: str):
        assert settings.teacher is not None
        meet(settings, student.classes, student.task, student.preprocess)
        self.source = settings.teacher
        self._model, self._card = open_run(settings.teacher, device, model=settings.teacher_model)
        self._model.requires_grad_(False)
        self._student = student
        # It was trained on crops as the student's images are: a centre crop of these would only hide their edges.
        self._preprocess = replace(self._card.preprocess, crop=1.0)
        self._order = torch.tensor(_order(self._card.classes, student.classes), device=device)
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
            metrics = measure_model(self._student, outputs.numpy(), split.targets)
            self._metrics = metrics.row()
        (h, w), card = self._preprocess.img_size, self._card
        scores = ", ".join(f"{name} {shown(name, value)}" for name, value in self._metrics.items())
        log.info(
            f"teacher   {card.model} at {h}x{w}x{card.preprocess.channels} in {self.source}: "
            f"{parameters(card.config):,} parameters; {scores} on the validation images, "
            f"seen in {Duration(time.monotonic() - begun)}"
        )
        return {"model": card.model, "source": self.source, "metrics": self._metrics}

    def answer_once(self, split: Split, workers: int) -> None:
        """Computes the outputs for all images of a split, which do not change, if there is memory for them."""
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
        return {"fingerprint": self._fingerprint(), "metrics": self._metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self._fingerprint():
            raise UserError(
                f"The teacher {self.source} is not the one with which the run began: its weights, classes or "
                "preprocessing have changed. Put the earlier one back, or start a new run."
            )
        self._metrics = state["metrics"]

    def _answers(self, split: Split, workers: int, title: str) -> Tensor:
        """Its outputs for all images of a split, in order."""
        read = batches(split, self._student.preprocess, _BATCH, workers)
        loader = track(read, title, math.ceil(len(split) / _BATCH), "batch")
        return torch.cat([self._look(pixels.to(self._device)).cpu() for pixels, _ in loader])

    @torch.no_grad()
    def _look(self, pixels: Tensor) -> Tensor:
        """Its outputs for pixels as the student has them, (B, C, H, W)."""
        seen = self._preprocess
        pixels = _as_channels(pixels, seen.channels)
        pixels = seen.frame(_as_bits(pixels, self._student.preprocess.bits, seen.bits))
        outputs = self._model(seen.normalise(pixels)).float()[:, self._order]
        if self._student.task == "regression":
            outputs = outputs * self._numbers(self._card.target_std)[self._order]
            outputs = outputs + self._numbers(self._card.target_mean)[self._order]
            outputs = (outputs - self._numbers(self._student.target_mean)) / self._numbers(self._student.target_std)
        return outputs

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _fingerprint(self) -> str:
        """Changes with whatever its outputs depend on."""
        digest = hashlib.blake2b(repr((self._card.config, self._card.classes, self._preprocess)).encode())
        for name, value in self._model.state_dict().items():
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def meet(settings: DistillConfig, classes: tuple[str, ...], task: Task, seen: Preprocess) -> None:
    """Refuses a teacher that cannot teach these classes by images as the student sees them; reads no tensor."""
    assert settings.teacher is not None
    try:
        card = open_card(settings.teacher, settings.teacher_model)
    except UserError as error:
        raise UserError(f"The teacher cannot be opened. {error}") from error
    who = f"The teacher {settings.teacher}"
    if card.task != task:
        raise UserError(
            f"{who} learnt {WORDS[card.task].many}, but the data has {WORDS[task].many}. Give one that learnt the same."
        )
    if not _numbered(card.classes) and set(card.classes) != set(classes):
        more, fewer = (
            some(sorted(set(a) - set(b)), 5) or "none" for a, b in ((card.classes, classes), (classes, card.classes))
        )
        raise UserError(
            f"{who} must know the {WORDS[task].many} of the data and no others. Only it has: {more}; "
            f"only the data has: {fewer}. Train one on this data first: `vitrail train DATA --model bit`."
        )
    if len(card.classes) != len(classes):
        raise UserError(
            f"{who} has {len(card.classes)} outputs, but the data has {len(classes)} {WORDS[task].many}. Give a "
            "teacher that was trained on this data."
        )
    have, need = seen.channels, card.preprocess.channels
    if have != need and (have, need) not in ((1, 3), (3, 1)):
        raise UserError(f"{who} reads {need} channels, which cannot be made of the student's {have}.")
    if (seen.bits, card.preprocess.bits) not in _DEPTHS:
        need_bits, have_bits = NAMES[card.preprocess.bits], NAMES[seen.bits]
        raise UserError(f"{who} reads {need_bits} images, which cannot be made of the student's {have_bits} ones.")


def _numbered(classes: tuple[str, ...]) -> bool:
    """Whether classes have no names but their numbers, as in weights of others."""
    return classes == tuple(map(str, range(len(classes))))


def _order(theirs: tuple[str, ...], ours: tuple[str, ...]) -> list[int]:
    """Which of the teacher's outputs is each class of the data."""
    if set(theirs) == set(ours):
        return [theirs.index(name) for name in ours]
    log.warning(f"The teacher's classes have no names: they are taken in the order of the data's, {some(ours, 5)}.")
    return list(range(len(ours)))


def _as_channels(pixels: Tensor, channels: int) -> Tensor:
    """Grey as colour, or colour as grey by the weights and the rounding of images that are read so."""
    if channels == pixels.shape[1]:
        return pixels
    if channels == 3:
        return pixels.expand(-1, 3, -1, -1)
    weights = torch.tensor([19595.0, 38470.0, 7471.0], device=pixels.device).view(3, 1, 1)
    grey = (pixels.float() * weights).sum(dim=1, keepdim=True) / 65536
    return (grey + 0.5).floor().to(pixels.dtype) if pixels.dtype == torch.uint8 else grey


def _as_bits(pixels: Tensor, have: int, need: int) -> Tensor:
    if have == need:
        return pixels
    return (pixels.float() / 257).round().to(torch.uint8) if need == 8 else pixels.float() * 257
