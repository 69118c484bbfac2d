"""The sections of a run's page that have charts, tables and pictures: results, mistakes, data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.data.balance import class_counts
from vitrail.data.dataset import Data, FileSplit, Numbers, PackedSplit, Split
from vitrail.data.pixels import Pixels
from vitrail.data.stream import StreamSplit
from vitrail.evaluate.metrics import LabelMetrics, Metrics
from vitrail.explain import relevance, rollout
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViT
from vitrail.report import charts
from vitrail.report.charts import Chart
from vitrail.report.facts import Facts
from vitrail.report.gallery import Answer, Gallery, choose
from vitrail.report.images import Album, Picture, overlay, read, seen, thumbnail
from vitrail.report.tables import Cell, Line, Table

THUMBNAIL, VIEW = 80, 160  # pixels: of pictures in rows, and of those with a map
_THUMBNAILS = 360  # in the table of the data
_EACH = 12  # of a class
_PANES = 20  # of the window


# Results --------------------------------------------------------------------------------------------------


def result_charts(facts: Facts) -> list[Chart]:
    """The charts of a task's results; what needs every image by itself is left out where the data is gone."""
    metrics = facts.metrics
    if metrics is None:
        return []
    if isinstance(metrics, Metrics):
        return [charts.confusion(metrics), charts.reliability(metrics)]
    if isinstance(metrics, LabelMetrics):
        if len(metrics.unseen) == len(metrics.per_label):  # nothing is there to be found
            return []
        every = [charts.average_precision(metrics)]
        if facts.outputs is not None:
            every += [charts.precision_recall(metrics), charts.label_reliability(metrics)]
        return every
    return charts.predicted(metrics) if facts.outputs is not None else []


# Mistakes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exhibit:
    """An answer with what the model saw, and a map of where it looked or of what speaks for the answer."""

    answer: Answer
    name: str
    picture: Picture
    map: Picture | None


@dataclass(frozen=True)
class Pair:
    """A frequent mistake with examples."""

    true: str
    said: str
    count: int
    of: int
    pictures: list[Picture]


@dataclass(frozen=True)
class Mistakes:
    confused: list[Pair] = field(default_factory=list)
    worst: list[Exhibit] = field(default_factory=list)
    best: list[Exhibit] = field(default_factory=list)
    maps: str = ""  # what they show


def mistakes(facts: Facts, album: Album, workers: int) -> Mistakes:
    """The most confused pairs, the worst and the best predictions, as pictures."""
    if facts.outputs is None or facts.metrics is None or facts.data is None or facts.card is None:
        return Mistakes()
    split, preprocess = facts.data.splits["val"], facts.card.preprocess
    gallery = choose(facts.metrics, facts.outputs, split.targets)
    pixels = read(reads(split, facts), gallery.numbers, workers)
    maps, show = _maps(facts, gallery, pixels)

    def exhibits(answers: Sequence[Answer]) -> list[Exhibit]:
        found = []
        for answer in answers:
            view = seen(pixels[answer.number], preprocess, VIEW)
            picture = album.add(view)
            glowing = album.add(overlay(view, maps[answer.number]))
            if picture is not None:
                found.append(Exhibit(answer, _name(split, answer.number, facts.config.data), picture, glowing))
        return found

    worst, best = exhibits(gallery.worst), exhibits(gallery.best)
    pairs = [
        Pair(pair.true, pair.said, pair.count, pair.of, _thumbnails(album, [pixels[i] for i in pair.numbers]))
        for pair in gallery.confused
    ]
    return Mistakes(pairs, worst, best, show)


def _maps(facts: Facts, gallery: Gallery, pixels: dict[int, Pixels]) -> tuple[dict[int, NDArray[np.float32]], str]:
    """Maps of the worst and the best, by number, and what they show: attention, or what speaks for the answer."""
    assert facts.model is not None
    assert facts.card is not None
    assert facts.outputs is not None
    numbers = sorted({answer.number for answer in gallery.worst + gallery.best})
    if not numbers:
        return {}, ""
    images = torch.stack([facts.card.preprocess(pixels[i]) for i in numbers]).to(facts.device)
    if isinstance(facts.model, ViT | Hybrid):
        maps = rollout(facts.model, images)
        return dict(zip(numbers, maps, strict=True)), "where the model looked: attention rolled out over all layers"
    regression = facts.card.task == "regression"
    said = np.zeros(len(numbers), np.int64) if regression else facts.outputs[numbers].argmax(axis=1)
    answer = f"a higher {facts.card.classes[0]}" if regression else "the likeliest answer"
    maps = relevance(facts.model, images, said).clip(min=0)
    return dict(
        zip(numbers, maps, strict=True)
    ), f"what speaks for {answer}: the last map of features, times its gradient"


def reads(split: Split, facts: Facts) -> Split:
    """A split that is read with the channels and bits that the model wants."""
    assert facts.card is not None
    if isinstance(split, FileSplit | PackedSplit):
        return replace(split, channels=facts.card.preprocess.channels, bits=facts.card.preprocess.bits)
    return split


def _name(split: Split, number: int, data: str) -> str:
    """What an image is called, without the folder that all of them lie in."""
    folder = Path(data) if Path(data).is_dir() else Path(data).parent
    return split.name(number).removeprefix(f"{folder}/")


def _thumbnails(album: Album, images: Sequence[Pixels]) -> list[Picture]:
    pictures = [album.add(thumbnail(image, THUMBNAIL)) for image in images]
    return [picture for picture in pictures if picture is not None]


# Data -----------------------------------------------------------------------------------------------------


def data_table(data: Data, album: Album, workers: int) -> Table:
    """How many images of each class there are in every split, with some of them; or the range of each number."""
    splits = {name: split for name, split in data.splits.items() if not _served_twice(data, name)}
    pictures = _examples(data, album, workers)
    if data.task == "regression":
        targets = data.splits["train"].targets.astype(np.float64)
        columns = {
            "lowest": targets.min(axis=0),
            "mean": targets.mean(axis=0),
            "highest": targets.max(axis=0),
            "std": targets.std(axis=0),
        }
        lines = [
            Line(name, [Cell(f"{values[k]:.4g}", float(values[k])) for values in columns.values()], pictures.get(k, []))
            for k, name in enumerate(data.classes)
        ]
        return Table("The numbers of the training images", ["number", *columns], lines).lowest()
    counts = {name: class_counts(split.targets, len(data.classes)) for name, split in splits.items()}
    lines = []
    for k, name in enumerate(data.classes):
        cells = [
            Cell(f"{count[k]:,}", int(count[k]), float(count[k] / max(count.max(), 1))) for count in counts.values()
        ]
        lines.append(Line(name, cells, pictures.get(k, [])))
    first = "label" if data.task == "multilabel" else "class"
    return Table(f"Images of each {first}", [first, *counts], lines).lowest()


def sizes(data: Data) -> list[tuple[str, int]]:
    """The splits and how many images they have."""
    return [(name, len(split)) for name, split in data.splits.items() if not _served_twice(data, name)]


def _served_twice(data: Data, name: str) -> bool:
    """Whether a split is the test split, which serves for validation where there is no other."""
    return name == "val" and data.splits.get("test") is data.splits["val"]


def _examples(data: Data, album: Album, workers: int) -> dict[int, list[Picture]]:
    """Some pictures of every class or label; of a regression, from the lowest to the highest of the first number."""
    split = _shown(data)
    each = min(_EACH, _THUMBNAILS // len(data.classes))
    chosen: dict[int, Numbers] = {}
    if data.task == "regression":
        order = np.argsort(split.targets[:, 0], kind="stable")
        chosen = {0: order[np.linspace(0, len(order) - 1, min(_EACH, len(order))).astype(int)]}
    elif each:
        rng = np.random.default_rng(0)
        single = split.targets.ndim == 1
        for k in range(len(data.classes)):
            members = np.flatnonzero(split.targets == k if single else split.targets[:, k])
            chosen[k] = rng.permutation(members)[:each]
    else:
        return {}
    pixels = read(split, [int(i) for numbers in chosen.values() for i in numbers], workers)
    return {k: _thumbnails(album, [pixels[int(i)] for i in numbers]) for k, numbers in chosen.items()}


@dataclass(frozen=True)
class Window:
    """Pictures as the panes of a window: grey ones are tinted, those with a dark ground turned to light."""

    panes: list[Picture] = field(default_factory=list)
    tint: str = ""


def window(data: Data, album: Album, workers: int) -> Window:
    """Some pictures of all classes."""
    split = _shown(data)
    targets = split.targets if split.targets.ndim == 1 else split.targets[:, 0]
    rng = np.random.default_rng(1)
    order = rng.permutation(len(split))
    by_class = order[np.argsort(targets[order], kind="stable")]
    chosen = rng.permutation(by_class[np.linspace(0, len(by_class) - 1, min(_PANES, len(by_class))).astype(int)])
    pixels = read(split, [int(i) for i in chosen], workers)
    views = [thumbnail(pixels[int(i)], THUMBNAIL) for i in chosen]
    night = np.mean([np.asarray(view.convert("L")).mean() for view in views]) < 128
    tint = ("grey night" if night else "grey") if data.channels == 1 else ""
    return Window([pane for view in views if (pane := album.add(view)) is not None], tint)


def _shown(data: Data) -> Split:
    """The split whose images are shown: those of train, read as small as will do; of a stream those of val, which is
    small and read anyway."""
    split = data.splits["train"]
    if isinstance(split, StreamSplit):
        return data.splits["val"]
    return replace(split, min_side=THUMBNAIL) if isinstance(split, FileSplit | PackedSplit) else split
