"""Words for a trained model: classifiers made of labels, and search by a sentence or a picture.

An index holds the vectors of images. It is kept in a file, with the size and time of each image and a hash of the
model, so that only new and changed images are computed again.

Legend: N images, D dimensions of a vector.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.config import coerce_names
from vitrail.data.image_like import GivenImage, ImageLike, given
from vitrail.data.images import UnreadableImage
from vitrail.data.npy import check_zip, read_member
from vitrail.data.remote import is_remote
from vitrail.errors import UserError
from vitrail.files import atomic_write, check_writable, open_regular, reading
from vitrail.progress import track
from vitrail.runs.predictor import Predictor
from vitrail.tasks import Task
from vitrail.tokenizers.bpe import clean
from vitrail.weights.card import Card

Vectors = NDArray[np.float32]
Stamp = tuple[str, str]  # absolute path of an image file; its size and time

_ARRAYS = ("model", "files", "stamps", "vectors")  # of an index
_MAX_RATIO, _ALWAYS_ALLOWED = 4, 2**26  # how much an index may expand, and bytes that it always may have


def label_names(labels: str | Sequence[str]) -> tuple[str, ...]:
    """The labels to choose from: "cat,dog" or a sequence."""
    if not labels or (isinstance(labels, str) and not labels.strip(" ,")):
        raise UserError('There are no labels to choose from. Give some, such as "cat,dog".')
    names = coerce_names("labels", labels)
    known: dict[str, str] = {}
    for name in names:
        before = known.setdefault(clean(name), name)
        if names.count(name) > 1:
            raise UserError(f"Labels must differ, but '{name}' is given twice.")
        if before != name:
            raise UserError(f"Labels must differ in more than case, but '{before}' and '{name}' do not. Remove one.")
    return names


def classify_by(predictor: Predictor, labels: Sequence[str], templates: Sequence[str] = ("{}",)) -> Predictor:
    """A predictor whose classes are words, of a model that reads words."""
    model, card = predictor.module, predictor.card
    if model is None:
        return _ByWords(predictor, labels, templates)
    classifier, task = card.task.classifier(model, labels, templates)
    named = replace(card, config=classifier.config, task=task, metrics={})
    return Predictor.of(classifier, named, predictor.device)


def warn_of_cut(card: Card, labels: Sequence[str], templates: Sequence[str] = ("{}",)) -> None:
    """Logs how many of the texts that templates make of labels are longer than the model reads."""
    card.task.words().warn_of_cut([template.replace("{}", label) for label in labels for template in templates])


class _ByWords(Predictor):
    """An exported file as a classifier: its embeddings of images, compared with those of labels."""

    def __init__(self, predictor: Predictor, labels: Sequence[str], templates: Sequence[str]):
        self._model = predictor._model
        self._labels, self._templates = labels, templates
        task, _ = self._classified(np.zeros((1, predictor.card.task.outputs)))  # a bad template is reported now
        self._card = replace(predictor.card, task=task, metrics={})

    @property
    def card(self) -> Card:
        return self._card

    def outputs(self, pixels: NDArray[Any]) -> NDArray[Any]:
        return self._classified(super().outputs(pixels))[1]

    def _classified(self, outputs: NDArray[Any]) -> tuple[Task, NDArray[Any]]:
        return self._model.card.task.by_words(outputs, self._labels, self._templates)


@dataclass(frozen=True)
class Hit:
    """An image that was found, and its similarity to the query, from -1 to 1."""

    file: str
    similarity: float


class Hits(list[Hit]):
    """The images that were found, best match first, and those that could not be read."""

    def __init__(self, hits: Iterable[Hit], unreadable: Sequence[tuple[str, str]]):
        super().__init__(hits)
        self.unreadable = tuple(unreadable)  # file, reason


@dataclass(frozen=True, eq=False)
class Index:
    """The vectors of images, of unit length."""

    files: tuple[str, ...]
    vectors: Vectors  # N D
    unreadable: tuple[tuple[str, str], ...] = ()  # file, reason

    def nearest(self, query: NDArray[np.floating], top: int) -> Hits:
        """The images most like a query, (D,), best first."""
        if len(query) != self.vectors.shape[1]:
            raise UserError(
                f"The index has vectors of {self.vectors.shape[1]} values, and the query {len(query)}. Give another "
                "--index, or delete the file."
            )
        alike = self.vectors @ query.astype(np.float32)
        order = np.argsort(-alike, kind="stable")[:top]
        return Hits((Hit(self.files[i], float(alike[i])) for i in order.tolist()), self.unreadable)


class Finder:
    """Vectors of images and of queries, by one model."""

    def __init__(self, predictor: Predictor, batch_size: int = 32, workers: int = 2):
        self.predictor = predictor
        self._how = {"batch_size": batch_size, "workers": workers}
        # Of a model that reads words the outputs, in the space of texts; of any other its features.
        self._compute = predictor.outputs if predictor.card.task.several else predictor.features

    def sentence(self, text: str) -> NDArray[np.floating]:
        """The vector of a text; UserError if the model reads no words."""
        if not text.strip():
            raise UserError("The query is empty. Describe the picture to find, or give an image file.")
        reader = self.predictor.card.task.words()
        reader.warn_of_cut([text])
        found: NDArray[np.floating] = reader([text])[0]
        return found

    def picture(self, image: ImageLike) -> NDArray[np.floating]:
        """The vector of an image."""
        ((name, vector),) = self._vectors([image])
        if isinstance(vector, UnreadableImage):
            raise UserError(f"{name} cannot be read: {vector}.")
        return vector

    def index(self, images: Iterable[ImageLike], file: Path | None = None) -> Index:
        """The index of images, in their order; kept in `file`, from which unchanged images are taken.

        The file keeps the vectors of other images too, as long as these exist.
        """
        every = list(given(images, self.predictor.card.preprocess.channels))
        known = {} if file is None or not file.exists() else self._read(file)
        stamps = [_stamp(image) for image in every]
        new = [i for i, stamp in enumerate(stamps) if stamp not in known]
        if file is not None and new:
            check_writable(file.parent)
        computed = dict(zip(new, self._vectors([every[i] for i in new]), strict=True))
        files, vectors, unreadable = [], [], []
        asked = {path for path, _ in filter(None, stamps)}
        kept = {stamp: vector for stamp, vector in known.items() if stamp[0] not in asked and os.path.exists(stamp[0])}  # noqa: PTH110
        for i, (image, stamp) in enumerate(zip(every, stamps, strict=True)):
            vector = known[stamp] if stamp is not None and stamp in known else computed[i][1]
            if isinstance(vector, UnreadableImage):
                unreadable.append((image.name, str(vector)))
                continue
            files.append(image.name)
            vectors.append(vector)
            if stamp is not None:
                kept[stamp] = vector
        if not files:
            raise UserError(f"No image could be read: {unreadable[0][0]} ({unreadable[0][1]}).")
        if len({vector.shape for vector in (*vectors, *kept.values())}) > 1:
            raise UserError(f"{file} does not fit the model. Give another --index, or delete the file.")
        if file is not None and new and kept:
            self._write(file, kept)
        return Index(tuple(files), np.stack(vectors).astype(np.float32), tuple(unreadable))

    def _vectors(self, images: Sequence[ImageLike]) -> list[tuple[str, NDArray[np.floating] | UnreadableImage]]:
        stored = given(images, self.predictor.card.preprocess.channels)
        answers = self.predictor.run(stored, self._compute, **self._how)
        found: list[tuple[str, NDArray[np.floating] | UnreadableImage]] = []
        for image, vector, _ in track(answers, "reading images", len(images), "img"):
            found.append((image.name, vector if isinstance(vector, UnreadableImage) else _unit(vector)))
        return found

    def _read(self, file: Path) -> dict[Stamp, NDArray[np.floating]]:
        with reading(file, "an index of `vitrail search`", "Give another --index."), open_regular(file) as stream:
            check_zip(file, _MAX_RATIO, _ALWAYS_ALLOWED, "vectors")
            arrays = np.load(stream, allow_pickle=False)
            model, names, stamps, vectors = (read_member(arrays, name) for name in _ARRAYS)
            if str(model) != self.predictor.fingerprint:
                raise UserError(f"{file} is the index of another model. Give another --index, or delete the file.")
            if vectors.ndim != 2 or vectors.dtype != np.float32 or not np.isfinite(vectors).all():
                raise ValueError("its vectors are damaged")
            return dict(zip(zip(names.tolist(), stamps.tolist(), strict=True), vectors, strict=True))

    def _write(self, file: Path, kept: dict[Stamp, NDArray[np.floating]]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary, temporary.open("wb") as stream:
            np.savez(
                stream,
                model=np.array(self.predictor.fingerprint),
                files=np.array([path for path, _ in kept]),
                stamps=np.array([facts for _, facts in kept]),
                vectors=np.stack([*kept.values()]).astype(np.float32),
            )


def _unit(vector: NDArray[np.floating]) -> NDArray[np.floating]:
    length = float(np.linalg.norm(vector))
    return vector / max(length, 1e-12)


def _stamp(image: GivenImage) -> Stamp | None:
    """The path of an image file, its size and time; None for any other image, which is computed each time."""
    if not isinstance(image.content, str | Path) or is_remote(image.content):
        return None
    try:
        state = Path(image.content).stat()
    except (OSError, ValueError):
        return None
    return os.path.abspath(image.content), f"{state.st_size} {state.st_mtime_ns}"  # noqa: PTH100  # keeps links
