"""Retrieval scores of images with captions: recall at 1, 5 and 10, both ways.

An image counts as found if any of its captions is among the first; a caption, if its image is, or one of the images
that share it.

Legend: N images, T different captions, J dimensions of the joint space.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.measure import Measure
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks.captions import unpack
from vitrail.tasks.scores import Floats, Meter, NotFinite, Numbers, Scores, Targets, files_line, mean_error, rounded
from vitrail.tokenizers import Tokenizer

AT = (1, 5, 10)
_ROWS = 1024  # images whose similarities to all captions are in memory at a time

MEASURES = (
    Measure(
        "mean_recall", "mean recall", "mean of the recalls at 1, 5 and 10, both ways", percent=True, heading="Recall"
    ),
    *(
        Measure(f"text_r{k}", f"text R@{k}", f"images with one of their captions among the first {k}", percent=True)
        for k in AT
    ),
    *(
        Measure(f"image_r{k}", f"image R@{k}", f"captions with their image among the first {k}", percent=True)
        for k in AT
    ),
    Measure("loss", "loss", "cross-entropy of an image's caption among all captions", lower_is_better=True),
)


MOST_LABELS = 10_000  # that a reader remembers, besides those of one call


class Reader(ABC):
    """Reads texts as a trained model does. It remembers the texts it has read, because the same ones are asked for."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context
        self._known: dict[str, Floats] = {}
        self._labels: dict[str, Floats] = {}

    @property
    @abstractmethod
    def scale(self) -> float:
        """Of the logits."""

    @abstractmethod
    def read(self, texts: Sequence[str]) -> Floats:
        """The embeddings of texts, of unit length: (T, J)."""

    def __call__(self, texts: Sequence[str]) -> Floats:
        """As `read`, of texts that may have been read before."""
        return self._remembered(texts, self._known)

    def labels(self, texts: Sequence[str]) -> Floats:
        """As `read`, of labels. Few are remembered: clients of a service send any, and would fill its memory."""
        if len(self._labels) > MOST_LABELS:
            self._labels = {}  # not cleared, because another thread may read it
        return self._remembered(texts, self._labels)

    def _remembered(self, texts: Sequence[str], known: dict[str, Floats]) -> Floats:
        if new := [text for text in dict.fromkeys(texts) if text not in known]:
            known.update(zip(new, self.read(new), strict=True))
        return np.stack([known[text] for text in texts])

    def cut(self, texts: Iterable[str]) -> int:
        """The number of texts that are longer than the context, whose end is not read."""
        return sum(self.tokenizer.tokens(text) > self.context for text in texts)

    def warn_of_cut(self, texts: Sequence[str]) -> None:
        """Logs how many texts are longer than the context."""
        if cut := self.cut(texts):
            log.warning("%s It reads %d tokens.", said_cut("text", cut), self.context)

    def closest(self, image: NDArray[np.floating]) -> str:
        """Of the texts read so far, the one that is most like the embedding of an image, (J,)."""
        return max(self._known, key=lambda text: float(self._known[text] @ image))


@dataclass(frozen=True, eq=False, kw_only=True)
class PairScores(Scores):
    """Recalls of a split."""

    captions: int  # different ones, T
    recalls: dict[str, float]
    recall_error: float = 0.0  # standard error of their mean; 0 if it is not measured
    cut: int = 0  # captions longer than the context

    @property
    def main(self) -> float:
        return sum(self.recalls.values()) / len(self.recalls)

    @property
    def standard_error(self) -> float:
        return self.recall_error

    @property
    def each(self) -> Sequence[Any]:
        return ()

    def row(self) -> dict[str, float]:
        return {"mean_recall": self.main, **self.recalls, "loss": self.loss}

    def to_json(self) -> dict[str, Any]:
        return rounded({"images": self.images, "captions": self.captions, "cut": self.cut, **self.row()})

    def csv(self) -> dict[str, list[list[object]]]:
        return {}

    def table(self, most: int = 20) -> str:
        lines = [
            f"{self.images:,} images, {self.captions:,} different captions",
            "",
            f"{'':24}" + "".join(f"{f'R@{k}':>8}" for k in AT),
        ]
        for name, title in (("text", "captions of an image"), ("image", "images of a caption")):
            shares = "".join(f"{self.recalls[f'{name}_r{k}']:>8.1%}" for k in AT)
            lines.append(f"{title:24}{shares}")
        chance = f"chance: R@1 {1 / self.captions:.2%} of captions, {1 / self.images:.2%} of images"
        cut = [said_cut("caption", self.cut)] if self.cut else []
        return "\n".join([*lines, "", chance, *cut, *files_line(self.folder)])


class PairMeter(Meter):
    """Keeps the embeddings of images and their captions."""

    def __init__(self, reader: Callable[[], Reader]):
        self._reader = reader
        self._images: list[NDArray[np.floating]] = []
        self._captions: list[tuple[str, ...]] = []

    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:
        if not np.isfinite(outputs).all():
            raise NotFinite("The embeddings of images must be finite, but they are not: the weights diverged.")
        self._images.append(outputs)
        self._captions += map(unpack, targets)

    def merge(self, other: PairMeter) -> None:
        self._images += other._images
        self._captions += other._captions

    def scores(self) -> PairScores:
        if not self._captions:
            raise UserError("The split has no images to measure.")
        reader = self._reader()
        match = Match(np.concatenate(self._images).astype(np.float64), self._captions, reader)
        each = match.recalls()
        return PairScores(
            images=len(self._captions),
            loss=float(match.losses.mean()),
            loss_error=mean_error(match.losses),
            captions=len(match.texts),
            recalls={name: float(values.mean()) for name, values in each.items()},
            recall_error=mean_error(np.mean(list(each.values()), axis=0)),
            cut=reader.cut(match.texts),
        )


class Match:
    """How images and captions of a split find each other. Of equal similarities, the wrong ones come first."""

    def __init__(self, images: Floats, captions: Sequence[tuple[str, ...]], reader: Reader):
        self.texts = list(dict.fromkeys(text for its in captions for text in its))
        number = {text: k for k, text in enumerate(self.texts)}
        own = self._own = [np.array([number[text] for text in its], np.int64) for its in captions]
        embedded = reader(self.texts)
        if not np.isfinite(embedded).all():
            raise NotFinite("The embeddings of captions must be finite, but they are not: the weights diverged.")
        count = len(captions)
        self.first = np.zeros(count, np.int64)  # the best caption of each image
        self.caption_rank = np.zeros(count, np.int64)  # of the best own caption, from 0
        self.losses = np.zeros(count)
        best = np.full(len(self.texts), -np.inf)  # similarity of each caption to the best of its images
        for at in range(0, count, _ROWS):
            alike = images[at : at + _ROWS] @ embedded.T
            self.first[at : at + len(alike)] = alike.argmax(axis=1)
            logits = alike * reader.scale
            total = np.logaddexp.reduce(logits, axis=1)
            for i, row in enumerate(alike, start=at):
                mine = row[own[i]]
                self.caption_rank[i] = (row >= mine.max()).sum() - (mine >= mine.max()).sum()
                self.losses[i] = total[i - at] - np.logaddexp.reduce(logits[i - at, own[i]])
                best[own[i]] = np.maximum(best[own[i]], mine)
        self.image_rank: Numbers = np.zeros(len(self.texts), np.int64)
        for at in range(0, count, _ROWS):
            alike = images[at : at + _ROWS] @ embedded.T
            self.image_rank += (alike >= best).sum(axis=0)
            for i, row in enumerate(alike, start=at):
                self.image_rank[own[i]] -= row[own[i]] >= best[own[i]]

    def recalls(self) -> dict[str, Floats]:
        """The share of each image in the recalls, (N,) each, of which the recalls are the means.

        A caption counts in equal parts for the images that have it.
        """
        images = np.bincount(np.concatenate(self._own), minlength=len(self.texts))
        found = {f"text_r{k}": (self.caption_rank < k).astype(np.float64) for k in AT}
        for k in AT:
            parts = (self.image_rank < k) / images * len(self._own) / len(self.texts)
            found[f"image_r{k}"] = np.array([parts[own].sum() for own in self._own])
        return found


def said_cut(what: str, count: int) -> str:
    """A sentence on texts that are longer than the context."""
    many = f"{count:,} {what}s are" if count > 1 else f"1 {what} is"
    return f"{many} longer than the model reads, and {'are' if count > 1 else 'is'} cut."


def label_embeddings(reader: Reader, labels: Sequence[str], templates: Sequence[str]) -> Floats:
    """For each label the mean of the texts that templates make of it, scaled to unit length: (K, J)."""
    for template in templates:
        if "{}" not in template:
            raise UserError(f"A template must have {{}} where the label goes, but it is {template!r}.")
    texts = [template.replace("{}", label) for label in labels for template in templates]
    found = reader.labels(texts).reshape(len(labels), len(templates), -1).mean(axis=1)
    return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12))
