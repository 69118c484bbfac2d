"""Exported files: models for ONNX Runtime (`.onnx`) and OpenVINO (`.xml`), without torch.

A file written by `vitrail export` contains its model card and its preprocessing. Files of other programs expect
normalised images and have no card; they get one with ImageNet's mean and standard deviation and unnamed classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.data.pixels import Pixels
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.errors import UserError, first_line
from vitrail.files import reading
from vitrail.progress import log
from vitrail.runs.onnx import OnnxSession
from vitrail.runs.openvino import OpenvinoSession
from vitrail.runs.session import Array, Session
from vitrail.tasks import Multiclass
from vitrail.tasks.pair_scores import Reader
from vitrail.tokenizers import Tokenizer
from vitrail.weights.card import Architecture, Card

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_TEXT = 10_000  # tokens
# By the file's extension.
RUNTIMES: dict[str, Callable[[Path, str], Session]] = {".onnx": OnnxSession, ".xml": OpenvinoSession}


def is_exported(source: str | Path) -> bool:
    """Whether a source is a file of another runtime, by its name."""
    return Path(source).suffix.lower() in RUNTIMES


def open_session(path: str | Path, device: str = "cpu") -> Session:
    """The file, opened by its runtime; raises UserError."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist.")
    session = RUNTIMES[path.suffix.lower()](path, device)
    if not session.inputs or not session.outputs:
        raise UserError(f"{path} is not a model: it has no inputs or no outputs.")
    return session


def parts(path: Path) -> list[Path]:
    """The files that belong to an exported one, the first: its external weights, if it has any."""
    words = [text_file(path)] if text_file(path).is_file() else []
    beside = path.with_suffix(".bin") if path.suffix.lower() == ".xml" else path.with_name(f"{path.name}.data")
    return [file for file in (path, beside) if file.is_file()] + words


def exported_card(path: str | Path) -> Card:
    """The card of a file, its own or an inferred one, once a batch has shown that it fits."""
    model = ExportedModel(path)
    model.try_out()
    return model.card


def text_file(path: Path) -> Path:
    """The file of the text tower that belongs to that of an image tower: model.text.onnx beside model.onnx."""
    return path.with_suffix(".text.onnx")


class ExportedReader(Reader):
    """An exported text tower with its tokenizer."""

    def __init__(self, path: Path):
        self._session = OnnxSession(path)
        with reading(path, "a text tower of `vitrail export`"):
            about = self._session.metadata
            super().__init__(Tokenizer.from_json(json.loads(about["tokenizer"])), int(json.loads(about["context"])))
            self._scale = float(json.loads(about["scale"]))
            if not 3 <= self.context <= _LONGEST_TEXT:
                raise ValueError(f"it claims to read {self.context} tokens")
            if not 0 < self._scale < np.inf:
                raise ValueError(f"its scale is {self._scale}")
            if not np.isfinite(self.read([""])).all():
                raise ValueError("its outputs are NaN or infinite")

    @property
    def scale(self) -> float:
        return self._scale

    def read(self, texts: Sequence[str]) -> NDArray[np.float64]:
        rows = self.tokenizer.encode(texts, self.context)
        return np.asarray(self._session.run(rows, ["embeddings"])[0], np.float64)


class ExportedModel:
    """An exported file with one output vector per image."""

    device = "cpu"  # of the arrays that it reads

    def __init__(self, path: str | Path, device: str = "cpu"):
        self.path = Path(path)
        self._session = open_session(path, device)
        own = _own_card(self.path, self._session)
        self.card = own or _made_up_card(self.path, self._session)
        if self.card.task.several and text_file(self.path).exists():
            self.card = replace(self.card, task=self.card.task.read_by(ExportedReader(text_file(self.path))))
        if own is None:
            known = "ImageNet's mean and std" if self.card.preprocess.channels == 3 else "a mean and std of 0.5"
            log.info(f"From {path}: {known}, as the file has none.")
        name, kind, shape = self._session.inputs[0]
        assert kind is not None
        self._type, self._single = kind, shape[0] == 1
        self._form: Literal["whole", "pixels", "images"] = "images"  # what the file reads
        if own is not None and name == "pixels":
            self._form = "whole" if shape[1] is None else "pixels"  # files of earlier versions read pixels of one size
        if self._form == "whole":
            seen = self.card.preprocess
            margin = seen.with_margin(np.empty((1, *seen.img_size, seen.channels), seen.dtype))
            self._session.expect(margin.shape[1:])
        self._outputs = ["logits", self.card.task.meant] if own is not None else self._session.outputs[:1]

    @property
    def engine(self) -> str:
        return self._session.engine

    @property
    def size(self) -> str:
        """The size of the model, as text."""
        return f"{sum(part.stat().st_size for part in parts(self.path)) / 2**20:.1f} MiB"

    @property
    def resizes(self) -> bool:
        """Whether the file reads images of any size."""
        return self._form == "whole"

    def preprocess(self, image: Pixels) -> Pixels:
        """A stored image as input of `outputs`, (C, H, W)."""
        return self.card.preprocess.pixels_by_pillow(image)

    def outputs(self, pixels: Array) -> Array:
        """The outputs, (B, K) float32, of pixels (B, C, H, W) of the model's size."""
        return self._run(self.input(pixels), self._outputs[:1])[0]

    def answers(self, pixels: Array) -> list[Array]:
        """The outputs, and what they mean if the file computes that, of pixels (B, C, H, W) of the model's size."""
        return self._run(self.input(pixels), self._outputs)

    def whole(self, images: Array) -> Array:
        """The outputs of images (B, H, W, C) of any size, which the file itself resizes."""
        return self._run(images, self._outputs[:1])[0]

    def input(self, pixels: Array) -> Array:
        """Pixels (B, C, H, W) of the model's size as the input of the file."""
        preprocess = self.card.preprocess
        if self._form == "images":
            return preprocess.normalise_array(pixels)
        if self._type is np.uint16:
            pixels = np.rint(pixels)  # resizing leaves fractions
        images = pixels.transpose(0, 2, 3, 1)
        # A margin for the centre crop to remove: an image of this size is not resized.
        return preprocess.with_margin(images) if self._form == "whole" else images

    def _run(self, images: Array, outputs: list[str]) -> list[Array]:
        images = np.ascontiguousarray(images.astype(self._type, copy=False))
        batches = np.split(images, len(images)) if self._single else [images]
        try:
            answers = [*zip(*(self._session.run(batch, outputs) for batch in batches), strict=True)]
        except Exception as error:  # runtimes raise many types
            raise UserError(f"{self.path} cannot be run on images {images.shape}: {first_line(error)}.") from error
        arrays = [np.concatenate(each).astype(np.float32, copy=False) for each in answers]
        wanted, shape = (len(images), self.card.task.outputs), arrays[0].shape
        if shape[0] != len(images) or (shape != wanted and not self.card.task.annotated):  # those have more axes
            raise UserError(
                f"{self.path} must have outputs of shape {wanted} by its card, but they are {shape}. Export it again."
            )
        return arrays

    def try_out(self) -> None:
        """Raises UserError unless the file runs and has finite outputs, for a black image and for noise."""
        seen = self.card.preprocess
        noise = np.random.default_rng(0).integers(0, 255, (1, seen.channels, *seen.img_size), np.uint8, endpoint=True)
        outputs = self.outputs(np.concatenate([np.zeros_like(noise), noise]).astype(seen.dtype))
        if not np.isfinite(outputs).all():
            raise UserError(f"{self.path} has outputs that are NaN or infinite. Export it again, or use another file.")

    def fingerprint(self) -> str:
        """A hash that changes with the file."""
        digest = hashlib.blake2b()
        for part in parts(self.path):
            digest.update(part.read_bytes())
        return digest.hexdigest()

    def tensor_outputs(self, pixels: Tensor) -> Tensor:
        """`outputs` of a tensor, on its device."""
        import torch

        return torch.from_numpy(self.outputs(pixels.cpu().numpy())).to(pixels.device)

    def features(self, pixels: Array) -> Array:  # noqa: ARG002  # the signature of `TorchModel`
        raise UserError(
            f"{self.path} is an {self._session.title} file, which has no feature vectors. Use the run it was exported "
            "from."
        )


def _own_card(path: Path, session: Session) -> Card | None:
    text = session.metadata.get("vitrail")
    if text is None:
        return None
    with reading(f"The metadata of {path}", "a vitrail model card"):
        card = Card.from_json(json.loads(text))
    if len(session.inputs) != 1 or session.inputs[0][1] is None or "logits" not in session.outputs:
        raise UserError(f"{path} does not fit its model card: it needs one input and an output 'logits'.")
    return card


def _made_up_card(path: Path, session: Session) -> Card:
    """A card for a file without one, from its input shape and its outputs for black images."""
    _, kind, shape = session.inputs[0]
    if len(session.inputs) != 1 or kind is not np.float32 or len(shape) != 4:
        raise UserError(f"{path} must have one input, float images (batch, channels, height, width).")
    batch, channels, h, w = shape
    if channels is None or h is None or w is None or batch not in (None, 1):
        raise UserError(
            f"{path} must have fixed channels, height and width, and a batch size of 1 or any, but its input is "
            f"{list(shape)}. Export it again."
        )
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,), (0.5,))
    seen = Preprocess((h, w), channels, mean=mean, std=std)  # checks the size before memory is taken
    images = np.zeros((1 if batch == 1 else 2, channels, h, w), np.float32)
    try:
        logits = session.run(images, session.outputs[:1])[0]
    except Exception as error:  # some files declare any batch size but accept only 1
        raise UserError(f"{path} cannot be run on {len(images)} images: {first_line(error)}.") from error
    if np.ndim(logits) != 2 or len(logits) != len(images):
        raise UserError(f"{path} must have one output (batch, classes), but its shape is {np.shape(logits)}.")
    return Card(
        model=path.name,
        config=Architecture("", {}),
        task=Multiclass(tuple(map(str, range(logits.shape[1])))),
        preprocess=seen,
        versions={},
    )
