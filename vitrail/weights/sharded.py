"""Sharded weights: several files and an index, `model.safetensors.index.json`, that maps each tensor to its shard."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import UserError, shortlist
from vitrail.weights.sidecar import read_json
from vitrail.weights.tensors import PICKLED, Tensors, open_tensors

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_ENDING = ".index.json"


def is_index(path: Path) -> bool:
    return path.name.endswith(_ENDING)


def shard_files(index: Path) -> dict[str, str]:
    """The shard of every tensor, according to an index. Shards must be in the folder of the index."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index} is not an index of weights: its 'weight_map' must map each tensor to a file.")
    for file in files.values():
        if Path(file).name != file or len(file) > 255 or not file.endswith((".safetensors", *PICKLED)):
            raise UserError(f"{index} lists {file!r}, but shards must be weights files in the folder of the index.")
    return files


def open_sharded(index: Path) -> Tensors:
    """The tensors of all shards."""
    files = shard_files(index)
    shards = sorted(set(files.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise UserError(f"{index}: {len(missing)} of {len(shards)} shards are missing: {shortlist(missing, 4)}.")
    opened = {shard: open_tensors(index.parent / shard) for shard in shards}
    for shard, tensors in opened.items():
        listed = {name for name, file in files.items() if file == shard}
        if differing := sorted(listed ^ set(tensors)):
            raise UserError(f"{index.parent / shard} does not match {index.name}: see {shortlist(differing, 4)}.")
    shapes = {name: opened[file].shapes[name] for name, file in files.items()}
    return Tensors(shapes, lambda name: opened[files[name]][name])
