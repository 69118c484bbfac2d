"""ONNX files on ONNX Runtime."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import UserError, first_line
from vitrail.files import open_regular, reading
from vitrail.runs.session import Array, Input, threads

_TYPES: dict[str, type[np.generic]] = {
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
}


class OnnxSession:
    """An ONNX file, ready to run; the only place that opens one."""

    engine, title = "onnx", "ONNX"

    def __init__(self, path: Path, device: str = "cpu"):
        try:
            import onnxruntime  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError(f"{path}: running ONNX files needs onnxruntime: pip install 'vitrail[export]'") from error
        check_external(path)
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


# The key of a reference to another file, after its length as protobuf writes it, or in more bytes than needed.
_REFERENCE = re.compile(rb"(?:\x08|\x88\x80*\x00)location")


def check_external(path: Path) -> None:
    """Raises UserError if weights outside the file are anywhere but in `<name>.onnx.data` next to it.

    The runtime would read any file that the graph names, and the fingerprint of the model would not cover it.
    """
    with reading(path, "a valid ONNX file"), open_regular(path) as file:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if not _REFERENCE.search(content):
                return
        try:
            import onnx
            from google.protobuf.message import Message  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError(f"{path}: weights in other files need onnx: pip install 'vitrail[export]'") from error
        model = onnx.load(file, load_external_data=False)
        beside = path.with_name(f"{path.name}.data")
        for tensor in _tensors(model, onnx.TensorProto, Message):
            places = [entry.value for entry in tensor.external_data if entry.key == "location"]
            if tensor.external_data and (places != [beside.name] or beside.is_symlink() or not beside.is_file()):
                where = ", ".join(places)[:200] or "nowhere"
                raise UserError(f"{path} may have weights only in {beside.name}, a file next to it, not in {where}.")


def _tensors(message: Any, kind: type[Any], single: type[Any]) -> Iterator[Any]:
    """All tensors in a graph, its subgraphs and the attributes of its nodes."""
    if isinstance(message, kind):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if isinstance(value, single) else value:  # a message, or a list of them
                yield from _tensors(inner, kind, single)
