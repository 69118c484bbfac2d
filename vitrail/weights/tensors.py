"""The tensors of a weights file, read lazily and without running code.

`.safetensors` and `.npz` files are read one tensor at a time, PyTorch's zip files are memory-mapped.
"""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from vitrail.data.npy import check_stored, check_zip, declared
from vitrail.errors import UserError, first_line, shown
from vitrail.files import open_regular

PICKLED = (".pth", ".pt", ".bin", ".ckpt")
SUFFIXES = (".safetensors", *PICKLED, ".npz")

# Keys of the model in checkpoints of training programs, in order of preference: averaged weights first.
_WRAPPERS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "student")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Weights hardly compress, so an archive that expands more than this is a zip bomb.
_MAX_RATIO = 4
_ALWAYS_ALLOWED = 1 << 26  # bytes


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, read on access. `shapes` has them on the meta device, where they take no memory.

    `wrapped` lists the known keys of the checkpoint that contained them, the one they were taken from first.
    """

    def __init__(self, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor], wrapped: tuple[str, ...] = ()):
        self.shapes = dict(shapes)
        self.wrapped = wrapped
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def open_tensors(path: Path, first: str = "") -> Tensors:
    """The tensors of a weights file of any supported kind; `first` is the key to prefer in a checkpoint."""
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file.")
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    return _open_npz(path) if path.suffix == ".npz" else _open_pickled(path, first)


def from_state_dict(content: Mapping[str, Any], where: str, first: str = "") -> Tensors:
    """The tensors of a state dict, or of a checkpoint that contains one; `first` is the key to prefer."""
    content, wrapped = _unwrap(content, first)
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{where} contains no named tensors. Give a state dict, or a checkpoint that contains one.")
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized:
            kind = "quantised" if value.is_quantized else _name(value.layout)
            raise UserError(f"{where}: {name} is a {kind} tensor, but weights must be dense.")
        if not value.is_meta and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise UserError(f"{where}: {name} claims {value.numel():,} values, more than it stores.")
    return Tensors({name: _meta(value) for name, value in tensors.items()}, tensors.__getitem__, wrapped)


def as_float(name: str, value: Tensor, where: str) -> Tensor:
    """A tensor in float32; a UserError if it is not floating-point or not finite."""
    if value.dtype not in _FLOATS:
        raise UserError(f"{where}: {name} is {_name(value.dtype)}, but weights must be floating-point.")
    if value.is_meta:
        raise UserError(f"{where}: {name} is on the meta device and has no values.")
    value = value.detach().to(torch.float32).contiguous()
    if not torch.isfinite(value).all():
        raise UserError(f"{where}: {name} has NaN or infinite values. The file is damaged, or its training diverged.")
    return value


def corrupt_file(path: Path, reason: object) -> UserError:
    line = first_line(reason) if isinstance(reason, BaseException) else reason
    return UserError(f"{path} is corrupt or truncated: {line}. Copy or train it again.")


def _unwrap(content: Mapping[str, Any], first: str = "", levels: int = 4) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The state dict inside a checkpoint, however nested, and the known keys of the outermost level."""
    known = dict.fromkeys((first, *_WRAPPERS))
    inner = tuple(name for name in known if isinstance(content.get(name), Mapping) and content[name])
    if not levels or not inner or any(isinstance(value, Tensor) for value in content.values()):
        return content, ()
    return _unwrap(content[inner[0]], first, levels - 1)[0], inner


def _open_safetensors(path: Path) -> Tensors:
    file: Any

    def read(name: str) -> Tensor:
        # The library returns a view of the mapped file. A copy can be freed on its own, and does not change with the
        # file.
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                return file.get_tensor(name).clone()
        except Exception as error:  # safetensors checks little of a header, and torch raises many types
            raise corrupt_file(path, error) from error

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            dtypes = {name: _dtype(part.get_dtype(), name, path) for name, part in slices.items()}
            shapes = {name: torch.empty(slices[name].get_shape(), dtype=dtypes[name], device="meta") for name in slices}
        with open_regular(path) as stream:
            json.loads(stream.read(int.from_bytes(stream.read(8), "little")), object_pairs_hook=_distinct)
    except UserError:
        raise
    except Exception as error:
        raise corrupt_file(path, error) from error
    return Tensors(shapes, read)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a header; of equal names, which tensor is read would depend on the reader."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"it has two entries named {shown(max(names, key=names.count))}")
    return dict(pairs)


def _open_pickled(path: Path, first: str) -> Tensors:
    zipped = zipfile.is_zipfile(path)
    if zipped:
        _check_zip(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):  # command-line flags
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is damaged, or contains Python objects, which are never loaded because they could run code. "
            "Save only the state dict, preferably as .safetensors."
        ) from error
    except Exception as error:  # random bytes can raise anything
        raise corrupt_file(path, error) from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path} contains a {type(content).__name__}, but weights must be named tensors.")
    return from_state_dict(content, str(path), first)


def _open_npz(path: Path) -> Tensors:
    if not zipfile.is_zipfile(path):
        raise corrupt_file(path, "not an .npz file")
    _check_zip(path)

    def read(name: str) -> Tensor:
        try:
            with np.load(path, allow_pickle=False) as file:
                return torch.from_numpy(file[name])
        except Exception as error:
            raise corrupt_file(path, error) from error

    shapes = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                with file.open(member) as stream:
                    shape, dtype = declared(stream)
                check_stored(member.filename, (shape, dtype), member.file_size)
                name = member.filename.removesuffix(".npy")
                if dtype.kind not in "fiub":
                    raise UserError(f"{path}: {name} is {dtype}, but weights must be floating-point.")
                kind = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
                shapes[name] = torch.empty(shape, dtype=kind, device="meta")
    except UserError:
        raise
    except Exception as error:
        raise corrupt_file(path, error) from error
    return Tensors(shapes, read)


def _check_zip(path: Path) -> None:
    try:
        check_zip(path, _MAX_RATIO, _ALWAYS_ALLOWED, "weights")
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise corrupt_file(path, error) from error


def _dtype(name: str, tensor: str, path: Path) -> torch.dtype:
    known = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    others = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool, "I8": torch.int8}
    if name not in known | others:
        raise UserError(f"{path}: {tensor} is {name}, but weights must be floating-point.")
    return (known | others)[name]


def _meta(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
