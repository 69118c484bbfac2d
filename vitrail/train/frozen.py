"""Models that only answer, whatever they are kept in: a run, anybody's weights, an ONNX file.

An ONNX file that `vitrail export` wrote has its card inside and reads pixels. One of others reads normalised images and
says nothing of itself: its mean is taken for ImageNet's, its classes have no names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import Task
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.errors import UserError
from vitrail.models import is_meant, parameters
from vitrail.progress import log
from vitrail.weights import Card, open_card, open_run

Answer = Callable[[Tensor], Tensor]  # pixels (B, C, H, W) of its own preprocessing → outputs (B, K)

_NUMBERS = {"tensor(uint8)": np.uint8, "tensor(uint16)": np.uint16, "tensor(float)": np.float32}


@dataclass(frozen=True)
class Known:
    """What is known of a model before it is opened."""

    model: str
    size: str  # in words
    classes: tuple[str, ...]
    preprocess: Preprocess
    task: Task = "multiclass"
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()

    @property
    def numbered(self) -> bool:
        """Whether its classes have no names but their numbers."""
        return self.classes == tuple(map(str, range(len(self.classes))))


def know(source: str, model: str | None) -> Known:
    """What a file says of its model; `model` is its name, where the file does not show it."""
    if _is_onnx(source):
        if model is not None:
            raise UserError(f"{source} is an ONNX file, which shows what its model is: leave out --teacher-model.")
        return _know_onnx(source, _session(source, "cpu"))
    card = open_card(source, model)
    if model is not None and not is_meant(card.model, model):
        raise UserError(f"The weights in {source} are a {card.model}, not a {model}.")
    if not card.classes:
        raise UserError(f"{source} has no head: it tells nothing apart.")
    return _of_card(card)


def open_frozen(source: str, model: str | None, device: str) -> tuple[Answer, str]:
    """What answers, and a fingerprint that changes whenever the answers do."""
    if _is_onnx(source):
        return _open_onnx(source, device)
    whole, card = open_run(source, device, model=open_card(source, model).config)
    whole.requires_grad_(False)
    digest = hashlib.blake2b(repr((card.config, _of_card(card))).encode())
    for name, value in whole.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def answer(pixels: Tensor) -> Tensor:
        return whole(card.preprocess.normalise(pixels)).float()

    return answer, digest.hexdigest()


def _of_card(card: Card) -> Known:
    size = f"{parameters(card.config):,} parameters"
    return Known(card.model, size, card.classes, card.preprocess, card.task, card.target_mean, card.target_std)


# ONNX -----------------------------------------------------------------------------------------------------


def _is_onnx(source: str) -> bool:
    return Path(source).suffix.lower() == ".onnx"


def _session(source: str, device: str) -> Any:
    try:
        import onnxruntime  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UserError(f"{source}: ONNX files need onnxruntime: pip install 'vitrail[export]'") from error
    if not Path(source).is_file():
        raise UserError(f"{source} does not exist.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    wanted = ["CUDAExecutionProvider"] if device.startswith("cuda") else []
    usable = [name for name in (*wanted, "CPUExecutionProvider") if name in onnxruntime.get_available_providers()]
    try:
        return onnxruntime.InferenceSession(source, options, providers=usable)
    except Exception as error:  # of its own kinds, by what is wrong with the file
        raise UserError(f"{source} is no ONNX file that can be run: {_first_line(error)}.") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _card(source: str, session: Any) -> Card | None:
    text = session.get_modelmeta().custom_metadata_map.get("vitrail")
    try:
        return None if text is None else Card.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{source} holds no model card of vitrail where it should: {error!r}.") from error


def _know_onnx(source: str, session: Any) -> Known:
    if (card := _card(source, session)) is not None:
        return _of_card(card)
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise UserError(f"{source} must have one input, float images (batch, channels, height, width).")
    shape = inputs[0].shape
    if not all(isinstance(side, int) for side in shape[1:]) or (isinstance(shape[0], int) and shape[0] != 1):
        raise UserError(
            f"{source} reads images {shape}. Export it with fixed channels, height and width, and for any number of "
            "images or for one."
        )
    _, channels, h, w = shape
    images = np.zeros((1 if shape[0] == 1 else 2, channels, h, w), np.float32)
    try:
        logits = session.run(None, {inputs[0].name: images})[0]
    except Exception as error:  # some files say that they read any number of images, but read one
        raise UserError(f"{source} cannot be run on {len(images)} images: {_first_line(error)}.") from error
    if np.ndim(logits) != 2 or len(logits) != len(images):
        raise UserError(f"{source} must give numbers for every class, (batch, classes), not {np.shape(logits)}.")
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,), (0.5,))
    size = f"{Path(source).stat().st_size / 2**20:.1f} MiB"
    classes = tuple(map(str, range(logits.shape[1])))
    return Known(Path(source).name, size, classes, Preprocess((h, w), channels, mean=mean, std=std))


def _open_onnx(source: str, device: str) -> tuple[Answer, str]:
    session = _session(source, device)
    known, own = _know_onnx(source, session), _card(source, session) is not None
    if not own:
        assumed = "ImageNet's mean and std" if known.preprocess.channels == 3 else "a mean and std of 0.5"
        log.info(f"From {source}: {assumed}, as nothing in the file says which.")
    first = session.get_inputs()[0]
    name, number, single = first.name, _NUMBERS[first.type], first.shape[0] == 1
    output = "logits" if own else session.get_outputs()[0].name

    def run(images: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = session.run([output], {name: images})[0]
        return logits

    def answer(pixels: Tensor) -> Tensor:
        seen = pixels.permute(0, 2, 3, 1) if own else known.preprocess.normalise(pixels)
        if number is np.uint16:
            seen = seen.round()  # deep ones have fractions once they were resized
        images = np.ascontiguousarray(seen.cpu().numpy().astype(number, copy=False))
        parts = np.split(images, len(images)) if single else [images]
        return torch.from_numpy(np.concatenate([run(part) for part in parts])).float().to(pixels.device)

    digest = hashlib.blake2b(Path(source).read_bytes())
    if (large := Path(f"{source}.data")).exists():  # where the weights of a file are that is larger than 2 GB
        digest.update(large.read_bytes())
    return answer, digest.hexdigest()
