"""Tar shards in WebDataset format: `key.jpg` with its label in `key.cls`, `key.json` or `key.txt`.

An image in an uncompressed tar file can be read at its offset. `vitrail shard` writes the offsets to an index, beside
a manifest; for other shards they are read from the headers once. So shards are read by image number, like a folder:
shared between processes, verified and resumed exactly. Shards may be on disk or at an address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob
from itertools import islice
from pathlib import Path

import numpy as np

from vitrail.data.arrays import class_numbers
from vitrail.data.dataset import Array, Found, PackedSplit, Targets, reads_labels
from vitrail.data.folder import SPLITS, subfolders
from vitrail.data.images import ImageFacts
from vitrail.data.packed import PackedPart, from_stores
from vitrail.data.shards.cache import GIGABYTES, RemoteFile
from vitrail.data.shards.fetch import fetch_text, file_facts, file_sha256, is_address
from vitrail.data.shards.files import LocalFile, ShardFile
from vitrail.data.shards.index import Index, indices
from vitrail.data.shards.manifest import (
    ADVICE,
    LONGEST,
    MANIFEST,
    MOST_SHARDS,
    Manifest,
    Part,
    open_index,
    read_manifest,
    shard_rows,
)
from vitrail.data.shards.split import Shard, Shards, ShardSplit, check_room
from vitrail.data.shards.targets import restored
from vitrail.errors import UserError
from vitrail.files import read_text, reading
from vitrail.tasks import Multiclass, Task

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def is_shards(source: str | Path) -> bool:
    """Whether `source` is a tar file, a pattern of tar files, a folder of them, or any address."""
    if is_address(source):
        return True
    path = Path(source).expanduser()
    return bool(_tars_in(path)) if path.is_dir() else path.name.endswith((".tar", *_COMPRESSED))


def open_shards(
    source: str | Path,
    label_field: str | None = None,
    task: type[Task] | None = None,
    cache_gb: float | None = None,
) -> Found:
    """The images of tar shards; splits are taken from the manifest, or from the names or folders of the shards.

    In a `.json` file the label is the field `label_field`, by default "label". `cache_gb` bounds the cache of remote
    shards.
    """
    limit = (GIGABYTES if cache_gb is None else cache_gb) * 2**30
    remote = is_address(source)
    if remote and not str(source).endswith((".tar", *_COMPRESSED)):
        folder = str(source).rstrip("/")
        manifest = read_manifest(fetch_text(f"{folder}/{MANIFEST}", LONGEST), f"{folder}/{MANIFEST}")
        return _open_manifest(source, manifest, label_field, task, lambda part: _remote_part(folder, part, limit))
    if not remote and (path := Path(source).expanduser() / MANIFEST).is_file():
        with reading(path, "a manifest of shards"):
            manifest = read_manifest(read_text(path, LONGEST), path)
        return _open_manifest(source, manifest, label_field, task, lambda part: _local_part(path.parent, part))
    files: list[ShardFile] = (
        [_remote(address, limit) for address in _listed(str(source))]
        if remote
        else [LocalFile(path) for path in _expand(source)]
    )
    check_room(files, source)
    return _open_indexed(source, files, label_field, task)


# With a manifest


def _remote_part(folder: str, part: Part, limit: float) -> RemoteFile:
    return RemoteFile(f"{folder}/{part.file}", part.bytes, part.sha256, part.sha256, limit)


def _local_part(folder: Path, part: Part) -> LocalFile:
    """A file beside a manifest. Its content is not read here: that of a shard takes too long."""
    path = folder / part.file
    with reading(path, "a file of the manifest"):
        size = path.stat().st_size
    if size != part.bytes:
        raise UserError(f"{path} must have {part.bytes:,} bytes, by the manifest, but it has {size:,}. Copy it again.")
    return LocalFile(path, part.sha256)


def _open_manifest(
    source: str | Path,
    manifest: Manifest,
    label_field: str | None,
    task: type[Task] | None,
    place: Callable[[Part], ShardFile],
) -> Found:
    if manifest.kind is None and reads_labels(task):
        raise UserError(f"{source} has no labels: it was written with --unlabelled, for `vitrail pretrain`.")
    if label_field is not None:
        raise UserError(f"--label-column does not apply to {source}: its manifest has the labels. Remove it.")
    shards: list[Shard] = []
    indices: dict[str, tuple[ShardFile, Array]] = {}
    for name, split in manifest.splits.items():
        files = [place(part) for part in split.shards]
        check_room(files, source)
        index = place(split.index)
        if isinstance(index, LocalFile) and file_sha256(index.path) != split.index.sha256:
            raise UserError(f"{index} is damaged: its checksum is not that of the manifest. Copy it again.")
        rows = open_index(index, manifest, split)
        for file, some in zip(files, shard_rows(rows, split.shards), strict=True):
            shards.append(Shard(file, some["name"], some["offset"], some["size"]))
        indices[name] = index, rows
    store, kind, start = Shards(shards), manifest.kind, 0
    parts: dict[str, tuple[Array, Targets]] = {}
    for name, (index, rows) in indices.items():
        targets: Targets = np.zeros(len(rows), np.int64)  # without labels
        if kind is not None:
            with reading(index, "an index of shards", ADVICE):
                targets = restored(kind, np.array(rows["target"]), manifest.classes, store, start)
        parts[name] = np.arange(start, start + len(rows)), targets
        start += len(rows)
    return Found(
        name=_title(source),
        task=Multiclass(("",)) if kind is None else kind(manifest.classes),
        parts=parts,
        make=lambda _, rows, targets: ShardSplit(store, rows, targets, manifest.channels, manifest.bits),
        size=manifest.size,
        channels=manifest.channels,
        bits=manifest.bits,
    )


# Without one


def _open_indexed(
    source: str | Path, files: Sequence[ShardFile], label_field: str | None, task: type[Task] | None
) -> Found:
    field = label_field or "label" if reads_labels(task) else ""
    splits: dict[str, list[Index]] = {}
    for file, index in zip(files, indices(files, field), strict=True):
        splits.setdefault(_split(file), []).append(index)
    labels = np.concatenate([index.labels for found in splits.values() for index in found])
    if not len(labels):
        rule = "images and labels: 17.jpg, 17.cls" if field else "images: 17.jpg, 18.jpg"
        raise UserError(f"{source} contains no samples. A shard is a tar file of {rule}.")
    known = labels != ""
    found = labels[known]
    if all(re.fullmatch(r"-?\d{1,18}", label) for label in found.tolist()):
        found = found.astype(np.int64)
    first = files[0]
    names = _class_names(first.path) if field and isinstance(first, LocalFile) else None
    classes, [numbers] = class_numbers([found], names, str(source))
    targets = np.zeros(len(labels), np.int64)
    targets[known] = numbers
    ends = np.cumsum([sum(len(index.labels) for index in found) for found in splits.values()])[:-1]
    parts = {
        split: PackedPart(Shards([index.shard for index in found]), numbers, _facts(found))
        for (split, found), numbers in zip(splits.items(), np.split(targets, ends), strict=True)
    }
    kind = ShardSplit if isinstance(first, RemoteFile) else PackedSplit
    return from_stores(_title(source), Multiclass(classes), parts, source, kind)


def _facts(indices: Sequence[Index]) -> list[ImageFacts | str]:
    """The facts of every image, or the reason why it is unusable."""
    return [
        fault or ImageFacts(*numbers)
        for index in indices
        for fault, numbers in zip(index.faults.tolist(), index.facts.tolist(), strict=True)
    ]


# Shard files


def _remote(address: str, limit: float) -> RemoteFile:
    return RemoteFile(address, *file_facts(address), limit=limit)


def _listed(source: str) -> list[str]:
    """The addresses of a pattern with {00..17} and {a,b}."""
    if re.search(r"[*?]", source):
        raise UserError(f"{source}: addresses have no * and ?. Name the shards by a range: {{00000..00127}}.tar.")
    return _expanded(source)


def _expand(source: str | Path) -> list[Path]:
    """The shards in a folder, or matching a pattern with {00..17}, {a,b}, * and ?."""
    path = Path(source).expanduser()
    if path.is_dir():
        paths = _tars_in(path)
    elif path.exists():
        paths = [path]
    else:
        paths = []
        for text in _expanded(str(path)):
            matches = sorted(map(Path, glob(text)))  # noqa: PTH207  # Path globs no absolute paths
            if not matches:
                raise UserError(f"{source}: there is no shard {text}.")
            paths += matches
    _refuse_compressed(map(str, paths))
    return list(dict.fromkeys(paths))


def _expanded(source: str) -> list[str]:
    names = list(islice(_braces(source), MOST_SHARDS + 1))
    if len(names) > MOST_SHARDS:
        raise UserError(f"{source} names more than {MOST_SHARDS:,} shards. Give their folder.")
    _refuse_compressed(names)
    return list(dict.fromkeys(names))


def _refuse_compressed(names: Iterable[str]) -> None:
    for name in names:
        if name.endswith(_COMPRESSED):
            raise UserError(f"{name} is compressed, which prevents random access. Decompress it to a .tar file.")


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


def _split(file: ShardFile) -> str:
    """The split of a shard, from a word in its name or from its folder; train by default."""
    path = Path(file.address if isinstance(file, RemoteFile) else file.path)
    words = [*re.split(r"[-_.]", path.name.lower()), path.parent.name.lower()]
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _title(source: str | Path) -> str:
    if is_address(source):
        path = Path(re.sub(r"[?#].*", "", str(source)))
        name = path.parent.name if "{" in path.name else path.name.removesuffix(".tar")
        return re.sub(r"[^\w.-]", "-", name).strip(".") or "shards"
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
