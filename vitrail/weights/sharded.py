"""Weights in several files: an index, `model.safetensors.index.json`, says which tensor lies in which of them."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import UserError, some
from vitrail.weights.sidecar import read_json
from vitrail.weights.tensors import PICKLED, Tensors, open_tensors

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_ENDING = ".index.json"


def is_index(path: Path) -> bool:
    return path.name.endswith(_ENDING)


def files_of(index: Path) -> dict[str, str]:
    """The file of every tensor, as an index says it. None may lie anywhere but beside it."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index} is no index of weights: its 'weight_map' must say in which file each tensor lies.")
    for file in files.values():
        if Path(file).name != file or len(file) > 255 or not file.endswith((".safetensors", *PICKLED)):
            raise UserError(f"{index} names {file!r}, but its parts must be weights files in its own folder.")
    return files


def open_parts(index: Path) -> Tensors:
    """The tensors of all parts as if they lay in one file."""
    files = files_of(index)
    parts = sorted(set(files.values()))
    missing = [part for part in parts if not (index.parent / part).is_file()]
    if missing:
        count = f"{len(missing)} of {len(parts)} parts"
        raise UserError(f"{index} speaks of files that are not beside it, {count}: {some(missing, 4)}.")
    opened = {part: open_tensors(index.parent / part) for part in parts}
    for part, tensors in opened.items():
        said = {name for name, file in files.items() if file == part}
        if other := sorted(said ^ set(tensors)):
            raise UserError(f"{index.parent / part} does not hold what {index.name} says of it: see {some(other, 4)}.")
    shapes = {name: opened[file].shapes[name] for name, file in files.items()}
    return Tensors(shapes, lambda name: opened[files[name]][name])
