"""The scores of predicted boxes, and the meter that accumulates them.

Boxes are in pixels of the original image. Detections are (n, 6): x0, y0, x1, y1, score, class. Objects are (n, 6):
class, x0, y0, x1, y1, and 1 for those to ignore; or (n, 7), with their area, by which COCO sorts them into sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError, shortlist
from vitrail.tasks.coco import RECALLS, Matched, accumulate, best_threshold, match, overlaps
from vitrail.tasks.scores import Array, Floats, Meter, NotFinite, Numbers, Scores, Targets, files_line, rounded

ENOUGH = 0.5  # IoU from which on a box is right, where a single threshold is needed
MEASURES = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
)


@dataclass(frozen=True)
class BoxScore:
    """The scores of one class. They are None if no image has it."""

    name: str
    ap: float | None
    ap50: float | None
    ap75: float | None
    precision: float  # with the others, at the threshold and an IoU of 0.5
    recall: float
    f1: float
    threshold: float  # boxes are reported from this score on
    support: int  # objects


@dataclass(frozen=True, eq=False, kw_only=True)
class BoxesScores(Scores):
    """COCO's measures, None where no object is of that size; means over classes skip those without objects.

    They have no loss: detections and objects do not show which points or tokens of the model answer for which object.
    """

    error: float  # 1 - F1 at the thresholds and an IoU of 0.5, mean over images
    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    ar1: float | None
    ar10: float | None
    ar100: float | None
    ar_small: float | None
    ar_medium: float | None
    ar_large: float | None
    per_class: list[BoxScore]
    confusion: Numbers = field(repr=False)  # K+1 K+1, true classes in rows, "background" last
    curves: Floats = field(repr=False)  # R K, precision at each of RECALLS and an IoU of 0.5
    chosen_here: bool  # whether the thresholds were chosen on these images

    @property
    def main(self) -> float:
        return self.ap50 or 0.0

    def by(self, best: str | None) -> tuple[float, float]:
        return (self.ap or 0.0, 0.0) if best == "map" else super().by(best)

    @property
    def each(self) -> list[BoxScore]:
        return self.per_class

    def row(self) -> dict[str, float]:
        return {name: float(getattr(self, name) or 0.0) for name in ("ap50", "ap", "ap75", "ar100", "error")}

    def to_json(self) -> dict[str, Any]:
        return (
            {"images": self.images, "error": round(self.error, 6)}
            | rounded({name: getattr(self, name) for name in MEASURES})
            | {
                "per_class": [rounded(asdict(score)) for score in self.per_class],
                "confusion": self.confusion.tolist(),
                "precision_at_recall": [[known(round(value, 6)) for value in row] for row in self.curves.T.tolist()],
                "thresholds_chosen_on_these_images": self.chosen_here,
            }
        )

    def csv(self) -> dict[str, list[list[object]]]:
        names = [*(score.name for score in self.per_class), "(background)"]
        rows = [list(rounded(asdict(score)).values()) for score in self.per_class]
        return {
            "per_class": [[f.name if f.name != "name" else "class" for f in fields(BoxScore)], *rows],
            "confusion": [
                ["true \\ predicted", *names],
                *([name, *row] for name, row in zip(names, self.confusion.tolist(), strict=True)),
            ],
        }

    def table(self, most: int = 20) -> str:
        titles = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP small", "ap_medium": "AP medium"}
        titles |= {"ap_large": "AP large", "ar1": "AR, 1 box", "ar10": "AR, 10 boxes", "ar100": "AR, 100 boxes"}
        titles |= {"ar_small": "AR small", "ar_medium": "AR medium", "ar_large": "AR large"}
        lines = [f"{'images':<18} {self.images:>7,}"]
        lines += [f"{title:<18} {_share(getattr(self, name), 2):>7}" for name, title in titles.items()]
        lines.append("")
        shown = self.per_class
        if len(shown) > most:
            shown = sorted(shown, key=lambda score: 2.0 if score.ap50 is None else score.ap50)[:most]
            lines.append(f"The {most} classes of {len(self.per_class)} with the lowest AP50:")
        width = max(len("class"), *(len(score.name) for score in shown))
        lines.append(f"{'class':<{width}}      AP    AP50    AP75  precision  recall      F1  threshold  objects")
        lines += [
            f"{s.name:<{width}}  {_share(s.ap):>6}  {_share(s.ap50):>6}  {_share(s.ap75):>6}  {s.precision:>9.1%}  "
            f"{s.recall:>6.1%}  {s.f1:>6.1%}  {s.threshold:>9.3f}  {s.support:>7,}"
            for s in shown
        ]
        if unseen := [score.name for score in self.per_class if not score.support]:
            lines += ["", f"No image here has {shortlist(unseen, 5)}: left out of the means over classes."]
        chosen = "these images" if self.chosen_here else "the run's validation images"
        lines += ["", f"Thresholds maximise F1 at an IoU of 0.5 on {chosen}, so F1 is optimistic there."]
        return "\n".join(lines + files_line(self.folder))


def _share(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}%}"


class BoxMeter(Meter):
    """Keeps the detections and the objects of every image."""

    def __init__(
        self,
        classes: Sequence[str],
        thresholds: Sequence[float],
        locate: Callable[[NDArray[np.floating], Targets], list[Array]],
    ):
        self._classes, self._thresholds, self._locate = classes, thresholds, locate
        self._images: list[tuple[Array, Array]] = []

    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:
        if not np.isfinite(outputs).all():
            raise NotFinite(
                "The model's outputs must be finite, but some are not: the weights diverged or are damaged. Use an "
                "earlier checkpoint."
            )
        found = self._locate(outputs, targets)
        self._images += [(boxes, truth.annotation) for boxes, truth in zip(found, targets, strict=True)]

    def merge(self, other: BoxMeter) -> None:
        self._images += other._images

    def scores(self) -> BoxesScores:
        if not self._images:
            raise UserError("The split has no images to measure.")
        return measure(self._classes, self._thresholds, self._images)


def measure(classes: Sequence[str], thresholds: Sequence[float], images: Sequence[tuple[Array, Array]]) -> BoxesScores:
    """The scores of the detections and objects of some images. Without thresholds, the best are chosen."""
    matched = [[match_class(found, objects, k) for found, objects in images] for k in range(len(classes))]
    precision = accumulate(matched)
    chosen = list(thresholds) or [best_threshold(each)[0] for each in matched]
    by_class = []
    for k, name in enumerate(classes):
        hits, given, support = _counts(matched[k], chosen[k])
        ap, ap50, ap75 = (known(float(precision.class_ap(t)[k])) for t in (None, 0.5, 0.75))
        share, found, f1 = hits / max(given, 1), hits / max(support, 1), 2 * hits / max(given + support, 1)
        by_class.append(BoxScore(name, ap, ap50, ap75, share, found, f1, float(chosen[k]), support))
    errors = [1 - image_f1(found, objects, chosen) for found, objects in images]
    return BoxesScores(
        images=len(images),
        error=float(np.mean(errors)),
        ap=known(precision.ap()),
        ap50=known(precision.ap(0.5)),
        ap75=known(precision.ap(0.75)),
        ap_small=known(precision.ap(area="small")),
        ap_medium=known(precision.ap(area="medium")),
        ap_large=known(precision.ap(area="large")),
        ar1=known(precision.ar(1)),
        ar10=known(precision.ar(10)),
        ar100=known(precision.ar(100)),
        ar_small=known(precision.ar(area="small")),
        ar_medium=known(precision.ar(area="medium")),
        ar_large=known(precision.ar(area="large")),
        per_class=by_class,
        confusion=confusion(images, chosen),
        curves=precision.curve() if len(classes) else np.zeros((len(RECALLS), 0)),
        chosen_here=not thresholds,
    )


def known(value: float) -> float | None:
    return None if np.isnan(value) else value


def match_class(found: Array, objects: Array, k: int) -> Matched:
    """The detections of class k in one image against its objects."""
    own, true = found[found[:, 5] == k].astype(np.float64), objects[objects[:, 0] == k].astype(np.float64)
    return match(own[:, :4], own[:, 4], true[:, 1:5], true[:, 5] > 0, true[:, 6] if true.shape[1] > 6 else None)


def _counts(images: Sequence[Matched], threshold: float) -> tuple[int, int, int]:
    """Right boxes, all boxes and objects of a class, of scores from `threshold` on."""
    hits = given = support = 0
    for image in images:
        counts = (image.scores >= threshold) & ~image.ignored[0, 0]
        hits, given = hits + int((image.hits[0, 0] & counts).sum()), given + int(counts.sum())
        support += int(image.objects[0])
    return hits, given, support


def paired(found: Array, objects: Array, classless: bool = False) -> list[tuple[int, int]]:
    """Detections and the objects they match at an IoU of 0.5, (-1 for none on either side), best scores first.

    A detection takes the free object of its class, or with `classless` of any class, that it overlaps most. One that
    matches only an ignored object is left out.
    """
    free, pairs = np.ones(len(objects), bool), []
    ignored = objects[:, 5] > 0
    iou = overlaps(found[:, :4].astype(np.float64), objects[:, 1:5].astype(np.float64), ignored)
    for d in np.argsort(-found[:, 4], kind="stable").tolist():
        fits = (iou[d] >= ENOUGH) & (free | ignored)
        same = fits & (objects[:, 0] == found[d, 5])
        fits = same if same.any() or not classless else fits
        real = fits & ~ignored
        if real.any():
            g = int(np.where(real, iou[d], -1).argmax())
            free[g] = False
            pairs.append((d, g))
        elif not fits.any():
            pairs.append((d, -1))
    return pairs + [(-1, int(g)) for g in np.flatnonzero(free & ~ignored)]


def above(found: Array, thresholds: Sequence[float]) -> Array:
    """The detections from the threshold of their class on."""
    kept: Array = found[found[:, 4] >= np.asarray([*thresholds, np.inf])[found[:, 5].astype(int)]]
    return kept


def image_f1(found: Array, objects: Array, thresholds: Sequence[float]) -> float:
    """F1 of one image at the thresholds and an IoU of 0.5; 1 without objects and boxes."""
    pairs = paired(above(found, thresholds), objects)
    hits = sum(d >= 0 and g >= 0 for d, g in pairs)
    return 2 * hits / (len(pairs) + hits) if pairs else 1.0


def confusion(images: Sequence[tuple[Array, Array]], thresholds: Sequence[float]) -> Numbers:
    """Objects by true and predicted class; the last row and column are the background."""
    nothing = len(thresholds)
    counts = np.zeros((nothing + 1, nothing + 1), np.int64)
    for found, objects in images:
        kept = above(found, thresholds)
        for d, g in paired(kept, objects, classless=True):
            true = nothing if g < 0 else int(objects[g, 0])
            counts[true, nothing if d < 0 else int(kept[d, 5])] += 1
    return counts


def restored(document: Mapping[str, Any]) -> BoxesScores:
    """The inverse of `BoxesScores.to_json`."""
    curves = np.array(document["precision_at_recall"], np.float64).reshape(-1, len(RECALLS)).T
    measures: dict[str, Any] = {name: document.get(name) for name in MEASURES}  # earlier versions had fewer
    return BoxesScores(
        images=document["images"],
        error=document["error"],
        **measures,
        per_class=[BoxScore(**score) for score in document["per_class"]],
        confusion=np.array(document["confusion"], np.int64),
        curves=curves,
        chosen_here=document["thresholds_chosen_on_these_images"],
    )
