"""The manifest of shards, `shards.json`, and the index of each split, which `vitrail shard` writes.

The manifest has the task, the classes, and for each split its shards with their sizes and checksums. The index has the
place, name and target of every image: a NumPy file, memory-mapped, so that it takes no memory however many there are.
Both may come from anywhere: every number is checked before it is used, and no name leads out of the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitrail.data.dataset import Array
from vitrail.data.folder import SPLITS
from vitrail.data.npy import declared
from vitrail.data.pixels import BIT_DEPTHS
from vitrail.data.shards.files import ShardFile
from vitrail.errors import shown
from vitrail.files import reading
from vitrail.tasks import Task, task_type

MANIFEST = "shards.json"
MOST_SHARDS = 100_000
LONGEST = 2**26  # bytes of a manifest
_FORMAT = "vitrail shards 1"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LARGEST = 2**40  # bytes of a file
ADVICE = "Write the shards again with `vitrail shard`, or delete the manifest to read them without it."


@dataclass(frozen=True)
class Part:
    """A file beside the manifest: a shard, or the index of a split."""

    file: str
    images: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitParts:
    index: Part
    shards: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    task: str | None  # None without labels
    classes: tuple[str, ...]
    size: tuple[int, int]  # median height and width
    channels: int
    bits: int
    splits: Mapping[str, SplitParts]

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @property
    def kind(self) -> type[Task] | None:
        return None if self.task is None else task_type(self.task)


def read_manifest(text: str, where: object) -> Manifest:
    """A manifest, with everything in it checked."""
    with reading(where, "a manifest of shards", ADVICE):
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f"its format is not '{_FORMAT}'")
        task, classes, size = document["task"], document["classes"], document["size"]
        kind = None if task is None else task_type(task)
        if kind is not None and not kind.labelled:
            raise ValueError(f"shards cannot have the task {task}")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError("its classes must be a list of names")
        if any(name.encode(errors="ignore").decode() != name for name in classes):
            raise ValueError("one of its classes is not valid UTF-8 text")
        if len({*classes}) < len(classes):
            raise ValueError("two of its classes have the same name")
        if not isinstance(size, list) or len(size) != 2:
            raise ValueError("its size must be a height and a width")
        splits = {name: _split(name, each) for name, each in _mapping(document["splits"]).items()}
        names = [part.file for split in splits.values() for part in (split.index, *split.shards)]
        if not splits or len({*names}) < len(names):
            raise ValueError("it must have splits, each with files of its own")
        if _number(document, "bits", 8, 32) not in BIT_DEPTHS:
            raise ValueError(f"bits must be 8, 16 or 32, but they are {document['bits']}")
        return Manifest(
            task,
            tuple(classes),
            (_number({"height": size[0]}, "height", 1, 2**31), _number({"width": size[1]}, "width", 1, 2**31)),
            _number(document, "channels", 1, 2**16),
            document["bits"],
            splits,
        )


def _split(name: str, document: Any) -> SplitParts:
    if name not in SPLITS.values():
        raise ValueError(f"a split must be train, val or test, but one is {shown(name)}")
    shards = _mapping(document)["shards"]
    if not isinstance(shards, list) or not 0 < len(shards) <= MOST_SHARDS:
        raise ValueError(f"a split must have 1 to {MOST_SHARDS:,} shards")
    parts, index = tuple(_part(each, ".tar") for each in shards), _part(document["index"], ".npy")
    if index.images != (images := sum(part.images for part in parts)):
        raise ValueError(f"the shards of {name} have {images:,} images, but its index has {index.images:,}")
    return SplitParts(index, parts)


def _part(document: Any, end: str) -> Part:
    file, sha256 = _mapping(document)["file"], document["sha256"]
    if not isinstance(file, str) or not _FILE.fullmatch(file) or not file.endswith(end):
        raise ValueError(f"a file must be in the folder of the manifest and end in {end}, but one is {shown(file)}")
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"the checksum of {file} must be 64 hexadecimal digits")
    return Part(file, _number(document, "images", 1, 2**40), _number(document, "bytes", 1, _LARGEST), sha256)


def _mapping(document: Any) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise ValueError(f"{shown(document)} must be an object with fields")
    return document


def _number(document: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = document[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"'{name}' must be a whole number from {least} to {most}, but it is {shown(value)}")
    return value


# Index


def row_type(longest: int, target: tuple[np.dtype[Any], tuple[int, ...]] | None) -> np.dtype[Any]:
    """The type of a row of an index, for names of at most `longest` bytes and targets of this type and shape."""
    fields: list[Any] = [("offset", "<i8"), ("size", "<i8"), ("name", f"S{max(longest, 1)}")]
    return np.dtype(fields if target is None else [*fields, ("target", *target)])


def open_index(file: ShardFile, manifest: Manifest, split: SplitParts) -> Array:
    """The rows of a split's index, memory-mapped, with everything in them checked."""
    with reading(file, "an index of shards", ADVICE), file.open() as stream:
        if (size := os.fstat(stream.fileno()).st_size) != split.index.bytes:
            raise ValueError(f"it must have {split.index.bytes:,} bytes, but it has {size:,}")
        shape, dtype = declared(stream)
        start = stream.tell()
        names = ("offset", "size", "name", *(() if manifest.task is None else ("target",)))
        if dtype.names != names or dtype.hasobject or [dtype[k] for k in (0, 1)] != [np.dtype("<i8")] * 2:
            raise ValueError(f"its columns must be {', '.join(names)}, but they are {shown(dtype.descr)}")
        if dtype["name"].kind != "S" or shape != (split.index.images,):
            raise ValueError(f"it must have {split.index.images:,} rows, but its shape is {shape}")
        if start + shape[0] * dtype.itemsize != split.index.bytes:
            raise ValueError("its header and its size disagree")
        rows: Array = np.memmap(stream, dtype, "r", start, shape)
        ends = np.repeat([part.bytes for part in split.shards], [part.images for part in split.shards])
        outside = (rows["offset"] < 0) | (rows["size"] < 1) | (rows["size"] > ends - rows["offset"])
        if outside.any():
            raise ValueError(f"image {int(outside.argmax())} is outside its shard")
        return rows


def shard_rows(rows: Array, shards: Sequence[Part]) -> list[Array]:
    """The rows of each shard."""
    ends = np.cumsum([part.images for part in shards])
    return [rows[end - part.images : end] for end, part in zip(ends.tolist(), shards, strict=True)]
