"""Export to ONNX: a graph from the pixels of an image of any size to logits and probabilities or values.

Resizing, cropping and normalisation are part of the graph, so the caller only decodes. The metadata describe
the model.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from vitrail.data.pixels import WHITE
from vitrail.data.preprocess import Preprocess
from vitrail.export.attention import TRANSLATIONS, split_qkv
from vitrail.export.frame import Frame, shown
from vitrail.export.int8 import Ranges
from vitrail.models import Model
from vitrail.version import VERSION
from vitrail.weights import Card

if TYPE_CHECKING:
    import onnx_ir

Array = NDArray[Any]

OPSET = 20  # has Gelu as one operator; supported by runtimes since 2024, including those in browsers
# Data type of the input pixels, by bits.
PIXELS: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.float32)}

_ONE_FILE = 2**31 - 2**24  # bytes of weights: a protobuf file is limited to 2 GB, including the graph
_LONGEST = 2**20  # pixels of an image's side
_LINEAR = ("MatMul", "Gemm")

SUFFIX, TITLE, MODULES, INT8_MODULES = ".onnx", f"ONNX opset {OPSET}", ("onnxruntime", "onnxscript", "onnx"), ()
QUANTISED = (nn.Linear,)


class Deployed(nn.Module):
    """A model with the task's activation after it, and before it the preprocessing, if it belongs to the file."""

    def __init__(self, model: Model, card: Card, preprocess: bool = True):
        super().__init__()
        self.model, self.card = model, card
        self.frame = Frame(card.preprocess) if preprocess else None

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and probabilities or values, (B, K) each; of annotated tasks, in the pixels of the image.

        With preprocessing, `images` are pixels (B, H, W, C); without, they are normalised: (B, C, h, w) float32.
        """
        size, p = self.card.preprocess.img_size, self.card.preprocess
        height, width = images.shape[1:3] if self.frame is not None else size
        if self.frame is not None:
            mean, std = (torch.tensor(numbers).view(-1, 1, 1) * WHITE[p.bits] for numbers in (p.mean, p.std))
            images = (self.frame(images) - mean) / std
        logits = self.model(images)
        if not self.card.task.annotated:
            return logits, self.card.task.meaning(logits)
        rows, columns = shown(height, width, size)
        return logits, self.card.task.meaning_at(logits, (height, width), (rows, columns), size)


def outputs(card: Card) -> tuple[str, str]:
    """The names of the outputs of a file."""
    return "logits", card.task.meant


def write(path: Path, model: Model, card: Card, preprocess: bool = True) -> None:
    """Writes a model on the CPU to an ONNX file, with weights above 2 GB in `<name>.data` next to it."""
    import onnx_ir

    p, dim = card.preprocess, torch.export.Dim
    if preprocess:
        name, example = "pixels", np.zeros((2, *(side + 2 for side in p.img_size), p.channels), PIXELS[p.bits])
        sides = {1: dim("height", min=1, max=_LONGEST), 2: dim("width", min=1, max=_LONGEST)}
    else:
        name, example, sides = "images", np.zeros((2, p.channels, *p.img_size), np.float32), {}
    # With gradients enabled, torch traces another attention kernel for a learned bias than it translates.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # within torch itself
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.onnx.export(
            Deployed(split_qkv(model), card, preprocess).eval(),
            (torch.from_numpy(example),),
            input_names=[name],
            output_names=outputs(card),
            dynamic_shapes=({0: dim("batch"), **sides},),
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # None only if torch writes the file itself
    graph = program.model
    _name_layers(graph)
    onnx_ir.passes.common.ClearMetadataAndDocStringPass()(graph)  # source locations of the nodes
    graph.producer_name, graph.producer_version = "vitrail", VERSION
    graph.metadata_props.update(metadata(model, card, preprocess))
    save(graph, path)


def _name_layers(graph: onnx_ir.Model) -> None:
    """Names the nodes that have weights after their layers, such as `blocks.0.mlp.fc1`, and the others after those.

    Quantisation selects layers by these names and reports them.
    """
    taken: Counter[str] = Counter()
    for node in graph.graph:
        scopes = literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        scope = scopes[-2].removeprefix("model.") if len(scopes) > 1 else ""
        weighted = node.op_type in (*_LINEAR, "Conv") and any(v is not None and v.is_initializer() for v in node.inputs)
        name = scope if weighted else f"{scope or 'graph'}/{node.op_type}"
        node.name = f"{name}_{taken[name]}" if taken[name] else name
        taken[name] += 1


def quantiser(
    source: Path,
    inputs: Array,  # noqa: ARG001  # the ranges are known already
    ranges: Ranges,
) -> Callable[[Path, Collection[str]], None]:
    """A function that writes an int8 file, with some layers left in float32, by ONNX Runtime's quantisation.

    The inputs and weights of linear layers are int8, the latter with a scale per output. All else stays float32:
    attention, softmax, LayerNorm and GELU lose the most accuracy and gain the least speed.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    def quantise(path: Path, keep: Collection[str]) -> None:
        graph = onnx.load(source)
        constants = {tensor.name for tensor in graph.graph.initializer}
        chosen = [
            node
            for node in graph.graph.node
            if node.op_type in _LINEAR and node.name in ranges and node.name not in keep and node.input[1] in constants
        ]
        seen = {node.input[0]: np.array(ranges[node.name], np.float32) for node in chosen}
        tensors = {name: TensorData(lowest=low, highest=high) for name, (low, high) in seen.items()}
        quantizer = QDQQuantizer(
            graph,
            per_channel=True,
            # Weights of 7 bits: with 8, CPUs without VNNI overflow, and answers would depend on the machine.
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, tensors),
            nodes_to_quantize=[node.name for node in chosen],
            nodes_to_exclude=[],
            op_types_to_quantize=list(_LINEAR),
            extra_options={"OpTypesToExcludeOutputQuantization": list(_LINEAR)},
        )
        quantizer.quantize_model()
        quantizer.model.save_model_to_file(str(path), use_external_data_format=source.stat().st_size > _ONE_FILE)

    return quantise


def save(graph: onnx_ir.Model, path: Path) -> None:
    """Writes a graph to one file, or with external weights if they exceed 2 GB."""
    import onnx_ir

    weights = [value.const_value for value in graph.graph.initializers.values() if value.const_value is not None]
    large = sum(tensor.nbytes for tensor in weights) > _ONE_FILE
    onnx_ir.save(graph, path, external_data=f"{path.name}.data" if large else None)


def metadata(model: Model, card: Card, preprocess: bool = True) -> dict[str, str]:
    """The metadata of a file: the model card, and the same as plain text for other programs."""
    constants = {name: value for name, value in card.task.to_json().items() if name not in ("task", "classes")}
    return {
        "vitrail": json.dumps(card.to_json(), ensure_ascii=False),
        "version": VERSION,
        "weights_sha256": checksum(model),
        "task": card.task.name,
        "names": json.dumps(card.classes, ensure_ascii=False),
        **{name: json.dumps(value) for name, value in constants.items()},
        "preprocess": describe_preprocessing(card.preprocess, preprocess),
    }


def checksum(model: Model) -> str:
    """The SHA-256 of a model's weights, which is that of the run's `model.safetensors`."""
    return hashlib.sha256(to_bytes({n: value.contiguous() for n, value in model.state_dict().items()})).hexdigest()


def describe_preprocessing(preprocess: Preprocess, inside: bool = True) -> str:
    """The preprocessing of an image for an exported file, in a sentence."""
    kind = {1: "grey", 3: "RGB"}.get(preprocess.channels, f"{preprocess.channels} channels")
    values = "unscaled" if preprocess.bits == 32 else f"0 to {WHITE[preprocess.bits]}"
    h, w = preprocess.img_size
    cover = " x ".join(str(int(side / preprocess.crop)) for side in preprocess.img_size)
    if inside:
        return (
            f"Rotate the image by its EXIF orientation and pass its pixels (batch, height, width, channels), {kind}, "
            f"as {PIXELS[preprocess.bits]}, {values}, in any size. The graph resizes, crops and normalises them."
        )
    return (
        f"Rotate the image by its EXIF orientation, resize it ({preprocess.interpolation}, antialiased, keeping its "
        f"aspect ratio) to just cover {cover} (height x width), crop the centre {h} x {w}, divide its {kind} values "
        f"({values}) by {WHITE[preprocess.bits]}, subtract {list(preprocess.mean)}, divide by {list(preprocess.std)}, "
        "and pass it as float32 (batch, channels, height, width)."
    )
