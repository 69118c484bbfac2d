"""The text tower of a model for images and texts as a second ONNX file, beside that of the images.

`NAME.text.onnx` reads token ids, (batch, tokens) int64, and returns embeddings. Its metadata hold the tokenizer with
its vocabulary, so that a program without vitrail can read words too.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.export.onnx import OPSET, save
from vitrail.models import Model
from vitrail.runs.exported import ExportedReader, text_file
from vitrail.tokenizers import Tokenizer
from vitrail.version import VERSION
from vitrail.weights import Card

_TEXTS = ("a photo of a cat", "two red birds on a branch", "")
_TOLERANCE = 1e-4


class _Tower(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.embed_text(tokens)


def write(path: Path, model: Model, card: Card) -> None:
    """Writes the text tower beside the file of the image tower, and compares it with PyTorch."""
    document = card.task.to_json()
    tokens = np.ones((2, int(document["context"])), np.int64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # within torch itself
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.onnx.export(
            _Tower(model).eval(),
            (torch.from_numpy(tokens),),
            input_names=["tokens"],
            output_names=["embeddings"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    graph = program.model
    graph.producer_name, graph.producer_version = "vitrail", VERSION
    graph.metadata_props.clear()
    tokenizer = Tokenizer.from_json(document["tokenizer"]).with_data().to_json()
    words = {"tokenizer": json.dumps(tokenizer, ensure_ascii=False), "context": json.dumps(document["context"])}
    graph.metadata_props.update({**words, "scale": json.dumps(card.task.words().scale)})
    save(graph, text_file(path))
    expected, given = card.task.words()(_TEXTS), ExportedReader(text_file(path))(_TEXTS)
    largest = float(np.abs(expected - given).max())
    if not largest <= _TOLERANCE:
        raise UserError(
            f"The exported text tower differs from PyTorch's by up to {largest:.3g}. No file was written. Try another "
            "version of onnxscript."
        )
