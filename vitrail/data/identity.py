"""The identity of a data set: what must not change between the start of a run and its resumption."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.dataset import ArraySplit, Data, MappedSplit, PackedSplit, Split, Subset
from vitrail.errors import shortlist

_SAMPLE = 64  # images of an array or shard whose content is hashed; of files, the size of each is


def identity(data: Data) -> dict[str, Any]:
    """Plain values that change with the classes, the labels, or the names, order or content of the images.

    Names are relative and times are left out, so a copy of the data has the same identity.
    """
    digests = [split.digest() for split in data.splits.values()]
    known = [digest for digest in digests if digest is not None]
    listed = [split for split, digest in zip(data.splits.values(), digests, strict=True) if digest is None]
    names = [[split.name(i) for i in range(len(split))] if not split.streamed else [] for split in listed]
    ends = [end for each in names if each for end in (min(each), max(each))]
    root = len(commonprefix(ends))  # noqa: RUF071  # names of arrays are no paths
    return {
        "classes": list(data.classes),
        "images": {name: len(split) for name, split in data.splits.items()},
        "labels": data.fingerprint(),
        "names": _hash(name[root:] for each in names for name in each),
        "contents": _hash(chain(known, (trace for split in listed for trace in _traces(split)))),
    }


def differences(before: Mapping[str, Any] | str, now: Mapping[str, Any]) -> list[str]:
    """What differs in two identities, in words; those of earlier versions were only the hash of the labels."""
    if not isinstance(before, Mapping):
        return [] if before == now["labels"] else ["other images, labels or classes"]
    if before["classes"] != now["classes"]:
        new, gone = (sorted({*a["classes"]} - {*b["classes"]}) for a, b in ((now, before), (before, now)))
        lists = [f"{word} {shortlist(each, 3)}" for word, each in (("new", new), ("missing", gone)) if each]
        return [f"the classes ({'; '.join(lists) or 'in another order'})"]
    if before["images"] != now["images"]:
        return [
            f"{name} has {now['images'].get(name, 0):,} images instead of {before['images'].get(name, 0):,}"
            for name in dict.fromkeys([*before["images"], *now["images"]])
            if now["images"].get(name) != before["images"].get(name)
        ]
    words = {
        "names": "the names or the order of the images",
        "labels": "the labels",
        "contents": "the content of the images",
    }
    return [text for name, text in words.items() if before[name] != now[name]]


def _traces(split: Split) -> Iterator[str]:
    """Something of each image that changes with its content and is cheap to read."""
    inner = split
    while isinstance(inner, Subset):
        inner = inner.whole
    if inner.streamed or not len(split):
        return
    if isinstance(split.source(0), Path):
        for i in range(len(split)):
            path = split.source(i)
            assert isinstance(path, Path)
            yield str(path.stat().st_size)
    elif isinstance(inner, PackedSplit | ArraySplit | MappedSplit):  # items of other objects may be random
        for i in np.unique(np.linspace(0, len(split) - 1, _SAMPLE).astype(int)).tolist():
            read = split.source(i)
            assert not isinstance(read, Path)
            content = read()
            content = content if isinstance(content, bytes) else np.ascontiguousarray(content).tobytes()
            yield hashlib.blake2b(content, digest_size=16).hexdigest()


def _hash(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()
