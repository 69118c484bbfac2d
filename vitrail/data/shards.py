"""WebDataset tar shards: `key.jpg` with its label in `key.cls`, `key.json` or `key.txt`.

Once the headers of an uncompressed tar are read, any image can be read at its offset. So shards are shuffled, verified
and resumed like a folder. The index of a shard is cached until the shard changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vitrail.data.arrays import class_numbers
from vitrail.data.dataset import Array, Found, Numbers, files_version, reads_labels
from vitrail.data.download import cache_folder
from vitrail.data.folder import SPLITS, subfolders
from vitrail.data.images import EXTENSIONS, ImageFacts, UnreadableImage, inspect_image
from vitrail.data.packed import PackedPart, from_stores
from vitrail.data.verify import verify
from vitrail.errors import UserError
from vitrail.files import open_regular, read_text, reading
from vitrail.progress import track
from vitrail.tasks import Multiclass, Task
from vitrail.version import VERSION

_LABELS = (".cls", ".json", ".txt")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_MAX_LABEL = {".cls": 1000, ".txt": 1000, ".json": 2**20}  # bytes
_MOST_SHARDS = 100_000


def is_shards(source: str | Path) -> bool:
    """Whether `source` is a tar file, a pattern of tar files, or a folder of them."""
    path = Path(source).expanduser()
    return bool(_tars_in(path)) if path.is_dir() else path.name.endswith((".tar", *_COMPRESSED))


def open_shards(source: str | Path, label_field: str | None = None, task: type[Task] | None = None) -> Found:
    """The images of tar shards; splits are taken from the names or folders of the shards.

    In a `.json` file the label is the field `label_field`, by default "label".
    """
    paths = _expand(source)
    field = label_field or "label" if reads_labels(task) else ""
    splits: dict[str, list[_Index]] = {}
    for path, index in zip(paths, _indices(paths, field), strict=True):
        splits.setdefault(_split(path), []).append(index)
    stores = {split: _Shards(indices) for split, indices in splits.items()}
    labels = np.concatenate([store.labels for store in stores.values()])
    if not len(labels):
        rule = "images and labels: 17.jpg, 17.cls" if field else "images: 17.jpg, 18.jpg"
        raise UserError(f"{source} contains no samples. A shard is a tar file of {rule}.")
    known = labels != ""
    found = labels[known]
    if all(re.fullmatch(r"-?\d{1,18}", label) for label in found.tolist()):
        found = found.astype(np.int64)
    classes, [numbers] = class_numbers([found], _class_names(paths[0]) if field else None, str(source))
    targets = np.zeros(len(labels), np.int64)
    targets[known] = numbers
    ends = np.cumsum([len(store.labels) for store in stores.values()])[:-1]
    parts = {
        split: PackedPart(store, numbers, store.facts)
        for (split, store), numbers in zip(stores.items(), np.split(targets, ends), strict=True)
    }
    return from_stores(_title(source), Multiclass(classes), parts, source)


# Shard files


def _expand(source: str | Path) -> list[Path]:
    """The shards in a folder, or matching a pattern with {00..17}, {a,b}, * and ?."""
    path = Path(source).expanduser()
    if path.is_dir():
        paths = _tars_in(path)
    elif path.exists():
        paths = [path]
    else:
        paths = []
        for number, text in enumerate(_braces(str(path))):
            if number == _MOST_SHARDS:
                raise UserError(f"{source} names more than {_MOST_SHARDS:,} shards. Give their folder.")
            matches = sorted(map(Path, glob(text)))  # noqa: PTH207  # Path globs no absolute paths
            if not matches:
                raise UserError(f"{source}: there is no shard {text}.")
            paths += matches
    for path in paths:
        if path.name.endswith(_COMPRESSED):
            raise UserError(f"{path} is compressed, which prevents random access. Decompress it to a .tar file.")
    return list(dict.fromkeys(paths))


def _tars_in(folder: Path) -> list[Path]:
    """The tar files in a folder or its split folders; none if it has other subfolders, which are classes."""
    inside = subfolders(folder)
    folders = inside or [folder]
    if any(child.name.lower() not in SPLITS or subfolders(child) for child in inside):
        return []
    return sorted(path for place in folders for path in place.iterdir() if path.name.endswith((".tar", *_COMPRESSED)))


def _braces(text: str) -> Iterator[str]:
    """Brace expansion of ranges, {000..127}, and lists, {train,val}."""
    found = re.search(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}", text)
    if found is None:
        yield text
        return
    first, last, words = found.groups()
    numbers = (str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)) if words is None else ()
    for word in numbers if words is None else words.split(","):
        yield from _braces(text[: found.start()] + word + text[found.end() :])


def _split(path: Path) -> str:
    """The split of a shard, from a word in its name or from its folder; train by default."""
    words = [*re.split(r"[-_.]", path.name.lower()), path.parent.name.lower()]
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _title(source: str | Path) -> str:
    path = Path(source).expanduser().resolve()
    if path.is_dir():
        return path.name
    return path.stem if path.exists() else path.parent.name


def _class_names(shard: Path) -> tuple[str, ...] | None:
    """The class names from `classes.txt` or `classes.json` in the folder of the shards or its parent."""
    for folder in (shard.parent, shard.parent.parent):
        text, document = folder / "classes.txt", folder / "classes.json"
        advice = 'They must be in classes.txt, one per line, or in classes.json: ["cat", "dog"] or {"0": "cat"}'
        if text.is_file():
            with reading(text, "a file of class names", advice):
                return tuple(line.strip() for line in read_text(text).splitlines() if line.strip())
        if document.is_file():
            with reading(document, "a file of class names", advice):
                names = json.loads(read_text(document))
                if isinstance(names, dict):
                    names = [names[str(number)] for number in range(len(names))]
                return tuple(str(name) for name in names)
    return None


# Index


@dataclass(frozen=True, eq=False)
class _Index:
    """The samples of a shard, in arrays, because there may be millions."""

    path: Path
    names: Array  # file names of the images, bytes
    places: Numbers  # N 2: offset and size
    labels: Array  # text; empty if missing
    faults: Array  # text: why a sample is unusable; empty if it is usable
    facts: Numbers  # N F: the fields of ImageFacts


class _Shards:
    """The `Store` of one split: the images in its shards."""

    def __init__(self, indices: Sequence[_Index]):
        self._indices = indices
        self._starts = np.cumsum([0, *(len(index.names) for index in indices)])
        self.labels = np.concatenate([index.labels for index in indices])
        self.facts: list[ImageFacts | str] = [
            fault or ImageFacts(*numbers)
            for index in indices
            for fault, numbers in zip(index.faults.tolist(), index.facts.tolist(), strict=True)
        ]

    def _locate(self, row: int) -> tuple[_Index, int]:
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._indices[shard], row - int(self._starts[shard])

    def read(self, row: int) -> bytes:
        return _read(*self._locate(row))

    def name(self, row: int) -> str:
        index, i = self._locate(row)
        return f"{index.path}/{index.names[i].decode('utf-8', 'replace')}"

    def version(self) -> str:
        return files_version(index.path for index in self._indices)


def _read(index: _Index, i: int) -> bytes:
    offset, size = index.places[i].tolist()
    try:
        # Opened on every read: cheap next to decoding, and there may be more shards than file descriptors.
        with open_regular(index.path) as file:
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise UnreadableImage(str(error.strerror or error).lower()) from error


def _indices(paths: Sequence[Path], field: str) -> list[_Index]:
    """The index of every shard, from the cache or by reading its headers and verifying its images.

    `field` is that of the labels in `.json` files; "" to read no labels.
    """
    found = {path: index for path in paths if (index := _load_index(path, field))}
    new = [path for path in paths if path not in found]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        scanned = pool.map(partial(_scan, field=field), new)
        indices = list(track(scanned, "reading shards", total=len(new), unit="shard"))
    usable = [(index, i) for index in indices for i in np.flatnonzero(index.faults == "").tolist()]
    answers = iter(verify(usable, lambda place: inspect_image(_read(*place))))
    for path, index in zip(new, indices, strict=True):
        faults: list[str] = []
        facts: list[Sequence[int]] = []
        for fault in index.faults.tolist():
            answer = fault or next(answers)
            faults.append(answer if isinstance(answer, str) else "")
            facts.append(_UNKNOWN if isinstance(answer, str) else dataclasses.astuple(answer))
        shape = (len(facts), len(_UNKNOWN))
        found[path] = dataclasses.replace(
            index, faults=np.array(faults, dtype=np.str_), facts=np.array(facts, np.int64).reshape(shape)
        )
        _save_index(found[path], field)
    return [found[path] for path in paths]


_NOT_STORED = (0, -1)  # the offset and size of a file that the shard does not contain
_UNKNOWN = (0,) * len(dataclasses.fields(ImageFacts))


def _scan(path: Path, field: str) -> _Index:
    """The samples of a shard, from its headers and label files."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, dict[str, tuple[int, int]]] = {}
    with reading(path, "a complete tar file", "Download it again."), open_regular(path) as file:
        length, last = path.stat().st_size, -1
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0 or member.offset <= last:  # would be read for ever
                    raise ValueError(f"{member.name} has a size of {member.size}")
                last = member.offset
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
    with path.open("rb") as shard:
        for key in dict.fromkeys([*images, *labels]):
            name, *found = images.get(key, (key.lstrip("/"), 0, 0))
            text, fault = _label(shard, labels.get(key, {}), field) if field else ("", "")
            names.append(name.encode("utf-8", "surrogateescape"))
            places.append(found)
            texts.append(text)
            if tuple(found) == _NOT_STORED:
                fault = "a sparse or truncated file"
            faults.append(fault if key in images else "a label without an image")
    return _Index(
        path,
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
    if size > _MAX_LABEL[end]:
        return "", f"its {end} is too long for a label"
    shard.seek(offset)
    try:
        text = shard.read(size).decode("utf-8").strip()
        if end == ".json":
            value = json.loads(text)[field]
            if isinstance(value, bool) or not isinstance(value, (int, str)):
                return "", f"the field '{field}' of its .json is neither an integer nor text"
            text = str(value).strip()
    except UnicodeDecodeError:
        return "", f"its {end} is not UTF-8 text"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", f"its .json has no field '{field}'"
    return text, "" if text else f"its {end} is empty"


# Cached indices


def _cache_entry(path: Path, field: str) -> tuple[Path, str]:
    """The cache file for the index of a shard, and the stamp that must match for it to be valid."""
    state = path.stat()
    fields = [field.name for field in dataclasses.fields(ImageFacts)]
    name = hashlib.blake2b(f"{path.resolve()} {field}".encode(), digest_size=16).hexdigest()
    return cache_folder() / "shards" / f"{name}.npz", f"{VERSION} {fields} {state.st_size} {state.st_mtime_ns}"


def _load_index(path: Path, field: str) -> _Index | None:
    file, stamp = _cache_entry(path, field)
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as cached:
            if str(cached["stamp"]) == stamp:
                return _Index(path, *(cached[name] for name in ("names", "places", "labels", "faults", "facts")))
    except Exception:  # missing or damaged: it is rebuilt
        pass
    return None


def _save_index(index: _Index, field: str) -> None:
    file, stamp = _cache_entry(index.path, field)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    arrays = {name: getattr(index, name) for name in ("names", "places", "labels", "faults", "facts")}
    with suppress(OSError):  # if the disk is full, the index is rebuilt next time
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            np.savez(stream, stamp=np.array(stamp), **arrays)
        temporary.replace(file)
