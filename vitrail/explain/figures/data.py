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
from vitrail.data.pixels import thumbnail
from vitrail.data.targets import WORDS, in_words
from vitrail.errors import UserError
from vitrail.explain.embedding_map import MOST, embedding_figure, embedding_map
from vitrail.explain.galleries import captions, gallery, least_certain, most_wrong
from vitrail.explain.neighbours import neighbours, neighbours_figure
from vitrail.explain.subject import Drawing, Subject, choose

_QUERIES = 6  # pictures whose neighbours are shown, where none are given
_NEAREST, _PAGE = 7, 24  # neighbours in a row, and rows of a figure


def embedding(subject: Subject) -> Iterator[Drawing]:
    """Where every image of the data lies among the others."""
    if not subject.with_data:
        return
    chosen = choose(len(subject.split), MOST, subject.seed)
    places = embedding_map(subject.features[chosen], subject.seed)
    data = subject.data
    drawn = embedding_figure(places, subject.split, chosen, data.task, data.classes, data.name)
    files = np.array([subject.split.name(int(i)) for i in chosen])
    yield Drawing("map", drawn, {"places": places, "files": files, "targets": subject.split.targets[chosen]})


def nearest(subject: Subject) -> Iterator[Drawing]:
    """The images of the data that are most like the pictures that were given, or like those that are most wrong."""
    if not subject.with_data:
        return
    split, data = subject.split, subject.data
    if subject.given:
        queries, own = subject.embeddings(), None
        tiles, meant = [], []
        for picture in subject.pictures:
            tiles.append(Tile(Image.fromarray(picture.view), [Caption(picture.caption, lines=3)]))
            meant.append(frozenset(picture.said.labels) if picture.said is not None else frozenset())
    else:
        own = most_wrong(subject.card, subject.outputs, _targets(subject), _QUERIES)
        if not len(own):
            raise UserError("No prediction is wrong, so there are no neighbours to show of one: give pictures.")
        queries = subject.features[own]
        say = captions(subject.card, subject.outputs, _targets(subject))
        tiles = [Tile(thumbnail(split.image(i)), say(i)) for i in own.tolist()]
        meant = [frozenset(examples) for _, examples in in_words(data.task, data.classes, split.targets[own])]
    found, cosines = neighbours(queries, subject.features, min(_NEAREST, len(split) - (own is not None)), own)
    known = meant if data.classes == subject.card.classes else [frozenset()] * len(tiles)
    for at in range(0, len(tiles), _PAGE):
        page = slice(at, at + _PAGE)
        drawn = neighbours_figure(
            tiles[page], split, found[page], cosines[page], data.task, data.classes, known[page], data.name
        )
        name = "neighbours" if at == 0 else f"neighbours-{1 + at // _PAGE}"
        yield Drawing(name, drawn, {"numbers": found[page], "cosines": cosines[page]})


def wrong(subject: Subject) -> Iterator[Drawing]:
    """The predictions that are most wrong."""
    if subject.with_data:
        chosen = most_wrong(subject.card, subject.outputs, _targets(subject))
        order = "largest error first" if subject.card.task == "regression" else "highest loss first"
        if not len(chosen):
            raise UserError(f"No prediction of {len(subject.split):,} is wrong, so there is no gallery of them.")
        yield _gallery(subject, "wrong", "Most wrong", order, chosen)


def uncertain(subject: Subject) -> Iterator[Drawing]:
    """The predictions that are least certain."""
    if subject.with_data:
        chosen = least_certain(subject.card, subject.outputs)
        labels = subject.card.task == "multilabel"
        order = "nearest to a threshold" if labels else "smallest lead of the first class over the second"
        yield _gallery(subject, "uncertain", "Least certain", order, chosen)


def _gallery(subject: Subject, name: str, title: str, order: str, chosen: NDArray[np.int64]) -> Drawing:
    split, outputs = subject.split, subject.outputs
    note = f"{order}, of {len(split):,} images of {subject.data.name}"
    drawn = gallery(subject.card, split, outputs, _targets(subject), chosen, title, note)
    files = np.array([split.name(i) for i in chosen.tolist()])
    return Drawing(name, drawn, {"numbers": chosen, "files": files, "outputs": outputs[chosen]})


def _targets(subject: Subject) -> NDArray[Any]:
    """What is true of every image; a UserError if the model tells other things than the data does."""
    data, card = subject.data, subject.card
    if data.classes != card.classes or data.task != card.task:
        raise UserError(
            f"Which predictions are wrong cannot be told: {data.name} has other {WORDS[data.task].many} than the model."
        )
    return subject.split.targets
