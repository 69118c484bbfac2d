"""A model as an ONNX file: pixels as they come from an image go in, what they mean comes out.

The graph normalises, so nobody who runs the file has to know how; classes and preprocessing lie in its metadata.
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

OPSET = 18  # the one that torch translates to, which runtimes read since 2023, those in browsers too
# By bits: what the pixels that a file reads are made of.
PIXELS: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.float32)}

_ONE_FILE = 2**31 - 2**24  # bytes of weights: a file of this format ends at 2 GB, of which the graph needs some


class Deployed(nn.Module):
    """A model with what stands before it, the normalisation, and behind it, the meaning of its outputs."""

    def __init__(self, model: Model, card: Card):
        super().__init__()
        self.model, self.card = model, card

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B, H, W, C) become logits and their meaning, (B, K) each."""
        preprocess = self.card.preprocess
        mean, std = (torch.tensor(numbers) * WHITE[preprocess.bits] for numbers in (preprocess.mean, preprocess.std))
        images = (pixels.float() - mean) / std
        logits = self.model(images.permute(0, 3, 1, 2))  # B C H W
        return logits, self.card.task.meaning(logits)


def outputs(card: Card) -> tuple[str, str]:
    """The names of a file's outputs."""
    return "logits", card.task.meant


def write(path: Path, model: Model, card: Card) -> None:
    """Writes a model, which is on the CPU, to an ONNX file; weights of more than 2 GB to `<name>.data` beside it."""
    import onnx_ir

    h, w = card.preprocess.img_size
    example = np.zeros((2, h, w, card.preprocess.channels), PIXELS[card.preprocess.bits])
    # With gradients, torch traces attention with a learned bias for one kernel, and translates it for another.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about torch
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
    assert program is not None  # it is None where torch writes the file itself
    graph = program.model
    onnx_ir.passes.common.ClearMetadataAndDocStringPass()(graph)  # which lines of which files each node comes from
    graph.producer_name, graph.producer_version = "vitrail", VERSION
    graph.metadata_props.update(metadata(card))
    save(graph, path)


def save(graph: onnx_ir.Model, path: Path) -> None:
    """Writes a graph as one file, or its weights beside it if they are too large for that."""
    import onnx_ir

    weights = [value.const_value for value in graph.graph.initializers.values() if value.const_value is not None]
    large = sum(tensor.nbytes for tensor in weights) > _ONE_FILE
    onnx_ir.save(graph, path, external_data=f"{path.name}.data" if large else None)


def metadata(card: Card) -> dict[str, str]:
    """What a file says of itself: the model card, and beside it what other programs look for."""
    return {
        "vitrail": json.dumps(card.to_json(), ensure_ascii=False),
        "task": card.task.name,
        "names": json.dumps(card.classes, ensure_ascii=False),
        "preprocess": in_words(card.preprocess),
    }


def in_words(preprocess: Preprocess) -> str:
    """How an image becomes what a file reads, in a sentence."""
    kind = {1: "grey", 3: "RGB"}.get(preprocess.channels, f"{preprocess.channels} channels")
    values = "as they are" if preprocess.bits == 32 else f"0 to {WHITE[preprocess.bits]}"
    h, w = preprocess.img_size
    cover = " x ".join(str(int(side / preprocess.crop)) for side in preprocess.img_size)
    return (
        f"Turn the image upright by its EXIF data, resize it ({preprocess.interpolation}, antialiased, its shape kept) "
        f"so that it just covers {cover} (height x width), crop the centre {h} x {w}, and give its pixels (batch, "
        f"height, width, channels), {kind}, as {PIXELS[preprocess.bits]}, {values}: the graph normalises them."
    )
