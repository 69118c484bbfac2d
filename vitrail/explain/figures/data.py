"""The figures of `explain` that show a whole data set: its map, neighbours of pictures, and galleries of predictions.

They are drawn of the run's own validation images where no pictures are given, and of any data that is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts.tiles import Caption, Tile
from vitrail.errors import UserError
from vitrail.explain.embedding_map import MOST, embedding_figure, embedding_map
from vitrail.explain.galleries import gallery, tiles
from vitrail.explain.neighbours import neighbours, neighbours_figure
from vitrail.explain.subject import Drawing, Subject, choose

_QUERIES = 6  # pictures whose neighbours are shown, where none are given
_SHOWN = 24  # predictions in a gallery
_NEAREST, _PAGE = 7, 24  # neighbours in a row, and rows of a figure


def embedding(subject: Subject) -> Iterator[Drawing]:
    """Where every image of the data lies among the others."""
    if not subject.with_data:
        return
    chosen = choose(len(subject.split), MOST, subject.seed)
    places = embedding_map(subject.features[chosen], subject.seed)
    data = subject.data
    drawn = embedding_figure(places, subject.split, chosen, data.task, data.name)
    files = np.array([subject.split.name(int(i)) for i in chosen])
    yield Drawing("map", drawn, {"places": places, "files": files, "targets": subject.split.targets[chosen]})


def nearest(subject: Subject) -> Iterator[Drawing]:
    """The images of the data that are most like the pictures that were given, or like those that are most wrong."""
    if not subject.with_data:
        return
    split, data = subject.split, subject.data
    if subject.given:
        queries, own = subject.embeddings(), None
        asked, meant = [], []
        for picture in subject.pictures:
            asked.append(Tile(Image.fromarray(picture.view), [Caption(picture.caption, lines=3)]))
            meant.append(frozenset(picture.said.labels) if picture.said is not None else frozenset())
    else:
        own = subject.card.task.worst(subject.outputs, _targets(subject), _QUERIES)
        if not len(own):
            raise UserError("No prediction is wrong, so there are no neighbours to show of one: give pictures.")
        queries = subject.features[own]
        asked = tiles(subject.card.task, split, subject.outputs, _targets(subject), own.tolist())
        meant = [frozenset(examples) for _, examples in data.task.describe(split.targets[own])]
    found, cosines = neighbours(queries, subject.features, min(_NEAREST, len(split) - (own is not None)), own)
    known = meant if data.classes == subject.card.classes else [frozenset()] * len(asked)
    for at in range(0, len(asked), _PAGE):
        page = slice(at, at + _PAGE)
        drawn = neighbours_figure(asked[page], split, found[page], cosines[page], data.task, known[page], data.name)
        name = "neighbours" if at == 0 else f"neighbours-{1 + at // _PAGE}"
        yield Drawing(name, drawn, {"numbers": found[page], "cosines": cosines[page]})


def wrong(subject: Subject) -> Iterator[Drawing]:
    """The predictions that are most wrong."""
    if subject.with_data:
        chosen = subject.card.task.worst(subject.outputs, _targets(subject), _SHOWN)
        if not len(chosen):
            raise UserError(f"No prediction of {len(subject.split):,} is wrong, so there is no gallery of them.")
        yield _gallery(subject, "wrong", "Worst predictions", "highest loss first", chosen)


def uncertain(subject: Subject) -> Iterator[Drawing]:
    """The predictions that are least certain."""
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
    """The targets of every image; a UserError if the model has other classes than the data."""
    data, card = subject.data, subject.card
    if not card.task.matches(data.task):
        raise UserError(f"Predictions cannot be compared: {data.name} has other {data.task.many} than the model.")
    return subject.split.targets
