"""ONNX files on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vitrail.errors import UserError, first_line
from vitrail.runs.session import Array, Input, threads

_TYPES: dict[str, type[np.generic]] = {
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(float)": np.float32,
}


class OnnxSession:
    """An ONNX file, ready to run; the only place that opens one."""

    engine, title = "onnx", "ONNX"

    def __init__(self, path: Path, device: str = "cpu"):
        try:
            import onnxruntime  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError(f"{path}: running ONNX files needs onnxruntime: pip install 'vitrail[export]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads()
        options.log_severity_level = 3  # errors: warnings are about the graph, which users cannot change
        wanted = ["CUDAExecutionProvider"] if device.startswith("cuda") else []
        usable = [name for name in (*wanted, "CPUExecutionProvider") if name in onnxruntime.get_available_providers()]
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=usable)
        except Exception as error:  # onnxruntime raises many types
            raise UserError(f"{path} is not a valid ONNX file: {first_line(error)}.") from error
        self.inputs: list[Input] = [
            (given.name, _TYPES.get(given.type), tuple(side if isinstance(side, int) else None for side in given.shape))
            for given in self._session.get_inputs()
        ]
        self.outputs = [output.name for output in self._session.get_outputs()]
        self.metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map

    def expect(self, shape: tuple[int, ...]) -> None:
        """Ignored: ONNX Runtime gains nothing by knowing the shape of images."""

    def run(self, images: Array, outputs: list[str]) -> list[Array]:
        """The named outputs."""
        answers: list[Array] = self._session.run(outputs, {self.inputs[0][0]: images})
        return answers
