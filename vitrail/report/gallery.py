"""Which validation images are worth a look, and what to say of them: the worst, the best, the most confused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.measure import percent
from vitrail.evaluate.metrics import AnyMetrics, LabelMetrics, Metrics, ValueMetrics, each_image

Numbers = NDArray[np.int64]

SHOWN = 8
_PAIRS = 6
_EXAMPLES = 6  # pictures of a pair


@dataclass(frozen=True)
class Answer:
    """What a model said of one image, and what is true."""

    number: int
    right: bool
    said: str
    truth: str


@dataclass(frozen=True)
class Confused:
    """A mistake that is made again and again: a class taken for another, or a label missed or wrongly given."""

    true: str
    said: str
    count: int
    of: int  # how often it could have been made
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Gallery:
    worst: list[Answer]
    best: list[Answer]
    confused: list[Confused]

    @property
    def numbers(self) -> list[int]:
        """All images that are shown."""
        pairs = [number for pair in self.confused for number in pair.numbers]
        return [answer.number for answer in self.worst + self.best] + pairs


def choose(metrics: AnyMetrics, outputs: NDArray[np.float32], targets: NDArray[Any]) -> Gallery:
    """The images to show, by the task."""
    if isinstance(metrics, Metrics):
        return _classes(metrics, outputs, targets)
    if isinstance(metrics, LabelMetrics):
        return _labels(metrics)
    return _values(metrics)


def _classes(metrics: Metrics, outputs: NDArray[np.float32], labels: Numbers) -> Gallery:
    """Wrong and surest; right and surest, of every class in turn; the largest cells beside the diagonal."""
    logits = outputs.astype(np.float64)
    said = logits.argmax(axis=1)
    _, _, sure = each_image(logits, labels)
    order = np.argsort(-sure, kind="stable")
    wrong, right = order[said[order] != labels[order]], order[said[order] == labels[order]]
    names = [score.name for score in metrics.per_class]

    def answers(numbers: Sequence[int] | Numbers) -> list[Answer]:
        return [
            Answer(int(i), bool(said[i] == labels[i]), f"{names[said[i]]} ({percent(sure[i], 0)})", names[labels[i]])
            for i in numbers
        ]

    off = metrics.confusion - np.diag(metrics.confusion.diagonal())
    confused = []
    for cell in np.argsort(-off.ravel(), kind="stable")[:_PAIRS]:
        true, other = divmod(int(cell), len(names))
        if off[true, other]:
            numbers = [int(i) for i in wrong if labels[i] == true and said[i] == other][:_EXAMPLES]
            of = int(metrics.confusion[true].sum())
            confused.append(Confused(names[true], names[other], int(off[true, other]), of, tuple(numbers)))
    return Gallery(answers(wrong[:SHOWN]), answers(_in_turn(right, labels[right])[:SHOWN]), confused)


def _in_turn(numbers: Numbers, groups: Numbers) -> Numbers:
    """Numbers in another order: the first of every group, then the second of every group, and so on."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], groups[order])
    turn = np.empty(len(numbers), np.int64)
    turn[order] = np.arange(len(numbers)) - starts
    return numbers[np.argsort(turn, kind="stable")]


def _labels(metrics: LabelMetrics) -> Gallery:
    """By the loss of an image, over all labels; the labels that are missed, or wrongly given, most often."""
    chances, true = metrics.probabilities, metrics.targets > 0.5
    thresholds = np.array([score.threshold for score in metrics.per_label])
    given = chances >= thresholds
    loss = -np.log(np.clip(np.where(true, chances, 1 - chances), 1e-12, 1)).mean(axis=1)
    order = np.argsort(-loss, kind="stable")
    names = [score.name for score in metrics.per_label]

    def answer(i: int) -> Answer:
        best = sorted(np.flatnonzero(given[i]), key=lambda k: -chances[i, k])
        said = ", ".join(f"{names[k]} ({percent(chances[i, k], 0)})" for k in best)
        truth = ", ".join(names[k] for k in np.flatnonzero(true[i]))
        return Answer(i, bool((given[i] == true[i]).all()), said or "no label", truth or "no label")

    mistakes = []
    for k, name in enumerate(names):
        for where, title, words, of in (
            (true[:, k] & ~given[:, k], name, "missed", int(true[:, k].sum())),
            (~true[:, k] & given[:, k], f"not {name}", "given", int((~true[:, k]).sum())),
        ):
            numbers = tuple(int(i) for i in order if where[i])
            if numbers:
                mistakes.append(Confused(title, words, len(numbers), of, numbers[:_EXAMPLES]))
    mistakes.sort(key=lambda mistake: -mistake.count)
    good = [i for i in order[::-1] if true[i].any()]
    worst, best = ([answer(int(i)) for i in numbers[:SHOWN]] for numbers in (order, good))
    return Gallery(worst, best, mistakes[:_PAIRS])


def _values(metrics: ValueMetrics) -> Gallery:
    """By the error of an image, each number in units of its spread."""
    spread = metrics.targets.std(axis=0)
    errors = np.abs(metrics.predicted - metrics.targets) / np.where(spread > 0, spread, 1)
    order = np.argsort(-errors.mean(axis=1), kind="stable")
    names = [score.name for score in metrics.per_value]

    def answer(i: int) -> Answer:
        said, truth = (
            ", ".join(f"{name}\u00a0{value:.3g}" for name, value in zip(names[:4], row, strict=False))
            for row in (metrics.predicted[i], metrics.targets[i])
        )
        return Answer(i, bool(errors[i].mean() < 0.5), said, truth)

    worst, best = ([answer(int(i)) for i in numbers[:SHOWN]] for numbers in (order, order[::-1]))
    return Gallery(worst, best, [])
