"""The index of a shard without a manifest: where its images are and what their labels are.

It is read from the headers of the tar file, all images are verified, and it is cached until the shard changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vitrail.data.dataset import Array, Numbers
from vitrail.data.download import cache_folder
from vitrail.data.images import EXTENSIONS, ImageFacts, inspect_image
from vitrail.data.npy import read_member
from vitrail.data.shards.cache import RemoteFile
from vitrail.data.shards.files import ShardFile
from vitrail.data.shards.split import Shard, read_at
from vitrail.data.verify import verify
from vitrail.errors import UserError, shown
from vitrail.files import atomic_write, open_regular, reading
from vitrail.progress import track
from vitrail.version import VERSION

_LABELS = (".cls", ".json", ".txt")
# In bytes. An array gives every text the length of the longest.
_MAX_LABEL, _MAX_JSON, _MAX_NAME = 1000, 2**20, 4096


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of a shard, in arrays, because there may be millions."""

    file: ShardFile
    names: Array  # file names of the images, bytes
    places: Numbers  # N 2: offset and size
    labels: Array  # text; empty if missing
    faults: Array  # text: why a sample is unusable; empty if it is usable
    facts: Numbers  # N F: the fields of ImageFacts

    @property
    def shard(self) -> Shard:
        return Shard(self.file, self.names, self.places[:, 0], self.places[:, 1])


def indices(files: Sequence[ShardFile], field: str) -> list[Index]:
    """The index of every shard, from the cache or by reading its headers and verifying its images.

    `field` is that of the labels in `.json` files; "" to read no labels. Remote shards are read one by one, because
    all together may be larger than the disk.
    """
    found = {file: index for file in files if (index := _load_index(file, field))}
    new = [file for file in files if file not in found]
    groups = [[file] for file in new] if any(isinstance(file, RemoteFile) for file in new) else [new]
    for group in track(groups, "reading shards", total=len(groups), unit="shard") if len(groups) > 1 else groups:
        for index in _verified(group, field):
            found[index.file] = index
            _save_index(index, field)
    return [found[file] for file in files]


def _verified(files: Sequence[ShardFile], field: str) -> Iterator[Index]:
    """The index of each shard, with the facts of all images or the reasons why they cannot be read."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        scanned = pool.map(partial(_scan, field=field), files)
        indices = list(track(scanned, "reading shards", total=len(files), unit="shard"))
    usable = [(index.shard, i) for index in indices for i in np.flatnonzero(index.faults == "").tolist()]
    answers = iter(verify(usable, lambda place: inspect_image(read_at(*place))))
    for index in indices:
        faults: list[str] = []
        facts: list[Sequence[int]] = []
        for fault in index.faults.tolist():
            answer = fault or next(answers)
            faults.append(answer if isinstance(answer, str) else "")
            facts.append(_UNKNOWN if isinstance(answer, str) else dataclasses.astuple(answer))
        shape = (len(facts), len(_UNKNOWN))
        yield dataclasses.replace(
            index, faults=np.array(faults, dtype=np.str_), facts=np.array(facts, np.int64).reshape(shape)
        )


_NOT_STORED = (0, -1)  # the offset and size of a file that the shard does not contain
_UNKNOWN = (0,) * len(dataclasses.fields(ImageFacts))


def _scan(source: ShardFile, field: str) -> Index:
    """The samples of a shard, from its headers and label files."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, dict[str, tuple[int, int]]] = {}
    with reading(source, "a complete tar file", "Download it again."), source.open() as file:
        length, last = os.fstat(file.fileno()).st_size, -1
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0 or member.offset <= last:  # would be read for ever
                    raise ValueError(f"{member.name} has a size of {member.size}")
                last = member.offset
                if len(member.name.encode("utf-8", "surrogateescape")) > _MAX_NAME:
                    raise UserError(
                        f"{source} has a file whose name is longer than {_MAX_NAME:,} bytes: {shown(member.name)}. "
                        "Shorten it."
                    )
                if not member.isreg() or Path(member.name).name.startswith("."):
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, dot, end = name.partition(".")
                key, end = f"{folder}/{stem}", f"{dot}{end}".lower()
                stored = not member.issparse() and member.offset_data + member.size <= length
                place = (member.offset_data, member.size) if stored else _NOT_STORED
                if end in EXTENSIONS:
                    images.setdefault(key, (member.name, *place))
                elif field and end in _LABELS:
                    labels.setdefault(key, {})[end] = place
    names, places, texts, faults = [], [], [], []
    with source.open() as shard:
        for key in dict.fromkeys([*images, *labels]):
            name, *found = images.get(key, (key.lstrip("/"), 0, 0))
            text, fault = _label(shard, labels.get(key, {}), field) if field else ("", "")
            names.append(name.encode("utf-8", "surrogateescape"))
            places.append(found)
            texts.append(text)
            if tuple(found) == _NOT_STORED:
                fault = "a sparse or truncated file"
            faults.append(fault if key in images else "a label without an image")
    return Index(
        source,
        np.array(names, dtype=np.bytes_),
        np.array(places, np.int64).reshape(-1, 2),
        np.array(texts, dtype=np.str_),
        np.array(faults, dtype=np.str_),
        np.zeros((len(names), 0), np.int64),
    )


def _label(shard: BinaryIO, files: Mapping[str, tuple[int, int]], field: str) -> tuple[str, str]:
    """The label of a sample, and the fault if it has none."""
    end = next((end for end in _LABELS if end in files), None)
    if end is None:
        return "", "no label: no .cls, .json or .txt file"
    offset, size = files[end]
    if (offset, size) == _NOT_STORED:
        return "", f"its {end} is a sparse or truncated file"
    if size > (_MAX_JSON if end == ".json" else _MAX_LABEL):
        return "", f"its {end} is too long for a label"
    shard.seek(offset)
    try:
        text = shard.read(size).decode("utf-8").strip()
        if end == ".json":
            value = json.loads(text)[field]
            if isinstance(value, bool) or not isinstance(value, (int, str)):
                return "", f"the field '{field}' of its .json is neither an integer nor text"
            text = str(value).strip()
        if len(text.encode()) > _MAX_LABEL:
            return "", f"its label is longer than {_MAX_LABEL:,} bytes"
    except UnicodeError:
        return "", f"its {end} is not UTF-8 text"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", f"its .json has no field '{field}'"
    return text, "" if text else f"its {end} is empty"


# Cached indices


def _cache_entry(file: ShardFile, field: str) -> tuple[Path, str]:
    """The cache file for the index of a shard, and the stamp that must match for it to be valid."""
    if isinstance(file, RemoteFile):
        place, version = file.address, f"{file.size} {file.version}"
    else:
        state = file.path.stat()
        place, version = str(file.path.resolve()), f"{state.st_size} {state.st_mtime_ns}"
    fields = [field.name for field in dataclasses.fields(ImageFacts)]
    name = hashlib.blake2b(f"{place} {field}".encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return cache_folder() / "shards" / f"{name}.npz", f"{VERSION} {fields} {version}"


def _load_index(shard: ShardFile, field: str) -> Index | None:
    file, stamp = _cache_entry(shard, field)
    try:
        with open_regular(file) as stream, np.load(stream, allow_pickle=False) as cached:
            if str(read_member(cached, "stamp")) == stamp:
                names = ("names", "places", "labels", "faults", "facts")
                return Index(shard, *(read_member(cached, name) for name in names))
    except Exception:  # missing or damaged: it is rebuilt
        pass
    return None


def _save_index(index: Index, field: str) -> None:
    file, stamp = _cache_entry(index.file, field)
    arrays = {name: getattr(index, name) for name in ("names", "places", "labels", "faults", "facts")}
    with suppress(OSError, UserError):  # if the disk is full, the index is rebuilt next time
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary, temporary.open("wb") as stream:
            np.savez(stream, stamp=np.array(stamp), **arrays)
