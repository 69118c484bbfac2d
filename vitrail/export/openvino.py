"""Export to OpenVINO: the ONNX graph, converted, as an `.xml` file with its weights in a `.bin` file next to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vitrail.export import onnx
from vitrail.export.int8 import Ranges
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
    inputs: Sequence[NDArray[Any]],
    ranges: Ranges,  # noqa: ARG001  # NNCF measures its own
) -> Callable[[Path, Collection[str]], None]:
    """A function that writes an int8 file, with some layers left in float32, by NNCF's method for transformers."""
    import_openvino()
    import nncf

    nncf.set_log_level(logging.ERROR)
    core = import_openvino().Core()

    def quantise(path: Path, keep: Collection[str]) -> None:
        # All images in one size: NNCF runs them one by one.
        data = nncf.Dataset([np.ascontiguousarray(image[None]) for batch in inputs for image in batch])
        graph = core.read_model(source)
        names = {op.get_friendly_name() for op in graph.get_ops()}
        left_out = [name for name in names if name.startswith("frame/") or name.split("/")[0] in keep]
        quantised = nncf.quantize(
            graph,
            data,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=sum(map(len, inputs)),
            ignored_scope=nncf.IgnoredScope(names=left_out, validate=False),
            # Weights of 7 bits: with 8, CPUs without VNNI overflow, and answers would depend on the machine.
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE),
        )
        import_openvino().save_model(quantised, path, compress_to_fp16=False)

    return quantise
