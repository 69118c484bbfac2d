"""OpenVINO files (`.xml`, with the weights in a `.bin` file next to it) on OpenVINO."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import UserError
from vitrail.files import reading
from vitrail.runs.session import Array, Input, threads

METADATA = "vitrail"  # the section of the file's run-time information


def import_openvino() -> Any:
    """The package, without its telemetry: it reports every import unless this package of its own is missing."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


def compiled(graph: Any) -> Any:
    """A graph compiled for the CPU: in float32, for one batch at a time on all threads."""
    settings = {
        "INFERENCE_NUM_THREADS": threads(),
        "INFERENCE_PRECISION_HINT": "f32",  # the default is bf16 where the CPU has it
        "PERFORMANCE_HINT": "LATENCY",
    }
    return import_openvino().Core().compile_model(graph, "CPU", settings)


class OpenvinoSession:
    """An OpenVINO file, ready to run."""

    engine, title = "openvino", "OpenVINO"

    def __init__(self, path: Path, device: str = "cpu"):  # noqa: ARG002  # always the CPU
        try:
            openvino = import_openvino()
        except ImportError as error:
            raise UserError(
                f"{path}: running OpenVINO files needs openvino: pip install 'vitrail[openvino]'"
            ) from error
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise UserError(f"{path} needs its weights, {weights.name}, in the same folder.")
        self._fixed: tuple[int, ...] = ()
        self._programs: dict[tuple[int, ...], Any] = {}  # by the shape that they are compiled for; () for any
        self.metadata: Mapping[str, str] = {}
        with reading(path, "a valid OpenVINO file"):  # RuntimeError, and UnicodeDecodeError for its messages and names
            self._graph = graph = openvino.Core().read_model(path)
            self.inputs: list[Input] = [
                (given.get_any_name(), np.dtype(given.get_element_type().to_dtype()).type, _shape(given))
                for given in graph.inputs
            ]
            self.outputs = [output.get_any_name() if output.get_names() else "" for output in graph.outputs]
            if graph.has_rt_info([METADATA]):
                self.metadata = {name: str(value) for name, value in graph.get_rt_info([METADATA]).value.items()}

    def expect(self, shape: tuple[int, ...]) -> None:
        """Tells that most images have this shape, (H, W, C): a graph compiled for it is smaller and faster."""
        self._fixed = shape

    def run(self, images: Array, outputs: list[str]) -> list[Array]:
        """The named outputs."""
        shape = self._fixed if images.shape[1:] == self._fixed else ()
        if shape not in self._programs:
            graph = self._graph.clone()
            if shape:
                graph.reshape([-1, *shape])
            self._programs[shape] = compiled(graph)
        answers = self._programs[shape]([images])
        return [np.asarray(answers[self.outputs.index(name)]) for name in outputs]


def _shape(given: Any) -> tuple[int | None, ...]:
    return tuple(side.get_length() if side.is_static else None for side in given.get_partial_shape())
