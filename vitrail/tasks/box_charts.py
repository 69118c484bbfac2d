"""The charts of detection: average precision by class, precision-recall curves, confusion with the background."""

from __future__ import annotations

import numpy as np

from vitrail.charts import build
from vitrail.charts.kinds import Bars, Chart, Line, Lines, Tone
from vitrail.charts.measure import count, percent
from vitrail.tasks.box_scores import BoxesScores
from vitrail.tasks.coco import RECALLS

FEW = 6  # classes that have their own colours


def box_charts(scores: BoxesScores) -> list[Chart]:
    """The charts of an evaluation; none if no image has objects."""
    known = sorted((s for s in scores.per_class if s.ap50 is not None), key=lambda s: -(s.ap50 or 0.0))
    if not known:
        return []
    bars = Bars(
        name="average_precision",
        title="Average precision",
        note=f"AP50 {percent(scores.ap50 or 0.0)}, AP {percent(scores.ap or 0.0)}, {count(scores.images)}",
        help="At an IoU of 0.5. Ticks mark COCO's AP, the mean over IoUs from 0.5 to 0.95.",
        x="AP50",
        names=tuple(s.name for s in known),
        values=np.array([s.ap50 for s in known], np.float64),
        tick="AP",
        ticks=np.array([s.ap for s in known], np.float64),
    )
    names = [*(s.name for s in scores.per_class), "background"]
    return [bars, _curves(scores), build.confusion(scores.confusion, names)]


def _curves(scores: BoxesScores) -> Lines:
    """Precision over recall of every class; dots are the classes at their thresholds."""
    known = [(k, s) for k, s in enumerate(scores.per_class) if s.ap50 is not None]
    weakest = min(known, key=lambda pair: pair[1].ap50 or 0.0)[0] if len(known) > 1 else None
    lines = []
    for k, s in known:
        tone: Tone = k if len(known) <= FEW else "warm" if k == weakest else "pale"
        name = s.name if len(known) <= FEW else f"{s.name}, the weakest" if k == weakest else "each class"
        lines.append(Line(name, RECALLS, scores.curves[:, k], tone, dot=(s.recall, s.precision)))
    f1 = float(np.mean([s.f1 for _, s in known]))
    return Lines(
        name="precision_recall",
        title="Precision and recall",
        note=f"macro F1 {percent(f1)} at the thresholds (dots)",
        help="At an IoU of 0.5. Lowering the threshold raises recall and usually lowers precision.",
        x="recall",
        y="precision",
        lines=tuple(lines),
        percent=True,
        square=True,
    )
