"""Figures of a data set: embedding map, nearest neighbours, galleries of predictions.

They show the given data, or the run's validation images if neither images nor data are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts.tiles import Caption, Tile
from vitrail.data.dataset import choose
from vitrail.data.pixels import thumbnail
from vitrail.errors import UserError
from vitrail.evaluate.features import measured_targets
from vitrail.explain.embedding_map import MOST, embedding_figure, embedding_map
from vitrail.explain.galleries import gallery, tiles
from vitrail.explain.neighbours import neighbours, neighbours_figure
from vitrail.explain.subject import Drawing, Subject, spread
from vitrail.runs.predictor import Predictor

_QUERIES = 6  # predictions or images whose neighbours are shown if no images are given
_SHOWN = 24  # predictions per gallery
_NEAREST, _PAGE = 7, 24  # neighbours per row, rows per figure


def embedding(subject: Subject) -> Iterator[Drawing]:
    """The embedding map of the data."""
    if not subject.with_data:
        return
    chosen = choose(len(subject.split), MOST, subject.seed)
    places = embedding_map(subject.features[chosen], subject.seed)
    data = subject.data
    drawn = embedding_figure(places, subject.split, chosen, data.task, data.name)
    files = np.array([subject.split.name(int(i)) for i in chosen])
    labels = {} if data.task.annotated else {"targets": subject.split.targets[chosen]}  # annotations are no array
    yield Drawing("map", drawn, {"places": places, "files": files} | labels)


def nearest(subject: Subject) -> Iterator[Drawing]:
    """Nearest neighbours of the given pictures, or of the worst predictions; without a head, of images of the data."""
    if not subject.with_data:
        return
    split, data = subject.split, subject.data
    if subject.given:
        queries, own = subject.embeddings(), None
        asked, meant, same = [], [], data.classes == subject.card.classes
        for picture in subject.pictures:
            asked.append(Tile(Image.fromarray(picture.view), [Caption(picture.caption, lines=3)]))
            meant.append(frozenset(picture.answer.labels if picture.answer is not None and same else ()))
    else:
        own, asked = _worst(subject) if subject.has_head else _some(subject)
        queries = subject.features[own]
        meant = [frozenset(examples) for _, examples in data.task.describe(split.targets[own])]
    found, cosines = neighbours(queries, subject.features, min(_NEAREST, len(split) - (own is not None)), own)
    for at in range(0, len(asked), _PAGE):
        page = slice(at, at + _PAGE)
        drawn = neighbours_figure(asked[page], split, found[page], cosines[page], data.task, meant[page], data.name)
        name = "neighbours" if at == 0 else f"neighbours-{1 + at // _PAGE}"
        yield Drawing(name, drawn, {"numbers": found[page], "cosines": cosines[page]})


def _worst(subject: Subject) -> tuple[NDArray[np.int64], list[Tile]]:
    """The worst predictions: indices in the split, and tiles."""
    targets = _targets(subject)
    own = subject.card.task.worst(subject.outputs, targets, _QUERIES)
    if not len(own):
        raise UserError("There are no wrong predictions whose neighbours could be shown. Give images.")
    return own, tiles(subject.card.task, subject.split, subject.outputs, targets, own.tolist())


def _some(subject: Subject) -> tuple[NDArray[np.int64], list[Tile]]:
    """Random images, balanced over the classes if there are any: indices in the split, and tiles."""
    split, task = subject.split, subject.data.task
    if len(split) < 2:
        raise UserError("There are no neighbours: the data has one image.")
    own = np.array(spread(task, split.targets, _QUERIES, subject.seed))
    words = [label or split.name(int(i)) for i, (label, _) in zip(own, task.describe(split.targets[own]), strict=True)]
    captions = [[Caption(word, lines=2, keep_end=True)] for word in words]
    pictures = [thumbnail(split.image(int(i))) for i in own]
    return own, [Tile(picture, caption) for picture, caption in zip(pictures, captions, strict=True)]


def wrong(subject: Subject) -> Iterator[Drawing]:
    """The worst predictions."""
    if subject.with_data:
        chosen = subject.card.task.worst(subject.outputs, _targets(subject), _SHOWN)
        if not len(chosen):
            raise UserError(
                f"There is no gallery of worst predictions: all {len(subject.split):,} predictions are correct."
            )
        yield _gallery(subject, "wrong", "Worst predictions", "highest loss first", chosen)


def uncertain(subject: Subject) -> Iterator[Drawing]:
    """The least certain predictions."""
    if subject.with_data:
        chosen = np.argsort(subject.card.task.margins(subject.outputs), kind="stable")[:_SHOWN]
        yield _gallery(subject, "uncertain", "Least certain predictions", subject.card.task.certain, chosen)


def _gallery(subject: Subject, name: str, title: str, order: str, chosen: NDArray[np.int64]) -> Drawing:
    split, outputs = subject.split, subject.outputs
    note = f"{order}, of {len(split):,} images of {subject.data.name}"
    shown = tiles(subject.card.task, split, outputs, _targets(subject), chosen.tolist())
    drawn = gallery(shown, title, note)
    files = np.array([split.name(i) for i in chosen.tolist()])
    return Drawing(name, drawn, {"numbers": chosen, "files": files, "outputs": outputs[chosen]})


def _targets(subject: Subject) -> NDArray[Any]:
    """The targets of the split; a UserError if the classes of data and model differ."""
    data, card = subject.data, subject.card
    if not card.task.matches(data.task):
        raise UserError(
            f"Predictions cannot be compared with {data.name}: it has other {data.task.many} than the model."
        )
    return measured_targets(Predictor.of(subject.model, card, subject.device), subject.split, subject.workers)
