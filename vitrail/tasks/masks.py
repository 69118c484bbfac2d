"""Semantic segmentation: every pixel has a class. Cross-entropy; mIoU, Dice, boundary F-score; masks as answers.

An annotation is an object with `labels()`, the class of every pixel, (H, W) int16 with -1 for pixels that count
nowhere, and `counts`, the pixels of each class, (K,): see `data/masks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.charts import build
from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig, override
from vitrail.errors import UserError, shortlist
from vitrail.tasks.annotated import Annotated
from vitrail.tasks.arrays import softmax
from vitrail.tasks.bootstrap import Samples, collect, draws
from vitrail.tasks.mask_answer import MaskAnswer, mask_layer
from vitrail.tasks.mask_scores import IGNORE, MaskMeter, MaskScores, confusion, original, restored_scores
from vitrail.tasks.multiclass import class_weights
from vitrail.tasks.placement import Placement, Side, Truth, object_array, truths
from vitrail.tasks.scores import LOSS, Array, Floats, Meter, Numbers, Targets
from vitrail.tasks.task import Answer, Confused, Line

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from vitrail.charts.kinds import Chart
    from vitrail.models import Model
    from vitrail.tasks.objective import Objective

FAIR = 0.5  # mean IoU of an image from which its prediction counts as right


class Mask(Protocol):
    """The annotation of an image."""

    @property
    def counts(self) -> Numbers:
        """The pixels of each class, (K,)."""

    def labels(self) -> NDArray[np.int16]:
        """The class of every pixel, (H, W); -1 where there is none."""

    def renumbered(self, numbers: Numbers, classes: int) -> Mask:
        """The mask with class k as `numbers[k]` of `classes`."""


@dataclass(frozen=True)
class Masks(Annotated):
    """A class for every pixel."""

    name: ClassVar[str] = "masks"
    title: ClassVar[str] = "segmentation"
    one: ClassVar[str] = "class"
    many: ClassVar[str] = "classes"
    heads: ClassVar[tuple[str, ...]] = ("linear", "mlp", "mask", "setr-naive", "setr-pup", "setr-mla")
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("miou", "mIoU", "mean over the classes of intersection over union", percent=True, heading="Mean IoU"),
        Measure("dice", "mean Dice", "mean over the classes of the Dice coefficient", percent=True),
        Measure("accuracy", "pixel accuracy", "pixels with the right class", percent=True, detail=True),
        Measure("mean_accuracy", "mean accuracy", "mean of the classes' pixel accuracy", percent=True, detail=True),
        Measure("boundary", "boundary F", "mean of the classes' boundary F-score", percent=True, detail=True),
        replace(LOSS, meaning="cross-entropy of the labelled pixels, mean over images"),
    )
    columns: ClassVar[tuple[Measure, ...]] = (
        Measure("iou", "IoU", percent=True),
        Measure("dice", "Dice", percent=True),
        Measure("accuracy", "accuracy", percent=True),
        Measure("boundary", "boundary F", percent=True),
        Measure("share", "pixels", percent=True),
    )
    choices: ClassVar[Mapping[str, str]] = {"miou": "miou", "dice": "dice", "loss": "loss"}
    logged: ClassVar[tuple[Measure, ...]] = (Measure("accuracy", "pixel accuracy", percent=True),)
    ranked: ClassVar[str] = "iou"
    slides: ClassVar[bool] = True
    objectives: ClassVar[tuple[str, ...]] = ("ce", "dice", "focal")
    answer: ClassVar[type[Answer]] = MaskAnswer
    worst_title: ClassVar[str] = "Lowest mean IoU first. The mask lies over the image; pixels without a label are dark."
    best_title: ClassVar[str] = "Highest mean IoU first."

    # Targets ----------------------------------------------------------------------------------------------

    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        if len(self.classes) < 2:
            raise UserError(f"The masks of {source} have only one class, '{self.classes[0]}'. Segmentation needs two.")
        pixels = {split: _pixels(targets) for split, targets in parts.items()}
        for k, name in enumerate(self.classes):
            where = [split for split, counts in pixels.items() if counts[k]]
            if where and not pixels["train"][k]:
                raise UserError(
                    f"The class '{name}' is in the {where[0]} split of {source}, but not in train. Add masks of it to "
                    "train, or map it to another class or to 'ignore' with --mask-values."
                )
        if np.count_nonzero(pixels["train"]) < 2:
            only = self.classes[int(pixels["train"].argmax())]
            raise UserError(
                f"All labelled pixels of the training masks of {source} are '{only}'. Segmentation needs two classes."
            )

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        """By the rarest class of each image, so that every class is on both sides."""
        has = self._has(targets)
        if not len(has):
            return np.zeros(0, np.int64)
        rare = np.argsort(np.argsort(has.sum(axis=0), kind="stable"), kind="stable")
        return np.where(has, rare, len(self.classes)).argmin(axis=1).astype(np.int64)

    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        if self.classes == tuple(classes):
            return targets
        numbers = np.array([classes.index(name) for name in self.classes], np.int64)
        return object_array([mask.renumbered(numbers, len(classes)) for mask in targets])

    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        for has in self._has(targets):
            names = tuple(name for name, there in zip(self.classes, has, strict=True) if there)
            yield shortlist(names, 3) if names else "(no label)", names

    def counts(self, targets: Targets) -> Numbers:
        return self._has(targets).sum(axis=0)

    def examples(self, targets: Targets, count: int, rng: np.random.Generator) -> dict[int, Numbers]:
        has = self._has(targets)
        return {k: rng.permutation(np.flatnonzero(has[:, k]))[:count] for k in range(len(self.classes))}

    def audit(self, targets: Targets) -> Iterator[tuple[str, Literal["error", "note"], str, list[int]]]:
        pixels = _pixels(targets)
        shares = pixels / max(int(pixels.sum()), 1)
        text = ", ".join(f"{name} {share:.2%}" for name, share in zip(self.classes, shares, strict=True))
        yield "pixels", "note", text, []
        for k in np.flatnonzero(pixels == 0).tolist():
            yield "annotation", "error", f"no mask has the class '{self.classes[k]}'", []
        for i in np.flatnonzero(self._has(targets).sum(axis=1) <= 1).tolist():
            yield "empty", "note", next(self.describe(targets[i : i + 1]))[0], [i]

    def _has(self, targets: Targets) -> NDArray[np.bool_]:
        """Whether each image has pixels of each class, (N, K)."""
        return np.array([_mask(target).counts > 0 for target in targets]).reshape(len(targets), len(self.classes))

    @property
    def remedy(self) -> str:
        return "--class-weights or --loss dice"

    # Training ---------------------------------------------------------------------------------------------

    def adapt(self, config: TrainConfig) -> TrainConfig:
        return override(super().adapt(config), {"loss": "ce"})

    def placed(self, annotation: Mask, placement: Placement) -> Array:
        return placement.labels(annotation.labels(), IGNORE)

    def blank(self, images: int, size: tuple[int, int]) -> Array:
        return np.zeros((images, *size), np.int16)

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        from vitrail.tasks.mask_loss import SegmentationLoss
        from vitrail.tasks.objective import class_tensor

        weights = class_weights(_pixels(targets)) if config.source.class_weights else None
        loss: Any = config.optim.loss
        return SegmentationLoss(model, loss, class_tensor(weights, model), config.optim.model_ema)

    # Answers ----------------------------------------------------------------------------------------------

    def meaning(self, outputs: Tensor) -> Tensor:
        """Probabilities, (B, K, h, w), at the resolution of the outputs."""
        probabilities: Tensor = softmax(outputs)
        return probabilities

    def meaning_at(self, outputs: Tensor, size: Side, shown: Side, input: Side) -> Tensor:
        """Probabilities, (B, K, H, W): logits are resized as by `Placement.restore`, then normalised."""
        import torch

        def weights(pixels: int, part: float, cells: int) -> Tensor:
            centres = (torch.arange(pixels, device=outputs.device) + 0.5) / pixels * part * cells
            near = (1 - (torch.arange(cells, device=outputs.device) + 0.5 - centres[:, None]).abs()).clamp(min=0)
            return near / near.sum(dim=1, keepdim=True)

        share = shown[0] / input[0], shown[1] / input[1]
        rows, columns = (weights(*each) for each in zip(size, share, outputs.shape[2:], strict=True))
        return (rows @ outputs @ columns.T).softmax(dim=1)

    def means(self, outputs: NDArray[np.floating]) -> Floats:
        """Probabilities, (B, K, h, w)."""
        exps = np.exp(outputs.astype(np.float64) - outputs.max(axis=1, keepdims=True))
        return np.asarray(exps / exps.sum(axis=1, keepdims=True))

    def strength(self, outputs: Tensor) -> Tensor:
        """The mean probability of each class, (B, K)."""
        return self.meaning(outputs).mean(dim=(2, 3))

    def located(self, outputs: NDArray[np.floating], placement: Placement, threshold: float | None = None) -> Answer:
        if threshold is not None:
            raise UserError("A threshold does not apply to masks: every pixel has its likeliest class. Remove it.")
        return self.of_mask(placement.restore(outputs).argmax(axis=0))

    def of_mask(self, mask: NDArray[np.integer[Any]]) -> MaskAnswer:
        """The answer of a mask (H, W) of class indices."""
        areas = np.bincount(mask.ravel(), minlength=len(self.classes))
        order = [k for k in np.argsort(-areas, kind="stable").tolist() if areas[k]]
        small: NDArray[np.integer[Any]] = mask.astype(np.uint8 if len(self.classes) <= 256 else np.uint16)
        shares = tuple(float(areas[k] / mask.size) for k in order)
        return MaskAnswer(tuple(self.classes[k] for k in order), shares, mask=small, classes=self.classes)

    def layers(self, outputs: NDArray[np.floating], target: Any) -> tuple[Image.Image, Image.Image]:
        answer, truth = self.located(outputs, target.placement), target.annotation.labels()
        assert isinstance(answer, MaskAnswer)
        return answer.layer(), mask_layer(truth, self.classes)

    def meter(self) -> Meter:
        return MaskMeter(self.classes)

    def restore(self, document: Mapping[str, Any]) -> MaskScores:
        return restored_scores(document)

    # Single predictions -----------------------------------------------------------------------------------

    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        """1 minus the mean IoU of each image."""
        return 1 - np.array([_image_iou(c) for c in self._confusions(outputs, targets)])

    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        return np.asarray(self.losses(outputs, targets) <= 1 - FAIR)

    def worst(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        return np.argsort(-self.losses(outputs, targets), kind="stable")[:count]

    def best(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        return np.argsort(self.losses(outputs, targets), kind="stable")[:count]

    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        """The mean lead of the first class of a pixel over the second."""
        chances = np.sort(self.means(outputs), axis=1)
        return np.asarray((chances[:, -1] - chances[:, -2]).mean(axis=(1, 2)))

    def _confusions(self, outputs: NDArray[np.floating], targets: Targets) -> Iterator[Numbers]:
        for logits, truth in zip(outputs, targets, strict=True):
            said = original(logits, truth).argmax(axis=0)
            yield confusion(truth.annotation.labels(), said, len(self.classes))

    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        predicted, truth = self.said(meant, target)
        return [(f"true: {truth}", "plain", 2), (f"predicted: {predicted}", "muted", 2)]

    def said(self, meant: NDArray[np.floating], target: Any) -> tuple[str, str]:
        said = target.placement.restore(meant.astype(np.float32)).argmax(axis=0)
        score = _image_iou(confusion(target.annotation.labels(), said, len(self.classes)))
        ((words, _),) = self.describe(truths([target.annotation], [target.placement]))
        return f"{self.of_mask(said).text(0)}; mean IoU {score:.0%}", words

    def confused(self, outputs: NDArray[np.floating], targets: Targets, most: int, examples: int) -> list[Confused]:
        """The largest off-diagonal cells of the confusion matrix, in pixels."""
        each = np.array(list(self._confusions(outputs, targets)))
        total = each.sum(axis=0)
        wrong = total.copy()
        np.fill_diagonal(wrong, 0)
        found = []
        for cell in np.argsort(-wrong.ravel(), kind="stable")[:most].tolist():
            true, other = divmod(cell, len(self.classes))
            if wrong[true, other]:
                numbers = np.argsort(-each[:, true, other], kind="stable")[:examples]
                numbers = numbers[each[numbers, true, other] > 0]
                count, of = int(wrong[true, other]), int(total[true].sum())
                found.append(Confused(self.classes[true], self.classes[other], count, of, tuple(numbers.tolist())))
        return found

    def ranking(self, outputs: NDArray[np.floating]) -> Numbers:
        """The classes of each image from the largest to the smallest area, (N, K)."""
        won = outputs.argmax(axis=1).reshape(len(outputs), -1)
        areas = (won[:, :, None] == np.arange(len(self.classes))).sum(axis=1)
        return np.argsort(-areas, axis=1, kind="stable")

    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return np.asarray((given.argmax(axis=1) == expected.argmax(axis=1)).mean(axis=(1, 2)) > 1 - _SLACK)

    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        """Whether more than a few pixels differ although their class is clear."""
        chosen = np.take_along_axis(expected, given.argmax(axis=1)[:, None], axis=1)[:, 0]
        wrong = chosen < expected.max(axis=1) - tolerance * np.abs(expected).max()
        return np.asarray(wrong.mean(axis=(1, 2)) > _SLACK)

    # Reports ----------------------------------------------------------------------------------------------

    def charts(self, scores: MaskScores) -> list[Chart]:
        return [build.confusion(scores.confusion, [score.name for score in scores.per_class])]

    def sample(self, scores: MaskScores, outputs: NDArray[np.floating] | None, targets: Targets | None) -> Samples:
        if outputs is None or targets is None:
            return Samples()
        each = np.array(list(self._confusions(outputs, targets)))
        hits, true, said = each.diagonal(axis1=1, axis2=2), each.sum(axis=2), each.sum(axis=1)
        parts = []
        for weights in draws(len(each)):
            inside, real, given = (weights @ part for part in (hits, true, said))
            by_class = {
                "iou": inside / np.maximum(real + given - inside, 1),
                "dice": 2 * inside / np.maximum(real + given, 1),
                "accuracy": inside / np.maximum(real, 1),
            }
            seen = real + given > 0
            whole = {
                "accuracy": inside.sum(axis=1) / np.maximum(real.sum(axis=1), 1),
                "miou": _means(by_class["iou"], seen),
                "dice": _means(by_class["dice"], seen),
                "mean_accuracy": _means(by_class["accuracy"], real > 0),
            }
            parts.append((whole, by_class))
        return collect(parts)

    def goal(self, data: str) -> str:
        return f"segment {data} into {len(self.classes):,} classes"

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"segments {data} into {len(self.classes):,} classes: a mean IoU of ", f" on {images}."


_SLACK = 1e-3  # share of pixels that two runtimes may see differently


def _mask(target: Any) -> Mask:
    """The mask of a target, which may be the truth of an evaluation."""
    mask: Mask = target.annotation if isinstance(target, Truth) else target
    return mask


def _pixels(targets: Targets) -> Numbers:
    """The pixels of each class, (K,)."""
    return np.asarray(sum(_mask(target).counts for target in targets))


def _means(values: Floats, there: NDArray[np.bool_]) -> Floats:
    """The mean of each row over the classes that are there, (R,)."""
    return np.asarray((values * there).sum(axis=1) / np.maximum(there.sum(axis=1), 1))


def _image_iou(counts: Numbers) -> float:
    """The mean IoU of the classes of one image; 1 for an image without labels."""
    hits, union = counts.diagonal(), counts.sum(axis=0) + counts.sum(axis=1) - counts.diagonal()
    there = counts.sum(axis=1) > 0
    return float((hits[there] / union[there]).mean()) if there.any() else 1.0
