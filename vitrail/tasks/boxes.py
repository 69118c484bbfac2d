"""Boxes: object detection. Each image has any number of objects, each with a class and a box; COCO's AP.

Targets are an (N,) object array of float32 arrays (n, 6), one per image: class, x0, y0, x1, y1 in pixels of the
original image, and 1 for objects to ignore; or (n, 7), with the area of objects, if the annotation has it. Outputs are
(B, Q, 4 + K) of a dense head or (B, Q, 4 + K + 1) of a set of predictions, whose last logit is "no object": the corners
of a box in pixels of the model's input, and logits.

Legend: B batch, N images, Q predictions, K classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig
from vitrail.errors import UserError, shortlist
from vitrail.tasks.annotated import Annotated
from vitrail.tasks.bootstrap import Samples
from vitrail.tasks.box_answer import BoxesAnswer
from vitrail.tasks.box_charts import box_charts
from vitrail.tasks.box_picture import compared
from vitrail.tasks.box_scores import BoxesScores, BoxMeter, above, image_f1, paired, restored
from vitrail.tasks.detect import detect, detections
from vitrail.tasks.placement import object_array
from vitrail.tasks.scores import Array, Floats, Meter, Numbers, Targets
from vitrail.tasks.task import Answer, Confused, Line, Task

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from vitrail.charts.kinds import Chart
    from vitrail.models import Model
    from vitrail.tasks.objective import Objective
    from vitrail.tasks.placement import Placement, Side

OBJECTS = 500  # of an image in training, at most
VISIBLE = 0.3  # share of an object that a crop must show; objects that show less are ignored
RARE = 10  # objects: a class with fewer is hardly learnt

_SHARES = (
    Measure("ap50", "AP50", "average precision at an IoU of 0.5, mean over the classes", percent=True),
    Measure("ap", "AP", "COCO's average precision: over IoUs from 0.5 to 0.95", percent=True),
    Measure("ap75", "AP75", "average precision at an IoU of 0.75", percent=True),
    Measure("ar100", "AR", "average recall with 100 boxes per image", percent=True),
)


@dataclass(frozen=True)
class Boxes(Annotated):
    """Objects with a class and a box."""

    thresholds: tuple[float, ...] = ()  # boxes are reported from this score on; chosen on validation images

    name: ClassVar[str] = "boxes"
    title: ClassVar[str] = "detection"
    one: ClassVar[str] = "class"
    many: ClassVar[str] = "classes"
    measures: ClassVar[tuple[Measure, ...]] = (
        *_SHARES,
        Measure(
            "error", "1 - F1", "boxes missed or invented at the thresholds, mean over images", lower_is_better=True
        ),
    )
    columns: ClassVar[tuple[Measure, ...]] = (
        Measure("ap50", "AP50", percent=True),
        Measure("ap", "AP", percent=True),
        Measure("ap75", "AP75", percent=True),
        Measure("precision", "precision", percent=True),
        Measure("recall", "recall", percent=True),
        Measure("f1", "F1", percent=True),
        Measure("threshold", "threshold"),
    )
    choices: ClassVar[Mapping[str, str]] = {"map": "ap"}
    ranked: ClassVar[str] = "ap50"
    answer: ClassVar[type[Answer]] = BoxesAnswer
    meant: ClassVar[str] = "detections"
    interchange: ClassVar[bool] = True
    heads: ClassVar[tuple[str, ...]] = ("fcos", "pyramid", "yolos", "yolos-mid", "detr")
    worst_title: ClassVar[str] = "Most boxes missed or invented first."
    best_title: ClassVar[str] = "Fewest boxes missed or invented first."
    certain: ClassVar[str] = "with a score nearest to a threshold"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Task:
        """Models of other libraries have no thresholds: no validation images have chosen them."""
        if document["thresholds"]:
            return super().from_json(document)
        return cls(super().from_json({**document, "thresholds": [0.5] * len(document["classes"])}).classes)

    # Targets ----------------------------------------------------------------------------------------------

    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        if not self.classes or not any(len(objects) for objects in parts["train"]):
            raise UserError(f"No training image of {source} has a box. Add annotations.")
        counts = self.objects(parts["train"])
        if not counts.all():
            raise UserError(
                f"No training image of {source} has a '{self.classes[int(counts.argmin())]}'. Add some that have it, "
                "or leave the class out."
            )

    def objects(self, targets: Targets) -> Numbers:
        """The number of objects of each class, (K,), without those to ignore."""
        kinds = [listed[listed[:, 5] == 0, 0].astype(int) for listed in targets]
        return np.bincount(np.concatenate([np.zeros(0, int), *kinds]), minlength=len(self.classes))

    def _has(self, targets: Targets) -> NDArray[np.bool_]:
        """Whether each image has objects of each class, (N, K)."""
        return np.array([np.isin(np.arange(len(self.classes)), listed[:, 0]) for listed in targets])

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        """The rarest class of an image."""
        has = self._has(targets)
        rarity = np.where(has, has.sum(axis=0), np.inf)
        return np.where(has.any(axis=1), rarity.argmin(axis=1), len(self.classes))

    def settle(self, targets: Targets, keep: Numbers, held: Numbers) -> tuple[Numbers, Numbers]:
        """Keeps one image of a class that would be held out entirely."""
        has = self._has(targets)
        lost = np.flatnonzero(has[held].any(axis=0) & ~has[keep].any(axis=0))
        back = np.array([held[has[held, k]][0] for k in lost], dtype=np.int64)
        return np.union1d(keep, back), np.setdiff1d(held, back)

    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        numbers = np.array([classes.index(name) for name in self.classes], np.float32)
        moved = [np.column_stack([numbers[each[:, 0].astype(int)], each[:, 1:]]) for each in targets]
        return object_array([each.astype(np.float32) for each in moved])

    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        for listed in targets:
            counts = Counter(self.classes[int(k)] for k in listed[:, 0])
            yield counted(counts), tuple(counts) or ("(none)",)

    def counts(self, targets: Targets) -> Numbers:
        return self._has(targets).sum(axis=0)

    def examples(self, targets: Targets, count: int, rng: np.random.Generator) -> dict[int, Numbers]:
        has = self._has(targets)
        return {k: rng.permutation(np.flatnonzero(has[:, k]))[:count] for k in range(len(self.classes))}

    def measured(self, scores: BoxesScores) -> Task:
        """With the thresholds that maximise F1 on the validation images."""
        return replace(self, thresholds=tuple(score.threshold for score in scores.per_class))

    # Training ---------------------------------------------------------------------------------------------

    def placed(self, annotation: Any, placement: Placement) -> Array:
        """The objects in the model's input, cut off at its sides, (M, 6); the class of padding is -1."""
        target = np.full((OBJECTS, 6), -1, np.float32)
        boxes = self._moved(annotation[:, 1:5], placement.forward)
        y, x, h, w = placement.shown
        x = placement.input[1] - x - w if placement.mirror else x
        cut = np.column_stack([boxes[:, :2].clip((x, y), (x + w, y + h)), boxes[:, 2:].clip((x, y), (x + w, y + h))])
        area, left = (np.prod(each[:, 2:] - each[:, :2], axis=1) for each in (boxes, cut))
        seen = left > 0
        listed = np.column_stack([annotation[:, 0], cut, annotation[:, 5]])
        listed[left < VISIBLE * area, 5] = 1
        listed = listed[seen][np.argsort(-left[seen], kind="stable")][:OBJECTS]
        target[: len(listed)] = listed
        return target

    @staticmethod
    def _moved(boxes: Array, move: Any) -> Array:
        """Boxes (n, 4) whose corners are moved, which a mirror swaps."""
        a, b = move(boxes[:, :2].astype(np.float64)), move(boxes[:, 2:].astype(np.float64))
        return np.column_stack([np.minimum(a, b), np.maximum(a, b)])

    def blank(self, images: int, size: tuple[int, int]) -> Array:
        """One object in the middle of every image."""
        targets, (h, w) = np.full((images, OBJECTS, 6), -1, np.float32), size
        targets[:, 0] = 0, w / 4, h / 4, 3 * w / 4, 3 * h / 4, 0
        return targets

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        from vitrail.tasks.box_loss import BoxLoss

        return BoxLoss(model, max(map(len, targets), default=1), config.optim.model_ema)

    # Answers ----------------------------------------------------------------------------------------------

    def meaning(self, outputs: Tensor) -> Tensor:
        """The detections, (B, 100, 6): x0, y0, x1, y1 in pixels of the input, score and class; best first."""
        return detect(outputs, len(self.classes))

    def meaning_at(self, outputs: Tensor, size: Side, shown: Side, input: Side) -> Tensor:
        """The detections in pixels of the image, cut off at its sides."""
        import torch

        found = self.meaning(outputs)
        (height, width), (rows, columns) = size, shown
        x0, y0, x1, y1 = found[..., :4].unbind(dim=-1)
        x0, x1 = ((x * width / columns).clamp(0, width) for x in (x0, x1))
        y0, y1 = ((y * height / rows).clamp(0, height) for y in (y0, y1))
        return torch.cat([torch.stack([x0, y0, x1, y1], dim=-1), found[..., 4:]], dim=-1)

    def means(self, outputs: NDArray[np.floating]) -> Floats:
        return detections(outputs, len(self.classes))

    def steady(self, meant: Array) -> Array:
        """The scores: boxes with almost equal ones may change places."""
        return meant[..., 4]

    def strength(self, outputs: Tensor) -> Tensor:
        """The score of the strongest box of each class, (B, K)."""
        logits = outputs[..., 4:]
        sure = logits.sigmoid() if logits.shape[-1] == len(self.classes) else logits.softmax(dim=-1)[..., :-1]
        return sure.amax(dim=1)

    def place_back(self, meant: NDArray[np.floating], placement: Placement) -> Array:
        """Detections (n, 6) of one image in pixels of the original image, cut off at its sides."""
        height, width = placement.size
        boxes = self._moved(meant[:, :4], placement.back).clip(0, (width, height, width, height))
        found: Array = np.column_stack([boxes, meant[:, 4:]])
        return found[(boxes[:, 2:] > boxes[:, :2]).all(axis=1) & (meant[:, 4] > 0)]

    def _locate(self, outputs: NDArray[np.floating], targets: Targets) -> list[Array]:
        return [self.place_back(m, truth.placement) for m, truth in zip(self.means(outputs), targets, strict=True)]

    def located(self, outputs: NDArray[np.floating], placement: Placement, threshold: float | None = None) -> Answer:
        found = self.place_back(self.means(outputs[None])[0], placement)
        return self._answer(found, placement.size, threshold)

    def _answer(self, found: Array, size: tuple[int, int], threshold: float | None) -> Answer:
        thresholds = self._thresholds if threshold is None else (threshold,) * len(self.classes)
        kept = above(found, thresholds)
        names = tuple(self.classes[int(k)] for k in kept[:, 5])
        boxes = tuple(tuple(round(float(v), 2) for v in box) for box in kept[:, :4])
        return BoxesAnswer(names, tuple(kept[:, 4].tolist()), boxes=boxes, size=size, classes=self.classes)

    @property
    def _thresholds(self) -> tuple[float, ...]:
        return self.thresholds or (0.5,) * len(self.classes)

    def meter(self) -> Meter:
        return BoxMeter(self.classes, self.thresholds, self._locate)

    def restore(self, document: Mapping[str, Any]) -> BoxesScores:
        return restored(document)

    # Single predictions -----------------------------------------------------------------------------------

    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        """1 - F1 at the thresholds and an IoU of 0.5."""
        found = zip(self._locate(outputs, targets), targets, strict=True)
        return np.array([1 - image_f1(boxes, truth.annotation, self._thresholds) for boxes, truth in found])

    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        return self.losses(outputs, targets) == 0

    def best(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        """Images with the fewest mistakes, those with more objects first."""
        objects = np.array([len(truth.annotation) for truth in targets])
        return np.lexsort((-objects, self.losses(outputs, targets)))[:count]

    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        """The distance of the least certain score from its threshold."""
        meant = self.means(outputs)
        return np.abs(meant[..., 4] - np.asarray(self._thresholds)[meant[..., 5].astype(int)]).min(axis=1)

    def _pairs(self, meant: NDArray[np.floating], truth: Any) -> tuple[Array, list[tuple[int, int]]]:
        found = above(self.place_back(meant, truth.placement), self._thresholds)
        return found, paired(found, truth.annotation)

    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        found, pairs = self._pairs(meant, target)
        right = Counter(self.classes[int(found[d, 5])] for d, g in pairs if d >= 0 and g >= 0)
        missed = Counter(self.classes[int(target.annotation[g, 0])] for d, g in pairs if d < 0)
        wrong = Counter(self.classes[int(found[d, 5])] for d, g in pairs if g < 0)
        lines: list[Line] = [(f"right: {counted(right)}", "plain", 2)]
        lines += [(f"missed: {counted(missed)}", "wrong", 2)] if missed else []
        return lines + ([(f"wrong: {counted(wrong)}", "wrong", 2)] if wrong else [])

    def said(self, meant: NDArray[np.floating], target: Any) -> tuple[str, str]:
        found, _ = self._pairs(meant, target)
        both = found[:, 5], target.annotation[:, 0]
        predicted, true = (counted(Counter(self.classes[int(k)] for k in kinds)) for kinds in both)
        return predicted, true

    def layers(self, outputs: NDArray[np.floating], target: Any) -> tuple[Image.Image, Image.Image]:
        """Right, missed and wrong boxes, and the objects."""
        found, pairs = self._pairs(self.means(outputs[None])[0], target)
        return compared(target.placement.size, found, target.annotation, pairs, self.classes)

    def confused(self, outputs: NDArray[np.floating], targets: Targets, most: int, examples: int) -> list[Confused]:
        """The classes that are missed, invented or taken for another most often."""
        where: dict[tuple[str, str], list[int]] = {}
        total: Counter[str] = Counter()
        for i, (boxes, truth) in enumerate(zip(self._locate(outputs, targets), targets, strict=True)):
            kept, objects = above(boxes, self._thresholds), truth.annotation
            total.update(self.classes[int(k)] for k in objects[objects[:, 5] == 0, 0])
            for d, g in paired(kept, objects, classless=True):
                true = "background" if g < 0 else self.classes[int(objects[g, 0])]
                given = "background" if d < 0 else self.classes[int(kept[d, 5])]
                if true != given:
                    where.setdefault((true, given), []).append(i)
        total["background"] = sum(total.values())
        mistakes = [
            Confused(true, given, len(at), total[true], tuple(i for i, _ in Counter(at).most_common(examples)))
            for (true, given), at in where.items()
        ]
        return sorted(mistakes, key=lambda mistake: -mistake.count)[:most]

    def ranking(self, outputs: NDArray[np.floating]) -> Numbers:
        """The classes of each image by their strongest box, (N, K)."""
        return np.argsort(-outputs[..., 4 : 4 + len(self.classes)].max(axis=1), axis=1, kind="stable")

    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return self._agree(given, expected, tolerance, 0.0)

    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return ~self._agree(given, expected, tolerance, tolerance)

    def _agree(self, given: Array, expected: Array, tolerance: float, margin: float) -> NDArray[np.bool_]:
        """Whether the boxes of two backends are the same, but for those within `margin` of their threshold."""
        agree = []
        for ours, theirs in zip(self.means(given), self.means(expected), strict=True):
            fits = True
            for one, other in ((ours, theirs), (theirs, ours)):
                sure = above(one, [t + margin for t in self._thresholds])
                loose = above(other, [t - margin for t in self._thresholds])
                objects = np.column_stack([loose[:, 5], loose[:, :4], np.zeros(len(loose))])
                fits = fits and all(g >= 0 for d, g in paired(sure, objects) if d >= 0)
            agree.append(fits)
        return np.array(agree, bool)

    # Reports ----------------------------------------------------------------------------------------------

    def charts(self, scores: BoxesScores) -> list[Chart]:
        return box_charts(scores)

    def sample(self, scores: Any, outputs: NDArray[np.floating] | None, targets: Targets | None) -> Samples:
        return Samples()

    def groups(self, targets: Targets) -> tuple[Sequence[str], Numbers, str]:
        rarest = self.strata(np.array([*targets, None], object)[:-1], 0.0)
        return [*self.classes, "(no object)"], rarest, "the rarest class of an image"

    def goal(self, data: str) -> str:
        return f"detect {shortlist(self.classes, 3)} in {data}"

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"detects {len(self.classes):,} classes of objects in {data}: an AP50 of ", f" on {images}."


def counted(names: Counter[str]) -> str:
    """How many of each: "18 RBC, 1 WBC"."""
    return ", ".join(f"{count} {name}" for name, count in names.most_common()) or "(none)"
