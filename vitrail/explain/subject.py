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

from vitrail.config import Size
from vitrail.data import Data, Split
from vitrail.data.dataset import Targets, Task
from vitrail.data.images import UnreadableImage
from vitrail.data.loader import batches
from vitrail.data.pixels import Pixels, to_pil
from vitrail.data.targets import in_words
from vitrail.errors import UserError, nearest, shortlist
from vitrail.evaluate.features import run_split, split_features
from vitrail.evaluate.predict import Prediction, listed, read_ahead, say
from vitrail.evaluate.verbs import own_data, split_name
from vitrail.explain.attention import check_patch
from vitrail.explain.geometry import Attentive, attends
from vitrail.models import Model
from vitrail.weights import Card, home, open_card, open_run

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
        return np.asarray(to_pil(self.pixels.transpose(1, 2, 0)).convert("RGB"))

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
    given: bool  # whether the pictures were given; else they are images of the data
    pictures: Sequence[Picture]
    unreadable: Sequence[tuple[str, str]] = ()  # file, reason
    patch: tuple[int, int] | None = None
    batch_size: int = 32
    workers: int = 2
    device: str = "cpu"
    seed: int = 0
    source: str | Path | None = None  # other data than the run's own
    target: int | None = None  # the class to explain, instead of the likeliest
    instead: int | None = None  # the class that it is set against

    @property
    def attentive(self) -> Attentive:
        """The model, for figures of its attention; a UserError if it has none."""
        if not attends(self.model):
            raise UserError(f"What a model attends to cannot be drawn of a {self.card.model}: it has no attention.")
        return self.model

    @cached_property
    def data(self) -> Data:
        """The data that was given or that the run was trained on, opened when it is needed."""
        return own_data(self.run, self.card, self.source)

    @property
    def with_data(self) -> bool:
        """Whether the data is to be shown, not only pictures that were given."""
        return not self.given or self.source is not None

    @property
    def split(self) -> Split:
        """The images of the data that are shown: its validation images, or the test images or all, if it has none."""
        return self.data.splits[split_name(self.data)]

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """The feature vectors of the split, (N, D), which are kept in the run."""
        file = home(self.run) / "features" / f"{self.data.name}-{split_name(self.data)}.npz"
        return split_features(
            self.model,
            self.split,
            self.card.preprocess,
            file,
            batch_size=self.batch_size,
            workers=self.workers,
            device=self.device,
        )

    @cached_property
    def outputs(self) -> NDArray[np.float32]:
        """What the model says of every image of the split, (N, K); a UserError if it has no head."""
        if not self.has_head:
            raise UserError("There are no predictions: the model has no head.")
        outputs, _ = run_split(
            self.model,
            self.split,
            self.card.preprocess,
            batch_size=self.batch_size,
            workers=self.workers,
            device=self.device,
            title="predicting",
        )
        return outputs

    @property
    def has_head(self) -> bool:
        return bool(open_card(self.run).classes)

    def batches(self, size: int | None = None) -> Iterator[Tensor]:
        """The pictures as the model reads them: normalised, (B, C, H, W)."""
        size = size or self.batch_size
        for at in range(0, len(self.pictures), size):
            pixels = np.stack([picture.pixels for picture in self.pictures[at : at + size]])
            yield self.card.preprocess.normalise(torch.from_numpy(pixels).to(self.device))

    def fewer(self, count: int) -> Subject:
        """The same with some of the pictures, taken evenly from all."""
        chosen = np.unique(np.linspace(0, len(self.pictures) - 1, count).round().astype(int))
        return replace(self, pictures=[self.pictures[i] for i in chosen])

    def embeddings(self) -> NDArray[np.float32]:
        """The feature vectors of the pictures, (B, D)."""
        with torch.inference_mode():
            return np.concatenate([self.model.embed(images).float().cpu().numpy() for images in self.batches()])

    @property
    def sampled(self) -> int:
        """How many images `sample` has."""
        return len(self.pictures) if self.given else min(SAMPLE, len(self.split))

    def sample(self) -> Iterator[Tensor]:
        """What averages are taken over: the pictures that were given, or up to 256 images of the data, normalised."""
        if self.given:
            yield from self.batches()
            return
        chosen = spread(self.data.task, self.split.targets, SAMPLE, self.seed)
        for pixels, _ in batches(self.split, self.card.preprocess, self.batch_size, self.workers, chosen):
            yield self.card.preprocess.normalise(pixels.to(self.device))


def open_subject(
    run: str | Path,
    images: Sequence[str | Path] = (),
    *,
    data: str | Path | None = None,
    patch: tuple[int, int] | None = None,
    target: str | None = None,
    instead: str | None = None,
    batch_size: int = 32,
    workers: int = 2,
    device: str = "cpu",
    seed: int = 0,
    img_size: int | Size | None = None,
) -> Subject:
    """Opens a run or anybody's weights, and reads the images of files, folders and globs, or some of the data's."""
    files = list(islice(listed(images), SAMPLE + 1)) if images else []
    if len(files) > SAMPLE:
        raise UserError(f"At most {SAMPLE} pictures can be explained at a time, but more were given.")
    classes = open_card(run).classes
    chosen, other = (None if name is None else _number(name, classes) for name in (target, instead))
    if other is not None and (chosen == other or len(classes) == 1):
        raise UserError(f"'{instead}' cannot be set against itself: --target and --instead must differ.")
    model, card = open_run(run, device, classes=None if classes else 1, img_size=img_size)  # an idle head, if none
    subject = Subject(
        run, model, card, bool(images), (), (), patch, batch_size, workers, device, seed, data, chosen, other
    )
    if patch is not None:
        check_patch(subject.attentive, *patch)
    subject = _with_files(subject, files) if images else _with_own(subject)
    return _with_answers(subject) if classes else subject


def _number(name: str, classes: Sequence[str]) -> int:
    """The number of a class."""
    if name not in classes:
        raise UserError(
            f"The model knows no class '{name}'.{nearest(name, classes)} It knows {shortlist(classes, 10)}."
        )
    return classes.index(name)


def _with_files(subject: Subject, files: Sequence[str]) -> Subject:
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
    return replace(subject, pictures=pictures, unreadable=unreadable)


def _with_own(subject: Subject) -> Subject:
    """Some images of the data, as many of each class."""
    data, split, card = subject.data, subject.split, subject.card
    chosen = spread(data.task, split.targets, PICTURES, subject.seed)
    words = [word for word, _ in in_words(data.task, data.classes, split.targets[chosen])]
    read = batches(split, card.preprocess, subject.batch_size, subject.workers, chosen)
    pixels = [image for batch, _ in read for image in batch.numpy()]
    pictures = [Picture(split.name(i), image, None, word) for i, image, word in zip(chosen, pixels, words, strict=True)]
    return replace(subject, pictures=pictures)


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


def spread(task: Task, targets: Targets, count: int, seed: int) -> list[int]:
    """The numbers of some images, in order of class: drawn at random, of every class as many."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(targets))
    if task != "multiclass":
        return sorted(order[:count].tolist())
    seen: Counter[int] = Counter()
    turns = []  # how many of its class come before each image
    for target in targets[order].tolist():
        turns.append(seen[target])
        seen[target] += 1
    chosen = order[np.argsort(turns, kind="stable")[:count]]
    return sorted(chosen.tolist(), key=lambda i: (targets[i], i))
