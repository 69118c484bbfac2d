"""Predictor: answers for images, by the engine that suits the machine, or from an exported file.

>>> for answer in vitrail.Predictor("runs/demo")(["cat.jpg", "dog.jpg"]):
...     print(answer.labels[0], answer.probabilities[0])

ONNX and OpenVINO files run without torch. Images are prefetched by threads and predicted in batches: at most the pixels
of three batches are in memory.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.config import Size
from vitrail.data.image_like import ImageLike, given, given_image
from vitrail.data.pixels import Pixels, UnreadableImage
from vitrail.errors import UserError, shown
from vitrail.runs import EngineName
from vitrail.runs.exported import ExportedModel, exported_card, is_exported
from vitrail.runs.run import Run
from vitrail.runs.windows import slide
from vitrail.tasks import Task
from vitrail.tasks.placement import Placement
from vitrail.tasks.task import Answer
from vitrail.weights.card import Card

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models import Model

Array = NDArray[Any]
P = TypeVar("P", bound="ImageLike")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """A model's answer for one image, or the reason why the image cannot be read."""

    file: str  # the path, or "image 1" for the first image if it is not a file
    answer: Answer = field(default_factory=Answer)  # empty for an image that cannot be read
    error: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The most likely classes, or all labels above their thresholds, best first; or the names of the values."""
        return self.answer.labels

    @property
    def probabilities(self) -> tuple[float, ...]:
        return self.answer.probabilities

    @property
    def values(self) -> tuple[float, ...]:
        """Predicted values of a regression, in the units of the data."""
        return self.answer.values


class TorchModel:
    """A PyTorch model and its card, computed by an engine."""

    def __init__(self, model: Model, card: Card, device: str, engine: EngineName):
        from vitrail.runs.engine import Engine

        self.model, self.card, self.device = model, card, device
        self._outputs = Engine(model, card.task, device, engine)
        self._features = Engine(model, None, device, engine, "features")

    @property
    def engine(self) -> str:
        """The name of the engine that computes the outputs."""
        return self._outputs.name

    @property
    def size(self) -> str:
        """The size of the model, as text."""
        from vitrail.models import parameters

        return f"{parameters(self.card.config):,} parameters"

    def preprocess(self, image: Pixels) -> Pixels:
        """A stored image as input of `outputs`, (C, H, W)."""
        return self.card.preprocess.pixels(image)

    def outputs(self, pixels: Array) -> Array:
        """The outputs, (B, K) float32, of pixels (B, C, H, W) of the model's size."""
        return self._compute(self._outputs, pixels)

    def features(self, pixels: Array) -> Array:
        """The feature vectors, (B, D) float32."""
        return self._compute(self._features, pixels)

    def tensor_outputs(self, pixels: Tensor) -> Tensor:
        """`outputs` of a tensor, on its device."""
        import torch

        with torch.no_grad():
            return self._outputs(self.card.preprocess.normalise(pixels))

    def settle(self, pixels: Array) -> None:
        """Chooses the engine of outputs and features now, by a batch of pixels."""
        import torch

        from vitrail.runs.engine import Engine

        with torch.inference_mode():
            self._outputs.settle(self.card.preprocess.normalise(torch.from_numpy(pixels).to(self.device)))
        self._features = Engine(self.model, None, self.device, self._outputs.name, "features")

    def fingerprint(self) -> str:
        """A hash that changes whenever the outputs may."""
        import torch

        card, constants = self.card, self.card.task.to_json()
        # The format of earlier versions' checkpoints, so that their distilled runs resume.
        known = (
            f"Known(model={card.model!r}, size={self.size!r}, classes={card.classes!r}, "
            f"preprocess={card.preprocess!r}, task={card.task.name!r}, "
            f"target_mean={constants.get('target_mean', ())!r}, target_std={constants.get('target_std', ())!r})"
        )
        digest = hashlib.blake2b(f"({card.config!r}, {known})".encode())
        for name, value in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _compute(self, compute: Callable[[Tensor], Tensor], pixels: Array) -> Array:
        import torch

        with torch.inference_mode():
            images = self.card.preprocess.normalise(torch.from_numpy(pixels).to(self.device))
            found = compute(images).cpu().numpy()
        if not np.isfinite(found).all():  # an answer could be made of them: the first class everywhere, or no object
            raise UserError(
                "The model's outputs must be finite, but some are not: the weights diverged or are damaged. Use an "
                "earlier checkpoint."
            )
        return found


class Predictor:
    """A trained model for inference: a run, weights of any supported format, a hub name, or an exported file."""

    def __init__(
        self,
        source: str | Path | Run,
        device: str | None = None,
        model: str | None = None,
        engine: EngineName = "auto",
        img_size: Size | None = None,
    ):
        """`model` names the architecture if the weights do not determine it. By default, the fastest device is used.

        `engine` is the program that computes the outputs: by default PyTorch, and the fastest one for long jobs.
        `img_size` is another image size than the model's, for which position embeddings are resampled.
        """
        path = source.path if isinstance(source, Run) else source
        if not isinstance(path, str | Path):
            raise UserError(
                "A model to predict with must be a run folder, a weights file or an exported file, but it is of type "
                f"{type(path).__name__}. Train or save it first."
            )
        self._model: TorchModel | ExportedModel
        if is_exported(path):
            _no_name(path, model)
            if engine != "auto":
                raise UserError(f"{path} is an exported file, which only its own runtime computes. Remove --engine.")
            if img_size is not None:
                raise UserError(f"{path} is an exported file, whose image size is fixed. Remove --img-size.")
            if device is not None and device.partition(":")[0] not in ("cpu", "cuda"):
                raise UserError(f"{path} is an exported file, which runs on cpu or cuda, not on {shown(device)}.")
            self._model = ExportedModel(path, device or "cpu")
            return
        from vitrail.device import choose_device
        from vitrail.runs.engine import check_engine
        from vitrail.weights import open_run

        device = choose_device(device)
        check_engine(engine, device)  # before the weights are read
        expected = source_card(path, model).config if model is not None else None
        opened, card = open_run(path, device, model=expected, img_size=img_size)
        opened.requires_grad_(False)
        self._model = TorchModel(opened, card, device, engine)

    @classmethod
    def of(cls, model: Model, card: Card, device: str = "cpu", engine: EngineName = "torch") -> Predictor:
        """A predictor of a PyTorch model in memory, by default computed as it is."""
        predictor = cls.__new__(cls)
        predictor._model = TorchModel(model, card, device, engine)
        return predictor

    @property
    def card(self) -> Card:
        return self._model.card

    @property
    def size(self) -> str:
        """The size of the model, as text."""
        return self._model.size

    @property
    def engine(self) -> str:
        """The name of the engine that computes the outputs, at present: `auto` may change it during a long job."""
        return self._model.engine

    @property
    def device(self) -> str:
        """The torch device that the outputs are computed on."""
        return self._model.device

    @property
    def exported(self) -> bool:
        """Whether this is a file of another runtime, which needs no torch."""
        return isinstance(self._model, ExportedModel)

    @property
    def module(self) -> Model | None:
        """The PyTorch model; None for a file of another runtime."""
        return self._model.model if isinstance(self._model, TorchModel) else None

    def settle(self, pixels: Array) -> None:
        """Chooses the engine now, by a batch of pixels, for a service that must not pause for a speed test later."""
        if isinstance(self._model, TorchModel):
            self._model.settle(pixels)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes whenever the answers may."""
        return self._model.fingerprint()

    def __call__(
        self,
        images: ImageLike | Iterable[ImageLike],
        top: int | None = None,
        *,
        threshold: float | None = None,
        batch_size: int = 32,
        workers: int = 2,
        windows: bool = False,
    ) -> Iterator[Prediction]:
        """Yields the answers for images, in order: one image or any iterable, which is consumed lazily.

        An image is a path, bytes, a file object, a PIL image, an array (H, W) or (H, W, C), or a tensor (C, H, W), see
        `vitrail.data.image_like`. Each answer has at most `top` labels: by default 5 classes, or all labels above their
        thresholds; with `threshold` only those of at least this probability. An unreadable image gives a Prediction
        with an error. With `windows`, a model of masks sees a large picture at its own scale, part by part.
        """
        if windows:
            yield from self._in_windows(given(images, self.card.preprocess.channels), threshold)
            return
        with closing(
            self.run(given(images, self.card.preprocess.channels), batch_size=batch_size, workers=workers)
        ) as answers:
            for image, outputs, placement in answers:
                if isinstance(outputs, UnreadableImage):
                    yield Prediction(image.name, self.card.task.answer(), str(outputs))
                else:
                    yield Prediction(image.name, answer(self.card.task, outputs, top, threshold, placement))

    def _in_windows(self, images: Iterable[ImageLike], threshold: float | None) -> Iterator[Prediction]:
        task, seen = self.card.task, self.card.preprocess
        if not task.slides:
            raise UserError(f"--windows is for masks, but this is a {task.title} model. Remove it.")
        for image in images:
            each = given_image(image)
            try:
                stored = each.pixels(seen.channels, seen.bits)
            except UnreadableImage as error:
                yield Prediction(each.name, task.answer(), str(error))
                continue
            yield Prediction(each.name, task.located(*slide(stored, seen, self.outputs), threshold))

    def run(
        self,
        images: Iterable[P],
        compute: Callable[[Array], Array] | None = None,
        *,
        batch_size: int = 32,
        workers: int = 2,
    ) -> Generator[tuple[P, Array | UnreadableImage, Placement | None], None, None]:
        """Yields each image with its outputs, or those of `compute`, or the reason why it cannot be read.

        The last element is how the image was placed into the model's input.
        """
        compute = compute or self.outputs
        with closing(read_ahead(images, self.placed, workers, ahead=2 * batch_size)) as read:
            while batch := list(islice(read, batch_size)):
                good = [found[0] for _, found in batch if not isinstance(found, UnreadableImage)]
                outputs = iter(compute(np.stack(good)) if good else ())
                for image, found in batch:
                    if isinstance(found, UnreadableImage):
                        yield image, found, None
                    else:
                        yield image, next(outputs), found[1]

    def pixels(self, image: ImageLike) -> Pixels:
        """An image as input of `outputs`, (C, H, W); raises UnreadableImage."""
        return self.placed(image)[0]

    def placed(self, image: ImageLike) -> tuple[Pixels, Placement]:
        """`pixels`, and how the image was placed into the model's input."""
        stored = given_image(image).pixels(self.card.preprocess.channels, self.card.preprocess.bits)
        return self._model.preprocess(stored), self.card.preprocess.placement(*stored.shape[:2])

    def outputs(self, pixels: Array) -> Array:
        """The model's outputs, (B, K) float32, for preprocessed pixels (B, C, H, W)."""
        return self._model.outputs(pixels)

    def tensor_outputs(self, pixels: Tensor) -> Tensor:
        """`outputs` of a tensor, on its device."""
        return self._model.tensor_outputs(pixels)

    def features(self, pixels: Array) -> Array:
        """The feature vectors, (B, D) float32, of preprocessed pixels."""
        return self._model.features(pixels)


def source_card(source: str | Path, model: str | None = None) -> Card:
    """The card of a model with a head, without loading its weights; `model` as in `Predictor`."""
    if is_exported(source):
        _no_name(source, model)
        return exported_card(source)
    from vitrail.models import is_meant
    from vitrail.weights import open_card

    card = open_card(source, model)
    if model is not None and not is_meant(card.model, model):
        raise UserError(f"The weights in {source} are a {card.model}, not a {model}.")
    card.need_head(source, ", so it cannot predict.")
    return card


def _no_name(source: str | Path, model: str | None) -> None:
    if model is not None:
        raise UserError(f"{source} is an exported file, so 'model' does not apply. Leave it out.")


def answer(
    task: Task,
    outputs: Array,
    top: int | None = None,
    threshold: float | None = None,
    placement: Placement | None = None,
) -> Answer:
    """The answer for one image, from the model's outputs (M,), without labels below a `threshold`.

    An annotated task needs to know how the image was placed into the model's input.
    """
    if task.annotated:
        assert placement is not None
        return task.located(outputs, placement, threshold)
    meant = task.means(outputs[None])
    return task.answers(meant, top)[0] if threshold is None else task.answers_above(meant, threshold, top)[0]


def read_ahead(
    images: Iterable[T], read: Callable[[T], R], workers: int, ahead: int
) -> Generator[tuple[T, R | UnreadableImage], None, None]:
    """Reads images in threads and in order, at most `ahead` of them in advance."""

    def attempt(image: T) -> R | UnreadableImage:
        try:
            return read(image)
        except UnreadableImage as error:
            return error

    waiting: deque[tuple[T, Future[R | UnreadableImage]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read")
    try:
        for image in images:
            waiting.append((image, pool.submit(attempt, image)))
            if len(waiting) == ahead:
                first, pixels = waiting.popleft()
                yield first, pixels.result()
        for rest, pixels in waiting:
            yield rest, pixels.result()
    finally:
        pool.shutdown(cancel_futures=True)
