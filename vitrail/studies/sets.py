"""The data of a study: one test set, held-out images for the choice of settings, and subsets of the training images.

They are ordinary data sets in the study's folder: `.npz` files of arrays, tables of image files.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data import ArraySplit, Data, FileSplit, Split, open_data
from vitrail.data.dataset import MappedSplit, Numbers
from vitrail.data.holdout import stratify
from vitrail.errors import UserError
from vitrail.files import atomic_write, write_text

_HELD_OUT = 1000  # most images on which settings are chosen and epochs are kept
_TEST = 10_000  # most test images
_SUPPORT = 1000  # images to choose few-shot examples from
SHOTS = (1, 5, 10)


@dataclass(frozen=True)
class Cut:
    """A data set cut for a study."""

    data: Data
    train: Split
    test: Split
    rest: Numbers  # of the training split, without the held-out images
    held: Numbers
    tested: Numbers  # of the test split
    folder: Path  # for the files
    kept: tuple[int, ...] = ()  # numbers of the classes, if not all

    @property
    def name(self) -> str:
        """Of the files."""
        return self.data.name + (f"-classes{self.kept[0]}to{self.kept[-1]}" if self.kept else "")

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.data.classes[i] for i in self.kept) if self.kept else self.data.classes

    def halves(self) -> tuple[Cut, Cut]:
        """The first half of the classes, to pre-train on, and the second, to transfer to."""
        count = len(self.data.classes)
        first, second = tuple(range(count // 2)), tuple(range(count // 2, count))
        return self._only(first), self._only(second)

    def _only(self, kept: tuple[int, ...]) -> Cut:
        def own(split: Split, numbers: Numbers) -> Numbers:
            return numbers[np.isin(split.targets[numbers], kept)]

        rest, held = own(self.train, self.rest), own(self.train, self.held)
        return replace(self, rest=rest, held=held, tested=own(self.test, self.tested), kept=kept)

    @property
    def images(self) -> int:
        return len(self.rest)

    @property
    def arrays(self) -> bool:
        """Whether its files are of arrays; else they are tables, in which an image cannot be twice."""
        return isinstance(self.train, ArraySplit | MappedSplit)

    def file(self, images: int | None = None, seed: int = 0, times: int = 1) -> Path:
        """The file of a data set with some of the training images, or all; writes it if it is missing.

        Training images are in it `times` times, which only files of arrays can have.
        """
        count = self.images if images is None else min(images, self.images)
        whole = count == self.images
        stem = f"{self.name}-{count}" + ("" if whole else f"-seed{seed}") + ("" if times == 1 else f"-{times}times")
        path = self.folder / f"{stem}.{'npz' if self.arrays else 'csv'}"
        if not path.exists():
            numbers = np.tile(self.drawn(count, seed), times)
            parts = {"train": (self.train, numbers), "val": (self.train, self.held), "test": (self.test, self.tested)}
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = self.kept or tuple(range(len(self.data.classes)))
            (_write_arrays if self.arrays else _write_table)(path, parts, self.data.classes, kept)
        return path

    def support(self, images: int | None = None) -> Path:
        """The file whose training images few-shot classifiers choose from; by default enough for 20 of each class.

        Raises UserError if a class has too few.
        """
        if images is None:
            rarest = min(np.unique(self.train.targets[self.rest], return_counts=True)[1])
            images = max(_SUPPORT, math.ceil(20 * self.images / rarest))
        numbers = self.drawn(min(images, self.images), 0)
        for i, name in zip(self.kept or range(len(self.data.classes)), self.classes, strict=True):
            if (count := int((self.train.targets[numbers] == i).sum())) < SHOTS[-1]:
                raise UserError(
                    f"Few-shot classification needs {SHOTS[-1]} training images of each class, but '{name}' of "
                    f"{self.data.name} has {count} besides those held out. Use other data."
                )
        return self.file(images)

    def drawn(self, count: int, seed: int) -> Numbers:
        """A stratified subset of the training images; a larger one of the same seed contains it, up to rounding."""
        if count >= self.images:
            return self.rest
        targets = self.train.targets[self.rest]
        _, chosen = stratify(targets, count / self.images, seed)
        return self.rest[chosen]


def cut(source: str, folder: Path, data_dir: str | None = None) -> Cut:
    """Opens a data set and cuts it. Its test split is kept, else its validation images are the test."""
    data = open_data(source, data_dir=data_dir)
    if not data.task.single:
        raise UserError(f"A study needs one class per image, but {source} is {data.task.title}. Use other data.")
    train, test = data.splits["train"], data.splits.get("test", data.splits["val"])
    if not isinstance(train, ArraySplit | MappedSplit | FileSplit):
        raise UserError(
            f"A study needs a folder of images, a table, an .npz or .npy file or a built-in data set, but {source} is "
            "none of them."
        )
    share = min(_HELD_OUT / len(train), 0.2)
    rest, held = stratify(train.targets, share, 0)
    tested: Numbers = np.arange(len(test))
    if len(test) > _TEST:
        _, tested = stratify(test.targets, _TEST / len(test), 0)
    return Cut(data, train, test, rest, held, tested, folder)


def check_size(cut: Cut, study: str, images: int, classes: int) -> None:
    """Raises UserError for data that is too small for a study."""
    if len(cut.data.classes) < classes:
        raise UserError(
            f"The study '{study}' needs {classes} classes, but {cut.data.name} has {len(cut.data.classes)}. Use other "
            "data."
        )
    if cut.images < images:
        raise UserError(
            f"The study '{study}' needs {images:,} training images, but {cut.data.name} has {cut.images:,} besides "
            "those held out. Use other data."
        )


def _write_arrays(
    path: Path, parts: dict[str, tuple[Split, Numbers]], classes: tuple[str, ...], kept: tuple[int, ...]
) -> None:
    arrays: dict[str, NDArray[np.generic]] = {"classes": np.array([classes[i] for i in kept])}
    for name, (split, numbers) in parts.items():
        assert isinstance(split, ArraySplit | MappedSplit)
        arrays |= {f"x_{name}": split.take(numbers), f"y_{name}": np.searchsorted(kept, split.targets[numbers])}
    with atomic_write(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def _write_table(
    path: Path, parts: dict[str, tuple[Split, Numbers]], classes: tuple[str, ...], _kept: tuple[int, ...]
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "label", "split"])
    for name, (split, numbers) in parts.items():
        assert isinstance(split, FileSplit)
        for i in numbers:
            writer.writerow([split.paths[i].resolve(), classes[split.targets[i]], name])
    write_text(path, text.getvalue())
