"""Export to OpenVINO: the ONNX graph, converted, as an `.xml` file with its weights in a `.bin` file next to it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from torch import nn

from vitrail.export import onnx
from vitrail.export.int8 import Ranges
from vitrail.export.sample import Array
from vitrail.models import Model
from vitrail.runs.openvino import METADATA, import_openvino
from vitrail.weights import Card

SUFFIX, TITLE, MODULES, INT8_MODULES = ".xml", "OpenVINO IR", ("openvino", "onnxscript", "onnx"), ("nncf",)
QUANTISED = (nn.Linear, nn.Conv2d)


def write(path: Path, model: Model, card: Card, preprocess: bool = True) -> None:
    """Writes a model on the CPU to an OpenVINO file in float32."""
    between = path.with_suffix(".onnx")
    onnx.write(between, model, card, preprocess)
    graph = import_openvino().Core().read_model(between)
    for name, value in onnx.metadata(model, card, preprocess).items():
        graph.set_rt_info(value, [METADATA, name])
    import_openvino().save_model(graph, path, compress_to_fp16=False)
    for file in (between, between.with_name(f"{between.name}.data")):
        file.unlink(missing_ok=True)


def quantiser(
    source: Path,
    inputs: Array,
    ranges: Ranges,  # noqa: ARG001  # NNCF measures its own
) -> Callable[[Path, Collection[str]], None]:
    """A function that writes an int8 file, with some layers left in float32, by NNCF's method for transformers."""
    import_openvino()
    import nncf

    nncf.set_log_level(logging.ERROR)
    core = import_openvino().Core()

    def quantise(path: Path, keep: Collection[str]) -> None:
        data = nncf.Dataset([np.ascontiguousarray(image[None]) for image in inputs])
        graph = core.read_model(source)
        # The products of attention, whose names have a slash, stay in float32: both factors would need 8 bits, which
        # overflows on CPUs without VNNI.
        products = [op.get_friendly_name() for op in graph.get_ops() if op.get_type_name() == "MatMul"]
        left_out = [name for name in products if "/" in name] + list(keep)
        with redirect_stdout(io.StringIO()):  # its progress bars
            quantised = nncf.quantize(
                graph,
                data,
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(inputs),
                ignored_scope=nncf.IgnoredScope(names=left_out, validate=False),
                # Weights of 7 bits, for the same reason.
                advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE),
            )
        import_openvino().save_model(quantised, path, compress_to_fp16=False)

    return quantise
