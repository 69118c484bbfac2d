"""Data opened without labels, for a task that reads none."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from vitrail import tasks
from vitrail.data import Data, Split, open_data
from vitrail.tasks.pretraining import Pretraining


@dataclass(frozen=True)
class Unlabelled(Pretraining):
    name: ClassVar[str] = "unlabelled-test"
    title: ClassVar[str] = "self-supervision"

    @classmethod
    def small(cls, config):
        raise NotImplementedError

    def objective(self, model, config, targets):
        raise NotImplementedError


def unlabelled(source: object, **settings: object) -> Data:
    """The data opened without labels; it has no classes, and targets without columns."""
    tasks.register(Unlabelled)
    try:
        data = open_data(source, task=Unlabelled.name, **settings)
    finally:
        del tasks.TASKS[Unlabelled.name]
    assert data.task == Unlabelled()
    assert data.classes == ()
    for split in data.splits.values():
        assert split.targets.shape == (len(split), 0)
        assert split.targets.dtype == np.float32
    return data


def same(one: Data, other: Data) -> None:
    """Both have the same images in the same order."""
    assert (one.name, one.size, one.channels, one.bits) == (other.name, other.size, other.channels, other.bits)
    assert list(one.splits) == list(other.splits)
    for split, images in one.splits.items():
        twin = other.splits[split]
        assert names(images) == names(twin)
        assert all(np.array_equal(images.image(i), twin.image(i)) for i in range(len(images)))


def names(split: Split) -> list[str]:
    return [split.name(i) for i in range(len(split))]


def greys(*splits: Split) -> list[int]:
    """The grey values of all images, sorted."""
    return sorted(int(split.image(i)[0, 0, 0]) for split in splits for i in range(len(split)))


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (6, 4), value).save(stream, "PNG")
    return stream.getvalue()


def put(folder: Path, *files: str) -> Path:
    """Images in a folder; their grey values are their numbers in this list."""
    for i, file in enumerate(files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(png(i))
    return folder
