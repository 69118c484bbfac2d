"""The subject of an explanation: a model, images, and the data they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import Size
from vitrail.data import Data, Split
from vitrail.data.dataset import Subset, Targets, choose
from vitrail.data.image_like import GivenImage, ImageLike, given
from vitrail.data.images import UnreadableImage
from vitrail.data.loader import batches
from vitrail.data.pixels import Pixels, to_pil
from vitrail.errors import UserError, nearest, shortlist, shown
from vitrail.evaluate.features import split_features, split_scores
from vitrail.evaluate.measure import own_data, split_name
from vitrail.evaluate.predict import listed
from vitrail.explain.attention import check_patch
from vitrail.explain.geometry import attends
from vitrail.models import Model
from vitrail.runs.predictor import Predictor, read_ahead
from vitrail.runs.run import Run
from vitrail.runs.words import classify_by, label_names, warn_of_cut
from vitrail.tasks import Task
from vitrail.tasks.placement import fitted
from vitrail.tasks.task import Answer
from vitrail.weights import Card, open_card, open_run

PICTURES = 20  # validation images explained if no images are given
SHEET = 24  # given images explained, unless asked for more
SAMPLE = 256  # images to average over; also the maximum that can be given
MOST = 10_000  # images of the data searched for neighbours and the worst predictions


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as the model sees it, with the model's answer."""

    name: str
    pixels: Pixels  # C h w
    answer: Answer | None  # None if the model has no head
    true: str | None = None
    wrong: bool = False  # the true class is known and was not predicted

    @property
    def view(self) -> NDArray[np.uint8]:
        """The image for display: (h, w, 3)."""
        return np.asarray(to_pil(self.pixels.transpose(1, 2, 0)).convert("RGB"))

    @property
    def caption(self) -> str:
        """The answer, and the truth if they differ; without a head the truth or the file name."""
        if self.answer is None:
            return self.true or Path(self.name).stem
        return f"{self.answer.text(0)}, not {self.true}" if self.wrong else self.answer.text(0)


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, its file stem, and the arrays behind it."""

    name: str
    figure: Figure
    arrays: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with images and data, from which all figures are drawn."""

    run: str | Path
    model: Model
    card: Card
    given: bool  # the pictures were given, not taken from the data
    pictures: Sequence[Picture]
    unreadable: Sequence[tuple[str, str]] = ()  # file, reason
    patch: tuple[int, int] | None = None
    batch_size: int = 32
    workers: int = 2
    device: str = "cpu"
    seed: int = 0
    source: str | Path | None = None  # data other than the run's own
    target: int | None = None  # class to explain; by default the predicted one
    instead: int | None = None  # class to contrast it with
    left_out: int = 0  # images that were given but are too many for one sheet per kind

    @property
    def attentive(self) -> Model:
        """The model; a UserError if it has no attention."""
        if not attends(self.model):
            raise UserError(f"Attention cannot be drawn for a {self.card.model}: it has no attention layers.")
        return self.model

    @cached_property
    def data(self) -> Data:
        """The given data, or that of the run, opened on first use."""
        return own_data(self.run, self.card, self.source)

    @property
    def with_data(self) -> bool:
        """Whether figures of the data are drawn, not only of given pictures."""
        return not self.given or self.source is not None

    @cached_property
    def split(self) -> Split:
        """The validation split of the data, or the test split or all images if there is none.

        Above 10,000 images it is a random sample, to avoid reading all of a large data set.
        """
        split = self.data.splits[split_name(self.data)]
        if len(split) <= MOST or split.streamed:  # a stream is read sequentially anyway
            return split
        return Subset(split, choose(len(split), MOST, self.seed))

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """The feature vectors of the split, (N, D), cached in the run."""
        file = Run.of(self.run).features_file(self.data.name, split_name(self.data))
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
        """The outputs for every image of the split, (N, K); a UserError if the model has no head."""
        if not self.has_head:
            raise UserError("There are no predictions: the model has no head.")
        _, outputs, _ = split_scores(
            Predictor.of(self.model, self.card, self.device),
            self.split,
            Run.of(self.run).outputs_file(self.data.name, split_name(self.data)),
            keep=False,  # the image size may differ from the run's
            batch_size=self.batch_size,
            workers=self.workers,
            device=self.device,
            title="predicting",
        )
        if outputs is None:
            raise UserError("The model's outputs are too large to be compared per image.")
        return outputs

    @property
    def has_head(self) -> bool:
        """Whether the model makes predictions, not only features."""
        return bool(self.card.classes)

    def batches(self, size: int | None = None) -> Iterator[Tensor]:
        """The pictures in normalised batches, (B, C, H, W)."""
        size = size or self.batch_size
        for at in range(0, len(self.pictures), size):
            pixels = np.stack([picture.pixels for picture in self.pictures[at : at + size]])
            yield self.card.preprocess.normalise(torch.from_numpy(pixels).to(self.device))

    def fewer(self, count: int) -> Subject:
        """The same subject with at most `count` pictures, evenly spaced."""
        chosen = np.unique(np.linspace(0, len(self.pictures) - 1, count).round().astype(int))
        return replace(self, pictures=[self.pictures[i] for i in chosen])

    def embeddings(self) -> NDArray[np.float32]:
        """The feature vectors of the pictures, (B, D)."""
        with torch.inference_mode():
            return np.concatenate([self.model.embed(images).float().cpu().numpy() for images in self.batches()])

    @property
    def sampled(self) -> int:
        """The number of images in `sample`."""
        return len(self.pictures) if self.given else min(SAMPLE, len(self.split))

    def sample(self) -> Iterator[Tensor]:
        """Images to average over, normalised: the given pictures, or up to 256 images of the data."""
        if self.given:
            yield from self.batches()
            return
        chosen = spread(self.data.task, self.split.targets, SAMPLE, self.seed)
        for pixels, _ in batches(self.split, self.card.preprocess, self.batch_size, self.workers, chosen):
            yield self.card.preprocess.normalise(pixels.to(self.device))


def open_subject(
    run: str | Path,
    images: ImageLike | Iterable[ImageLike] = (),
    *,
    data: str | Path | None = None,
    patch: tuple[int, int] | None = None,
    labels: str | Sequence[str] | None = None,
    target: str | None = None,
    instead: str | None = None,
    batch_size: int = 32,
    workers: int = 2,
    device: str = "cpu",
    seed: int = 0,
    img_size: int | Size | None = None,
    most: int | None = None,
) -> Subject:
    """Opens a run or weights file, and reads the given images, or some of the data; with `labels`, as a classifier.

    Of more than `most` images, by default 24, some are chosen at even distances.
    """
    if most is not None and not 1 <= most <= SAMPLE:
        raise UserError(f"'pictures' must be from 1 to {SAMPLE}, but it is {most}.")
    card = open_card(run)
    asked = not (isinstance(images, Sequence) and not images)
    every = list(given(listed(images), card.preprocess.channels)) if asked else []
    limit = SHEET if most is None else most
    files = [every[i] for i in np.unique(np.linspace(0, len(every) - 1, min(limit, len(every))).round().astype(int))]
    words = None if labels is None else label_names(labels)
    classes = card.task.output_names if words is None else words
    if not classes and card.task.several and (target is not None or instead is not None):
        word = shown(target or instead)
        raise UserError(f"{run} has no classes of its own, so there is no {word}. Give words to choose from: --labels.")
    if not classes and (target is not None or instead is not None):
        raise UserError(f"{run} has no head, so there are no classes to explain. Remove --target and --instead.")
    chosen, other = (None if name is None else _number(name, classes) for name in (target, instead))
    if other is not None and (chosen == other or len(classes) == 1):
        raise UserError(f"--target and --instead must be different classes, but both are '{instead}'.")
    model, card = open_run(run, device, img_size=img_size, headless=True)
    if words is not None:
        warn_of_cut(card, words)
        named = classify_by(Predictor.of(model, card, device), words)
        assert named.module is not None
        model, card = named.module, named.card
    subject = Subject(
        run, model, card, bool(files), (), (), patch, batch_size, workers, device, seed, data, chosen, other
    )
    if most is None:
        subject = replace(subject, left_out=len(every) - len(files))
    if patch is not None:
        check_patch(subject.attentive, *patch)
    subject = _with_files(subject, files) if files else _with_own(subject)
    return _with_answers(subject) if classes else subject


def _number(name: str, classes: Sequence[str]) -> int:
    """The index of a class."""
    if name not in classes:
        raise UserError(f"The model has no class '{name}'.{nearest(name, classes)} It has {shortlist(classes, 10)}.")
    return classes.index(name)


def _with_files(subject: Subject, files: Sequence[GivenImage]) -> Subject:
    pictures: list[Picture] = []
    unreadable: list[tuple[str, str]] = []
    predictor = Predictor.of(subject.model, subject.card, subject.device)
    with closing(read_ahead(files, predictor.pixels, subject.workers, 2 * subject.batch_size)) as read:
        for file, content in read:
            if isinstance(content, UnreadableImage):
                unreadable.append((file.name, str(content)))
            else:
                pictures.append(Picture(file.name, content, None))
    if not pictures:
        raise UserError(f"No image could be read: {unreadable[0][0]} ({unreadable[0][1]}).")
    return replace(subject, pictures=pictures, unreadable=unreadable)


def _with_own(subject: Subject) -> Subject:
    """The subject with some images of its data, balanced over the classes."""
    data, split, card = subject.data, subject.split, subject.card
    chosen = spread(data.task, split.targets, PICTURES, subject.seed)
    words = [word for word, _ in data.task.describe(split.targets[chosen])]
    read = batches(split, card.preprocess, subject.batch_size, subject.workers, chosen)
    pixels = [image for batch, _ in read for image in batch.numpy()]
    pictures = [Picture(split.name(i), image, None, word) for i, image, word in zip(chosen, pixels, words, strict=True)]
    return replace(subject, pictures=pictures)


def _with_answers(subject: Subject) -> Subject:
    """The subject with the model's answers for its pictures."""
    task = subject.card.task
    with torch.inference_mode():
        outputs = np.concatenate([subject.model(images).float().cpu().numpy() for images in subject.batches()])
    if task.annotated:
        size = subject.card.preprocess.img_size
        answers = [task.located(row, fitted(size, size)) for row in outputs]
    else:
        answers = task.answers(task.means(outputs), 1 if task.single else None)
    pictures = [
        replace(picture, answer=found, wrong=task.single and picture.true not in (None, found.labels[0]))
        for picture, found in zip(subject.pictures, answers, strict=True)
    ]
    return replace(subject, pictures=pictures)


def spread(task: Task, targets: Targets, count: int, seed: int) -> list[int]:
    """Indices of `count` random images, balanced over the classes and sorted by class."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(targets))
    if not task.single:
        return sorted(order[:count].tolist())
    seen: Counter[int] = Counter()
    turns = []  # rank of each image within its class
    for target in targets[order].tolist():
        turns.append(seen[target])
        seen[target] += 1
    chosen = order[np.argsort(turns, kind="stable")[:count]]
    return sorted(chosen.tolist(), key=lambda i: (targets[i], i))
