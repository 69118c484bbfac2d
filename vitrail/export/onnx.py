"""Export to ONNX: a graph from raw pixels to logits and probabilities or values.

Normalisation is part of the graph, so the caller only resizes and crops. Classes and preprocessing are in the metadata.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.pixels import WHITE
from vitrail.data.preprocess import Preprocess
from vitrail.models import Model
from vitrail.version import VERSION
from vitrail.weights import Card

if TYPE_CHECKING:
    import onnx_ir

OPSET = 18  # the default of torch.onnx; supported by runtimes since 2023, including those in browsers
# Data type of the input pixels, by bits.
PIXELS: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.float32)}

_ONE_FILE = 2**31 - 2**24  # bytes of weights: a protobuf file is limited to 2 GB, including the graph


class Deployed(nn.Module):
    """A model with normalisation before it and the task's activation after it."""

    def __init__(self, model: Model, card: Card):
        super().__init__()
        self.model, self.card = model, card

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Maps pixels (B, H, W, C) to logits and probabilities or values, (B, K) each."""
        preprocess = self.card.preprocess
        mean, std = (torch.tensor(numbers) * WHITE[preprocess.bits] for numbers in (preprocess.mean, preprocess.std))
        images = (pixels.float() - mean) / std
        logits = self.model(images.permute(0, 3, 1, 2))  # B C H W
        return logits, self.card.task.meaning(logits)


def outputs(card: Card) -> tuple[str, str]:
    """The names of the outputs of a file."""
    return "logits", card.task.meant


def write(path: Path, model: Model, card: Card) -> None:
    """Writes a model on the CPU to an ONNX file, with weights above 2 GB in `<name>.data` next to it."""
    import onnx_ir

    h, w = card.preprocess.img_size
    example = np.zeros((2, h, w, card.preprocess.channels), PIXELS[card.preprocess.bits])
    # With gradients enabled, torch traces another attention kernel for a learned bias than it translates.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # within torch itself
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.onnx.export(
            Deployed(model, card).eval(),
            (torch.from_numpy(example),),
            input_names=["pixels"],
            output_names=outputs(card),
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # None only if torch writes the file itself
    graph = program.model
    onnx_ir.passes.common.ClearMetadataAndDocStringPass()(graph)  # source locations of the nodes
    graph.producer_name, graph.producer_version = "vitrail", VERSION
    graph.metadata_props.update(metadata(card))
    save(graph, path)


def save(graph: onnx_ir.Model, path: Path) -> None:
    """Writes a graph to one file, or with external weights if they exceed 2 GB."""
    import onnx_ir

    weights = [value.const_value for value in graph.graph.initializers.values() if value.const_value is not None]
    large = sum(tensor.nbytes for tensor in weights) > _ONE_FILE
    onnx_ir.save(graph, path, external_data=f"{path.name}.data" if large else None)


def metadata(card: Card) -> dict[str, str]:
    """The metadata of a file: the model card, and the same as plain text for other programs."""
    return {
        "vitrail": json.dumps(card.to_json(), ensure_ascii=False),
        "task": card.task.name,
        "names": json.dumps(card.classes, ensure_ascii=False),
        "preprocess": describe_preprocessing(card.preprocess),
    }


def describe_preprocessing(preprocess: Preprocess) -> str:
    """The preprocessing of an image for an exported file, in a sentence."""
    kind = {1: "grey", 3: "RGB"}.get(preprocess.channels, f"{preprocess.channels} channels")
    values = "unscaled" if preprocess.bits == 32 else f"0 to {WHITE[preprocess.bits]}"
    h, w = preprocess.img_size
    cover = " x ".join(str(int(side / preprocess.crop)) for side in preprocess.img_size)
    return (
        f"Rotate the image by its EXIF orientation, resize it ({preprocess.interpolation}, antialiased, keeping its "
        f"aspect ratio) to just cover {cover} (height x width), crop the centre {h} x {w}, and pass its pixels (batch, "
        f"height, width, channels), {kind}, as {PIXELS[preprocess.bits]}, {values}. The graph normalises them."
    )
