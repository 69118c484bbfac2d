"""Verifies an exported file against PyTorch, on the same images: its answers, its accuracy, its speed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.errors import UserError, shortlist
from vitrail.export.onnx import outputs
from vitrail.export.sample import Array, Sample
from vitrail.models import Model
from vitrail.runs.exported import ExportedModel, parts
from vitrail.runs.predictor import Predictor
from vitrail.runs.speed import Speed
from vitrail.weights import Card
from vitrail.weights.card import versions

TOLERANCE = 1e-3  # largest difference allowed in float32, relative to the largest value; 1e-6 is usual

_RESIZED = 0.1  # the same for an image that the file itself resizes: its pixels differ by a grey level here and there
_BATCH = 32


@dataclass(frozen=True)
class Difference:
    """The difference between an output of the file and PyTorch's."""

    largest: float
    relative: float  # to the largest value


@dataclass(frozen=True)
class Part:
    """A written file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Proof:
    """The result of comparing an exported file with PyTorch."""

    file: Path
    card: Card
    format: str
    images: int
    source: str  # where the images are from
    differences: Mapping[str, Difference]  # by output
    same: int  # images with the same answer
    scores: tuple[float, float] | None  # the task's main score with PyTorch and with the file, if the data has labels
    resized: tuple[int, int] | None  # images with the same answer if the file resizes them, of how many
    parts: Mapping[str, Part]  # by name: the file, and its external weights
    int8: bool = False
    kept: Sequence[str] = ()  # layers of an int8 file that stay in float32
    calibrated: str = ""  # where the images of the calibration are from
    speeds: Mapping[str, Speed] = field(default_factory=dict)  # by program

    @property
    def drop(self) -> float:
        """The points of the main score that the file loses; without labels, the share of other answers."""
        if self.scores is None:
            return 100 * (1 - self.same / self.images)
        return 100 * (self.scores[0] - self.scores[1])

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file next to the model."""
        main = self.card.task.measures[0].name
        return {
            "model": self.card.model,
            "task": self.card.task.name,
            "format": self.format,
            "precision": "int8" if self.int8 else "fp32",
            "float32_layers": list(self.kept) if self.int8 else None,
            "calibrated_on": self.calibrated or None,
            "files": {name: vars(part) for name, part in self.parts.items()},
            "images": self.images,
            "source": self.source,
            "differences": {name: vars(difference) for name, difference in self.differences.items()},
            "same_answers": self.same / self.images,
            "score": main,
            "scores": self.scores and {"PyTorch": self.scores[0], "file": self.scores[1]},
            "points_lost": self.drop,
            "resized_by_the_file": self.resized and {"same": self.resized[0], "images": self.resized[1]},
            "speed": {name: asdict(speed) for name, speed in self.speeds.items()},
            "threads": torch.get_num_threads(),
            "versions": versions() | _versions(),
        }

    def table(self) -> str:
        """The proof as text."""
        (_, first), *others = self.parts.items()
        rows = [
            ("model", f"{self.card.model}, {self.card.task}"),
            ("file", f"{self.file}, {first.bytes / 1e6:,.1f} MB, {self.format}, {'int8' if self.int8 else 'fp32'}"),
            *(("weights", f"{name}, {part.bytes / 1e6:,.1f} MB, must stay next to it") for name, part in others),
        ]
        if self.int8:
            rows.append(("calibrated on", self.calibrated))
            rows.append(("in float32", shortlist(self.kept, 8) if self.kept else "no linear layer"))
        rows.append(("checked on", self.source))
        rows += [
            (name, f"maximum difference {difference.largest:.1e}, relative {difference.relative:.1e}")
            for name, difference in self.differences.items()
        ]
        tied = "" if self.same == self.images or self.int8 else f", {self.images - self.same:,} tied"
        rows.append(("answers", f"{self.same:,} of {self.images:,} the same{tied}"))
        if self.resized is not None:
            rows.append(("whole images", f"{self.resized[0]} of {self.resized[1]} the same, resized by the file"))
        if self.scores is not None:
            main = self.card.task.measures[0]
            before, after = (main.text(score, 2) for score in self.scores)
            rows.append((main.title, f"{before} with PyTorch, {after} with the file"))
        rows += [
            (
                name,
                f"{speed.latency_ms:,.1f} ms per image, {speed.images_per_second:,.0f} images/s in batches of 16, "
                f"{speed.peak_mb:,.0f} MB of memory",
            )
            for name, speed in self.speeds.items()
        ]
        return "\n".join(f"{name:<15}{text}" for name, text in rows)


def prove(file: Path, model: Model, card: Card, sample: Sample, format: str, int8: bool = False) -> Proof:
    """Runs a file and the model on the same images. In float32, different answers raise UserError."""
    theirs, ours = ExportedModel(file), Predictor.of(model, card)
    # The first image on its own, to test more than one batch size.
    batches = [part for part in np.split(sample.pixels, [1, *range(_BATCH, len(sample), _BATCH)]) if len(part)]
    given = [np.concatenate(each) for each in zip(*map(theirs.answers, batches), strict=True)]
    logits = np.concatenate([ours.outputs(batch) for batch in batches])
    tensor, size = torch.from_numpy(logits), card.preprocess.img_size
    meant = card.task.meaning_at(tensor, size, size, size) if card.task.annotated else card.task.meaning(tensor)
    expected = [logits, meant.numpy()]
    named = zip(outputs(card), *([each[0], card.task.steady(each[1])] for each in (given, expected)), strict=True)
    differences = {name: _difference(value, other) for name, value, other in named}
    if not int8:
        _check_equal(card, sample, given[0], logits, differences)
    return Proof(
        file=file,
        card=card,
        format=format,
        images=len(sample),
        source=sample.source,
        differences=differences,
        same=int(card.task.same(given[0], logits, TOLERANCE).sum()),
        scores=None if sample.targets is None else _scores(card, sample.targets, logits, given[0]),
        resized=_check_resizing(theirs, sample, given[0]) if theirs.resizes and sample.whole else None,
        parts={part.name: _part(part) for part in parts(file)},
        int8=int8,
    )


def _check_equal(card: Card, sample: Sample, given: Array, expected: Array, differ: Mapping[str, Difference]) -> None:
    wrong = int(card.task.differ(given, expected, TOLERANCE).sum())
    # Written so that NaN fails too.
    if wrong or not all(difference.relative <= TOLERANCE for difference in differ.values()):
        detail = ", ".join(f"{name} by {difference.largest:.3g}" for name, difference in differ.items())
        made = ", ".join(f"{name} {number}" for name, number in _versions().items())
        raise UserError(
            f"The exported file differs from the model: on {sample.source} its outputs differ from PyTorch's "
            f"({detail}), and {wrong} of {len(sample)} answers differ. No file was written. Try other versions of the "
            f"packages that wrote it: {made}."
        )


def _check_resizing(file: ExportedModel, sample: Sample, expected: Array) -> tuple[int, int]:
    """How many images get the same answer if the file itself resizes them, and of how many."""
    task, count = file.card.task, len(sample.whole)
    given = np.concatenate([file.whole(image[None]) for image in sample.whole])
    if wrong := int(task.differ(given, expected[:count], _RESIZED).sum()):
        raise UserError(
            f"The exported file resizes images in another way than training: {wrong} of {count} images of "
            f"{sample.source} get another answer. No file was written. Export with --no-preprocess."
        )
    return int(task.same(given, expected[:count], _RESIZED).sum()), count


def _scores(card: Card, targets: Array, *given: Array) -> tuple[float, float]:
    before, after = (float(card.task.measure(logits, targets).main) for logits in given)
    return before, after


def _difference(given: Array, expected: Array) -> Difference:
    largest = float(np.abs(given - expected).max())
    scale = float(np.abs(expected).max())
    return Difference(largest, largest / scale if scale else largest)


def _versions() -> dict[str, str]:
    """Versions of the installed packages that write and run files; package names vary, such as onnxruntime-gpu."""
    names = packages_distributions()
    modules = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf")
    return {module: version(names[module][0]) for module in modules if module in names}


def _part(file: Path) -> Part:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return Part(file.stat().st_size, digest.hexdigest())
