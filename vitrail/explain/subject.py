"""What is explained: a model, the pictures that it is shown, and the data that it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data import Data
from vitrail.data.images import UnreadableImage
from vitrail.data.loader import batches
from vitrail.data.pixels import Pixels, picture
from vitrail.data.targets import in_words
from vitrail.errors import UserError
from vitrail.evaluate.predict import Prediction, listed, read_ahead, say
from vitrail.evaluate.verbs import own_data
from vitrail.explain.attention import check_patch
from vitrail.models import Model
from vitrail.weights import Card, open_body, open_card

PICTURES = 20  # of the run's own data, where none are given
SAMPLE = 256  # images that an average is taken over, and the most pictures that can be given


@dataclass(frozen=True, eq=False)
class Picture:
    """One image, as the model sees it."""

    name: str
    pixels: Pixels  # C h w
    said: Prediction | None  # None if the model has no head
    true: str | None = None

    @property
    def view(self) -> NDArray[np.uint8]:
        """The image for a person to look at: (h, w, 3)."""
        return np.asarray(picture(self.pixels.transpose(1, 2, 0)).convert("RGB"))

    @property
    def caption(self) -> str:
        """What the model says, and what is true where it is something else."""
        if self.said is None:
            return self.true or Path(self.name).stem
        pairs = zip(self.said.labels, self.said.values or self.said.probabilities, strict=True)
        number = "{:.3g}" if self.said.values else "{:.0%}"
        words = ", ".join(f"{label} {number.format(value)}" for label, value in pairs) or "(no label)"
        return f"{words}, not {self.true}" if self.wrong else words

    @property
    def wrong(self) -> bool:
        """Whether the true class is known, and the model says another."""
        if self.said is None or self.true is None or self.said.task != "multiclass":
            return False
        return self.said.labels[0] != self.true


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, the name of its file, and the arrays that it shows."""

    name: str
    figure: Figure
    arrays: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Subject:
    """What every figure is drawn from."""

    run: str | Path
    model: Model
    card: Card
    given: bool  # whether the pictures were given; else they are validation images of the run's own data
    pictures: Sequence[Picture]
    unreadable: Sequence[tuple[str, str]] = ()  # file, reason
    patch: tuple[int, int] | None = None
    batch_size: int = 32
    workers: int = 2
    device: str = "cpu"
    seed: int = 0

    @cached_property
    def data(self) -> Data:
        """The data that the run was trained on, opened when it is needed; a UserError if it cannot be."""
        return own_data(self.run, self.card)

    def batches(self) -> Iterator[Tensor]:
        """The pictures as the model reads them: normalised, (B, C, H, W)."""
        for at in range(0, len(self.pictures), self.batch_size):
            pixels = np.stack([picture.pixels for picture in self.pictures[at : at + self.batch_size]])
            yield self.card.preprocess.normalise(torch.from_numpy(pixels).to(self.device))

    @property
    def sampled(self) -> int:
        """How many images `sample` has."""
        return len(self.pictures) if self.given else min(SAMPLE, len(self.data.splits["val"]))

    def sample(self) -> Iterator[Tensor]:
        """What averages are taken over: the pictures that were given, or up to 256 validation images, normalised."""
        if self.given:
            yield from self.batches()
            return
        split = self.data.splits["val"]
        chosen = spread(self.data, SAMPLE, self.seed)
        for pixels, _ in batches(split, self.card.preprocess, self.batch_size, self.workers, chosen):
            yield self.card.preprocess.normalise(pixels.to(self.device))


def open_subject(
    run: str | Path,
    images: Sequence[str | Path] = (),
    *,
    patch: tuple[int, int] | None = None,
    batch_size: int = 32,
    workers: int = 2,
    device: str = "cpu",
    seed: int = 0,
) -> Subject:
    """Opens a run or anybody's weights, and reads the images of files, folders and globs, or some of the run's own."""
    files = list(islice(listed(images), SAMPLE + 1)) if images else []
    if len(files) > SAMPLE:
        raise UserError(f"At most {SAMPLE} pictures can be explained at a time, but more were given.")
    has_head = bool(open_card(run).classes)
    model, card = open_body(run, device)
    if patch is not None:
        check_patch(model, *patch)
    subject = Subject(run, model, card, bool(images), (), (), patch, batch_size, workers, device, seed)
    if images:
        return _with_files(subject, files, has_head)
    return _with_own(subject, has_head)


def _with_files(subject: Subject, files: Sequence[str], has_head: bool) -> Subject:
    pixels: dict[str, Pixels] = {}
    unreadable: list[tuple[str, str]] = []
    with closing(read_ahead(files, subject.card.preprocess, subject.workers, 2 * subject.batch_size)) as read:
        for file, content in read:
            if isinstance(content, UnreadableImage):
                unreadable.append((file, str(content)))
            else:
                pixels[file] = content
    if not pixels:
        raise UserError(f"No image could be read: {unreadable[0][0]} ({unreadable[0][1]}).")
    pictures = [Picture(file, content, None) for file, content in pixels.items()]
    subject = replace(subject, pictures=pictures, unreadable=unreadable)
    return _with_answers(subject) if has_head else subject


def _with_own(subject: Subject, has_head: bool) -> Subject:
    """Some validation images of the run's own data, as many of each class."""
    data, card = subject.data, subject.card
    split, chosen = data.splits["val"], spread(data, PICTURES, subject.seed)
    words = [word for word, _ in in_words(data.task, data.classes, split.targets[chosen])]
    read = batches(split, card.preprocess, subject.batch_size, subject.workers, chosen)
    pixels = [image for batch, _ in read for image in batch.numpy()]
    pictures = [Picture(split.name(i), image, None, word) for i, image, word in zip(chosen, pixels, words, strict=True)]
    subject = replace(subject, pictures=pictures)
    return _with_answers(subject) if has_head else subject


def _with_answers(subject: Subject) -> Subject:
    """The same pictures, with what the model says of them."""
    top = 1 if subject.card.task == "multiclass" else None
    with torch.inference_mode():
        outputs = [row for images in subject.batches() for row in subject.model(images).float().cpu()]
    pictures = [
        replace(picture, said=say(picture.name, row, subject.card, top))
        for picture, row in zip(subject.pictures, outputs, strict=True)
    ]
    return replace(subject, pictures=pictures)


def spread(data: Data, count: int, seed: int) -> list[int]:
    """The numbers of some validation images, in order of class: drawn at random, of every class as many."""
    targets = data.splits["val"].targets
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(targets))
    if data.task != "multiclass":
        return sorted(order[:count].tolist())
    seen: Counter[int] = Counter()
    turns = []  # how many of its class come before each image
    for target in targets[order].tolist():
        turns.append(seen[target])
        seen[target] += 1
    chosen = order[np.argsort(turns, kind="stable")[:count]]
    return sorted(chosen.tolist(), key=lambda i: (targets[i], i))
