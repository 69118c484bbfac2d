"""Verifies an exported file against PyTorch: the same pixels must give the same answers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.data import loader
from vitrail.data.pixels import WHITE
from vitrail.errors import UserError
from vitrail.evaluate.measure import own_data, split_name
from vitrail.export.onnx import OPSET, PIXELS, outputs
from vitrail.models import Model
from vitrail.runs.onnx import open_session
from vitrail.runs.predictor import Predictor
from vitrail.weights import Card
from vitrail.weights.card import versions

Array = NDArray[Any]
Answers = tuple[Array, Array]  # logits, and probabilities or values: (B, K) each
Program = Callable[[Array], Answers]

TOLERANCE = 1e-3  # largest difference allowed, relative to the largest value; 1e-6 is usual

_IMAGES = 64  # images compared at most
_BATCH = 32
_SECONDS = 0.25  # per speed measurement


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
    images: int
    source: str  # where the images are from
    differences: Mapping[str, Difference]  # by output
    same: int  # images with the same answer; all others are ties
    milliseconds: Mapping[str, Mapping[int, float]]  # per image, by program and batch size
    parts: Mapping[str, Part]  # by name: the file, and its external weights if it is large

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file next to the model."""
        return {
            "model": self.card.model,
            "task": self.card.task.name,
            "opset": OPSET,
            "files": {name: vars(part) for name, part in self.parts.items()},
            "images": self.images,
            "source": self.source,
            "differences": {name: vars(difference) for name, difference in self.differences.items()},
            "same_answers": self.same / self.images,
            "milliseconds_per_image": {name: dict(speeds) for name, speeds in self.milliseconds.items()},
            "threads": torch.get_num_threads(),
            "versions": versions() | _versions(),
        }

    def table(self) -> str:
        """The proof as text."""
        (_, first), *others = self.parts.items()
        ties = "" if self.same == self.images else f", {self.images - self.same:,} tied"
        rows = [
            ("model", f"{self.card.model}, {self.card.task}"),
            ("file", f"{self.file}, {first.bytes / 1e6:,.1f} MB, ONNX opset {OPSET}"),
            *(("weights", f"{name}, {part.bytes / 1e6:,.1f} MB, must stay next to it") for name, part in others),
            ("checked on", self.source),
            *(
                (name, f"maximum difference {difference.largest:.1e}, relative {difference.relative:.1e}")
                for name, difference in self.differences.items()
            ),
            ("answers", f"{self.same:,} of {self.images:,} the same" + ties),
            *(
                (name, ", ".join(f"{ms:,.2f} ms per image at batch size {batch}" for batch, ms in speeds.items()))
                for name, speeds in self.milliseconds.items()
            ),
        ]
        return "\n".join(f"{name:<15}{text}" for name, text in rows)


def images_to_check(run: str | Path, card: Card, data: str | Path | None, workers: int) -> tuple[Array, str]:
    """Pixels (N, H, W, C) as an exported file reads them, and a description of their source.

    The images are evenly spaced validation images of `data` or the run's own data, or random pixels if the latter
    cannot be opened.
    """
    try:
        opened = own_data(run, card, data)
        name = split_name(opened)
        split = opened.splits[name]
        chosen = np.unique(np.linspace(0, len(split) - 1, _IMAGES).round().astype(int)).tolist()
        read = [images.numpy() for images, _ in loader.batches(split, card.preprocess, _BATCH, workers, chosen)]
    except UserError as error:
        if data is not None:
            raise
        return _random(card), f"random pixels, because the run's data cannot be opened: {error}"
    pixels = np.concatenate(read).transpose(0, 2, 3, 1)
    if card.preprocess.bits != 32:
        pixels = np.rint(pixels)  # resizing leaves fractions in 16-bit pixels
    source = f"{len(chosen)} images of {opened.name}, split {name}"
    return np.ascontiguousarray(pixels.astype(PIXELS[card.preprocess.bits])), source


def prove(file: Path, model: Model, card: Card, pixels: Array, source: str) -> Proof:
    """Runs an ONNX file and the model on the same pixels; a UserError if the answers differ."""
    run, reference = _onnxruntime(file), _pytorch(model, card)
    # The first image on its own, to test more than one batch size.
    batches = [part for part in np.split(pixels, [1, *range(_BATCH, len(pixels), _BATCH)]) if len(part)]
    theirs, ours = _run(run, batches), _run(reference, batches)
    named = zip(outputs(card), theirs, ours, strict=True)
    differences = {name: _difference(given, expected) for name, given, expected in named}
    wrong = int(card.task.differ(theirs[0], ours[0], TOLERANCE).sum())
    # Written so that NaN fails too.
    if wrong or not all(difference.relative <= TOLERANCE for difference in differences.values()):
        detail = ", ".join(f"{name} by {difference.largest:.3g}" for name, difference in differences.items())
        made = _versions()
        raise UserError(
            f"The exported file differs from the model: on {source} its outputs differ from PyTorch's ({detail}), and "
            f"{wrong} of {len(pixels)} answers differ. No file was written. Try other versions of "
            f"onnxscript ({made['onnxscript']}) and onnxruntime ({made['onnxruntime']})."
        )
    return Proof(
        file=file,
        card=card,
        images=len(pixels),
        source=source,
        differences=differences,
        same=int(card.task.same(theirs[0], ours[0], TOLERANCE).sum()),
        milliseconds={"PyTorch": _speeds(reference, pixels), "onnxruntime": _speeds(run, pixels)},
        parts={part.name: _part(part) for part in (file, file.with_name(f"{file.name}.data")) if part.exists()},
    )


def _versions() -> dict[str, str]:
    """Versions of the modules; package names vary, such as onnxruntime-gpu."""
    import onnx
    import onnxruntime
    import onnxscript

    return {"onnx": onnx.__version__, "onnxscript": onnxscript.__version__, "onnxruntime": onnxruntime.__version__}


def _run(program: Program, batches: Sequence[Array]) -> Answers:
    logits, meanings = zip(*map(program, batches), strict=True)
    return np.concatenate(logits), np.concatenate(meanings)


def _onnxruntime(file: Path) -> Program:
    session = open_session(file)

    def run(pixels: Array) -> Answers:
        logits, meant = session.run(None, {"pixels": pixels})
        return logits, meant

    return run


def _pytorch(model: Model, card: Card) -> Program:
    """The model as `predict` runs it."""
    predictor = Predictor.of(model, card)

    def run(pixels: Array) -> Answers:
        # float32 above 8 bits: it holds 16 bits exactly, and torch barely supports uint16.
        logits = predictor.outputs(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2).astype(card.preprocess.dtype)))
        return logits, card.task.meaning(torch.from_numpy(logits)).numpy()

    return run


def _difference(given: Array, expected: Array) -> Difference:
    largest = float(np.abs(given - expected).max())
    scale = float(np.abs(expected).max())
    return Difference(largest, largest / scale if scale else largest)


def _speeds(program: Program, pixels: Array) -> dict[int, float]:
    """Milliseconds per image by batch size: the fastest of several runs."""
    speeds: dict[int, float] = {}
    for size in (1, _BATCH):
        batch = np.resize(pixels, (size, *pixels.shape[1:]))
        times: list[float] = []
        begin = time.perf_counter()
        while not times or time.perf_counter() - begin < _SECONDS:
            start = time.perf_counter()
            program(batch)
            times.append(time.perf_counter() - start)
        speeds[size] = 1000 * min(times) / size
    return speeds


def _part(file: Path) -> Part:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return Part(file.stat().st_size, digest.hexdigest())


def _random(card: Card) -> Array:
    """Random pixels over the full range; for floats, normally distributed as the normalisation expects."""
    p = card.preprocess
    random, shape = np.random.default_rng(0), (_IMAGES, *p.img_size, p.channels)
    if p.bits == 32:
        return (random.standard_normal(shape) * p.std + p.mean).astype(PIXELS[p.bits])
    return random.integers(0, WHITE[p.bits], shape, PIXELS[p.bits], endpoint=True)
