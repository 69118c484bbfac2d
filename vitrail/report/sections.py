"""The sections with pictures on a run's page: mistakes, what a pre-trained model sees, and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import Data, Split, choose
from vitrail.data.images import failures
from vitrail.data.pixels import Pixels, UnreadableImage, thumbnail
from vitrail.errors import UserError
from vitrail.explain import relevance, rollout
from vitrail.explain.geometry import attends
from vitrail.explain.relevance import signed
from vitrail.files import open_regular
from vitrail.progress import log
from vitrail.report.facts import RunFacts
from vitrail.report.images import Album, InlineImage, laid_over, overlay, read, seen
from vitrail.report.tables import Cell, Line, Table

THUMBNAIL, VIEW = 80, 160  # pixels: thumbnails, and pictures with a map
SHOWN = 8  # worst and best predictions
PAIRS, EXAMPLES = 6, 6  # most frequent mistakes, and examples of each
_THUMBNAILS = 360  # in the data table
_EACH = 12  # per class
_PANES = 20  # in the window
_SAMPLES = 48  # images without labels
_EXACT = 400_000  # bytes of a reconstruction above which it is compressed


# Mistakes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exhibit:
    """A prediction with its image, and a map of attention or of evidence for the prediction."""

    predicted: str
    truth: str
    right: bool
    name: str
    picture: InlineImage
    map: InlineImage | None


@dataclass(frozen=True)
class Pair:
    """A confused pair of classes, with examples."""

    true: str
    predicted: str
    count: int
    of: int
    pictures: list[InlineImage]


@dataclass(frozen=True)
class Mistakes:
    """Confused classes, and the worst and best predictions."""

    confused: list[Pair] = field(default_factory=list)
    worst: list[Exhibit] = field(default_factory=list)
    best: list[Exhibit] = field(default_factory=list)
    maps: str = ""  # what the maps show


def mistakes(facts: RunFacts, album: Album, workers: int) -> Mistakes:
    """The most frequent mistakes and the worst and best predictions, with pictures."""
    if facts.outputs is None or facts.targets is None or facts.data is None or facts.card is None:
        return Mistakes()
    split, task, outputs, targets = facts.data.splits["val"], facts.task, facts.outputs, facts.targets
    worst, best = (choose(outputs, targets, SHOWN).tolist() for choose in (task.worst, task.best))
    confused = task.confused(outputs, targets, PAIRS, EXAMPLES)
    wanted = [*worst, *best, *(number for mistake in confused for number in mistake.numbers)]
    pixels = read(reads(split, facts), wanted, workers)
    maps, show = _maps(facts, sorted({*worst, *best}), pixels)
    right = task.right(outputs, targets)

    def exhibits(numbers: Sequence[int]) -> list[Exhibit]:
        found = []
        for number, meant in zip(numbers, task.means(outputs[numbers]), strict=True):
            layers = task.layers(outputs[number], targets[number])
            if layers is not None:
                picture, heat = (album.add(laid_over(pixels[number], layer, 2 * VIEW)) for layer in layers)
            else:
                view = seen(pixels[number], facts.card.preprocess, VIEW)  # type: ignore[union-attr]  # checked above
                picture = album.add(view)
                heat = album.add(overlay(view, maps[number])) if number in maps else None
            if picture is not None:
                predicted, truth = task.said(meant, targets[number])
                name = _name(split, number, facts.config.data)
                found.append(Exhibit(predicted, truth, bool(right[number]), name, picture, heat))
        return found

    shown = exhibits(worst), exhibits(best)
    pairs = [
        Pair(pair.true, pair.said, pair.count, pair.of, _thumbnails(album, [pixels[i] for i in pair.numbers]))
        for pair in confused
    ]
    return Mistakes(pairs, *shown, show)


def _maps(
    facts: RunFacts, numbers: Sequence[int], pixels: dict[int, Pixels]
) -> tuple[dict[int, NDArray[np.float32]], str]:
    """A map for each image by index, and what the maps show: attention, or evidence for the prediction."""
    assert facts.model is not None
    assert facts.card is not None
    assert facts.outputs is not None
    if facts.task.annotated:
        return {}, "the true annotation, beside the prediction"
    if not numbers:
        return {}, ""
    images = torch.stack([facts.card.preprocess(pixels[i]) for i in numbers]).to(facts.device)
    if not signed(facts.model):
        maps, show = rollout(facts.model, images), "attention rollout over all layers"
    else:
        likeliest = facts.task.ranking(facts.outputs[numbers])[:, 0]
        try:
            maps = relevance(facts.model, images, likeliest).clip(min=0)
        except UserError:  # the model does not define its last feature map
            return {}, ""
        show = "evidence for the prediction (last feature map times its gradient)"
    return dict(zip(numbers, maps, strict=True)), show


def reads(split: Split, facts: RunFacts) -> Split:
    """The split, read with the channels and bits of the model."""
    assert facts.card is not None
    return split.read_as(facts.card.preprocess.channels, facts.card.preprocess.bits)


def _name(split: Split, number: int, data: str) -> str:
    """The name of an image, relative to the data folder."""
    folder = Path(data) if Path(data).is_dir() else Path(data).parent
    return split.name(number).removeprefix(f"{folder}/")


def _thumbnails(album: Album, images: Sequence[Pixels]) -> list[InlineImage]:
    pictures = [album.add(thumbnail(image, THUMBNAIL)) for image in images]
    return [picture for picture in pictures if picture is not None]


# Self-supervision -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """An image with its attention map."""

    name: str
    picture: InlineImage
    map: InlineImage


@dataclass(frozen=True)
class Views:
    """What a model without a head makes of validation images."""

    reconstruction: InlineImage | None = None  # originals, masked images and predictions, of methods that mask
    attention: list[Seen] = field(default_factory=list)


def views(facts: RunFacts, album: Album, workers: int) -> Views:
    """The reconstruction that training drew last, and attention maps of some validation images."""
    if facts.task.labelled:
        return Views()
    drawn, file = None, facts.run.reconstruction_file
    if file.exists():
        try:
            with failures(file), open_regular(file) as stream, Image.open(stream, formats=("PNG",)) as sheet:
                picture = sheet.convert("RGB")
            drawn = album.add(picture, exact=file.stat().st_size < _EXACT)
        except UnreadableImage as error:
            log.warning(f"{file} is left out of the report: {error}.")
    smooth = None if drawn is None else replace(drawn, few=False)  # it has text
    return Views(smooth, _attention(facts, album, workers))


def _attention(facts: RunFacts, album: Album, workers: int) -> list[Seen]:
    """Attention rollout of validation images; empty if the model has no attention."""
    if facts.data is None or facts.card is None or facts.model is None or not attends(facts.model):
        return []
    split, preprocess = facts.data.splits["val"], facts.card.preprocess
    chosen = choose(len(split), SHOWN).tolist()
    pixels = read(reads(split, facts), chosen, workers)
    images = torch.stack([preprocess(pixels[i]) for i in chosen]).to(facts.device)
    found = []
    for number, weights in zip(chosen, rollout(facts.model, images), strict=True):
        view = seen(pixels[number], preprocess, VIEW)
        picture, heat = album.add(view), album.add(overlay(view, weights))
        if picture is not None and heat is not None:
            found.append(Seen(_name(split, number, facts.config.data), picture, heat))
    return found


# Data -----------------------------------------------------------------------------------------------------


def data_table(data: Data, album: Album, workers: int) -> Table | None:
    """Image counts of each class by split, or statistics of each value, with examples; None without classes."""
    if not data.classes:
        return None
    task, pictures = data.task, _examples(data, album, workers)
    splits = {name: split for name, split in data.splits.items() if not _served_twice(data, name)}
    counts = {name: count for name, split in splits.items() if (count := task.counts(split.targets)) is not None}
    lines = []
    if counts:
        for k, name in enumerate(data.classes):
            cells = [Cell(f"{n[k]:,}", int(n[k]), float(n[k] / max(n.max(), 1))) for n in counts.values()]
            lines.append(Line(name, cells, pictures.get(k, [])))
        return Table(f"Images of each {task.one}", [task.one, *counts], lines).lowest()
    columns = task.statistics(data.splits["train"].targets)
    for k, name in enumerate(data.classes):
        cells = [Cell(f"{values[k]:.4g}", float(values[k])) for values in columns.values()]
        lines.append(Line(name, cells, pictures.get(k, [])))
    return Table(f"{task.many.capitalize()} of the training images", [task.one, *columns], lines).lowest()


def samples(data: Data, album: Album, workers: int) -> list[InlineImage]:
    """Some images of data without classes."""
    if data.classes:
        return []
    split = _shown(data)
    chosen = choose(len(split), _SAMPLES).tolist()
    pixels = read(split, chosen, workers)
    return _thumbnails(album, [pixels[i] for i in chosen])


def sizes(data: Data) -> list[tuple[str, int]]:
    """The splits and their sizes."""
    return [(name, len(split)) for name, split in data.splits.items() if not _served_twice(data, name)]


def _served_twice(data: Data, name: str) -> bool:
    """Whether a split is the test split used for validation, and would be listed twice."""
    return name == "val" and data.splits.get("test") is data.splits["val"]


def _examples(data: Data, album: Album, workers: int) -> dict[int, list[InlineImage]]:
    """Example images of every class, label or value."""
    split, each = _shown(data), min(_EACH, _THUMBNAILS // len(data.classes))
    if not each:
        return {}
    chosen = data.task.examples(split.targets, each, np.random.default_rng(0))
    pixels = read(split, [int(i) for numbers in chosen.values() for i in numbers], workers)
    return {k: _thumbnails(album, [pixels[int(i)] for i in numbers]) for k, numbers in chosen.items()}


@dataclass(frozen=True)
class Window:
    """Images as panes of a window; grey ones are tinted, and inverted if mostly dark."""

    panes: list[InlineImage] = field(default_factory=list)
    tint: str = ""


def window(data: Data, album: Album, workers: int) -> Window:
    """The window, with images of all classes."""
    split = _shown(data)
    groups = data.task.strata(split.targets, 1 / _PANES)
    rng = np.random.default_rng(1)
    order = rng.permutation(len(split))
    by_class = order[np.argsort(groups[order], kind="stable")]
    chosen = rng.permutation(by_class[np.linspace(0, len(by_class) - 1, min(_PANES, len(by_class))).astype(int)])
    pixels = read(split, [int(i) for i in chosen], workers)
    views = [thumbnail(pixels[int(i)], THUMBNAIL) for i in chosen]
    night = np.mean([np.asarray(view.convert("L")).mean() for view in views]) < 128
    tint = ("grey night" if night else "grey") if data.channels == 1 else ""
    return Window([pane for view in views if (pane := album.add(view)) is not None], tint)


def _shown(data: Data) -> Split:
    """The split to show: train, decoded at reduced size; for a stream val, which is small and read anyway."""
    split = data.splits["train"]
    return data.splits["val"] if split.streamed else split.reduced(THUMBNAIL)
