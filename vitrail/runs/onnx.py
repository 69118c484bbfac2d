"""ONNX files on ONNX Runtime, without torch.

A file written by `vitrail export` contains its model card and the normalisation. Files of other programs expect
normalised images and have no card; they get one with ImageNet's mean and standard deviation and unnamed classes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.pixels import Pixels
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks import Multiclass
from vitrail.weights.card import Architecture, Card

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]

_TYPES = {"tensor(uint8)": np.uint8, "tensor(uint16)": np.uint16, "tensor(float)": np.float32}


def is_onnx(source: str | Path) -> bool:
    return Path(source).suffix.lower() == ".onnx"


def open_session(path: str | Path, device: str = "cpu") -> Any:
    """Creates an ONNX Runtime session; the only place that does."""
    try:
        import onnxruntime  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UserError(f"{path}: running ONNX files needs onnxruntime: pip install 'vitrail[export]'") from error
    if not Path(path).is_file():
        raise UserError(f"{path} does not exist.")
    options = onnxruntime.SessionOptions()
    if (torch := sys.modules.get("torch")) is not None:
        options.intra_op_num_threads = torch.get_num_threads()  # PyTorch's, for comparable speeds
    wanted = ["CUDAExecutionProvider"] if device.startswith("cuda") else []
    usable = [name for name in (*wanted, "CPUExecutionProvider") if name in onnxruntime.get_available_providers()]
    try:
        return onnxruntime.InferenceSession(path, options, providers=usable)
    except Exception as error:  # onnxruntime raises many types
        raise UserError(f"{path} is not a valid ONNX file: {_first_line(error)}.") from error


def onnx_card(path: str | Path) -> Card:
    """The card of a file, its own or an inferred one."""
    session = open_session(path)
    return _own_card(Path(path), session) or _made_up_card(Path(path), session)


class OnnxModel:
    """An ONNX file with one output vector per image."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        self.path = Path(path)
        self._session = open_session(path, device)
        own = _own_card(self.path, self._session)
        self._own = own is not None
        self.card = own or _made_up_card(self.path, self._session)
        if not self._own:
            known = "ImageNet's mean and std" if self.card.preprocess.channels == 3 else "a mean and std of 0.5"
            log.info(f"From {path}: {known}, as the file has none.")
        first = self._session.get_inputs()[0]
        self._input, self._type, self._single = first.name, _TYPES[first.type], first.shape[0] == 1
        self._output = "logits" if self._own else self._session.get_outputs()[0].name

    @property
    def engine(self) -> str:
        return "onnx"

    @property
    def size(self) -> str:
        """The size of the model, as text."""
        return f"{self.path.stat().st_size / 2**20:.1f} MiB"

    def preprocess(self, image: Pixels) -> Pixels:
        """A stored image as input of `outputs`, (C, H, W)."""
        return self.card.preprocess.pixels_by_pillow(image)

    def outputs(self, pixels: Array) -> Array:
        """The outputs, (B, K) float32, of pixels (B, C, H, W) of the model's size."""
        images = pixels.transpose(0, 2, 3, 1) if self._own else self.card.preprocess.normalise_array(pixels)
        if self._type is np.uint16:
            images = np.rint(images)  # resizing leaves fractions
        images = np.ascontiguousarray(images.astype(self._type, copy=False))
        parts = np.split(images, len(images)) if self._single else [images]
        answers = [self._session.run([self._output], {self._input: part})[0] for part in parts]
        return np.concatenate(answers).astype(np.float32, copy=False)

    def fingerprint(self) -> str:
        """A hash that changes with the file."""
        digest = hashlib.blake2b(self.path.read_bytes())
        if (large := Path(f"{self.path}.data")).exists():  # external weights of a file above 2 GB
            digest.update(large.read_bytes())
        return digest.hexdigest()

    def tensor_outputs(self, pixels: Tensor) -> Tensor:
        """`outputs` of a tensor, on its device."""
        import torch

        return torch.from_numpy(self.outputs(pixels.cpu().numpy())).to(pixels.device)

    def features(self, pixels: Array) -> Array:  # noqa: ARG002  # the signature of `TorchModel`
        raise UserError(f"{self.path} is an ONNX file, which has no feature vectors. Use the run it was exported from.")


def _own_card(path: Path, session: Any) -> Card | None:
    text = session.get_modelmeta().custom_metadata_map.get("vitrail")
    try:
        return None if text is None else Card.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"The metadata of {path} is not a vitrail model card: {error!r}.") from error


def _made_up_card(path: Path, session: Any) -> Card:
    """A card for a file without one, from its input shape and its outputs for black images."""
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise UserError(f"{path} must have one input, float images (batch, channels, height, width).")
    shape = inputs[0].shape
    if not all(isinstance(side, int) for side in shape[1:]) or (isinstance(shape[0], int) and shape[0] != 1):
        raise UserError(
            f"{path} must have fixed channels, height and width, and a batch size of 1 or any, but its input is "
            f"{shape}. Export it again."
        )
    _, channels, h, w = shape
    images = np.zeros((1 if shape[0] == 1 else 2, channels, h, w), np.float32)
    try:
        logits = session.run(None, {inputs[0].name: images})[0]
    except Exception as error:  # some files declare any batch size but accept only 1
        raise UserError(f"{path} cannot be run on {len(images)} images: {_first_line(error)}.") from error
    if np.ndim(logits) != 2 or len(logits) != len(images):
        raise UserError(f"{path} must have one output (batch, classes), but its shape is {np.shape(logits)}.")
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,), (0.5,))
    return Card(
        model=path.name,
        config=Architecture("", {}),
        task=Multiclass(tuple(map(str, range(logits.shape[1])))),
        preprocess=Preprocess((h, w), channels, mean=mean, std=std),
        versions={},
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
