"""COCO's measures are those of pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitrail.tasks import coco
from vitrail.tasks.box_scores import MEASURES, confusion, image_f1, match_class, measure, restored

CLASSES = ("a", "b", "c")


def made(
    seed: int, images: int = 12, crowds: bool = False, ties: bool = False, areas: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random objects of all sizes, and detections near them and elsewhere; some images have neither.

    With `areas`, objects cover only a part of their boxes.
    """
    rng = np.random.default_rng(seed)
    found = []
    for i in range(images):
        n = 0 if i == 3 else int(rng.integers(0, 9))
        corner, size = rng.uniform(0, 300, (n, 2)), rng.uniform(4, 180, (n, 2))
        kinds = rng.integers(0, len(CLASSES) - (i > 6), n)
        ignored = rng.random(n) < 0.3 if crowds else np.zeros(n)
        objects = np.column_stack([kinds, corner, corner + size, ignored]).astype(np.float64)
        near = np.repeat(objects, rng.integers(0, 3, n), axis=0) if n else np.zeros((0, 6))
        boxes = near[:, 1:5] + rng.normal(0, 6, (len(near), 4))
        far = rng.uniform(0, 300, (3, 2))
        boxes = np.concatenate([boxes, np.column_stack([far, far + rng.uniform(5, 90, (3, 2))])])
        own = np.where(rng.random(len(near)) < 0.8, near[:, 0], rng.integers(0, 3, len(near)))
        scores = rng.random(len(boxes))
        scores = np.round(scores, 1) if ties else scores
        detections = np.column_stack([boxes, scores, np.concatenate([own, rng.integers(0, 3, 3)])])
        detections[:, 2:4] = np.maximum(detections[:, 2:4], detections[:, :2] + 1)
        order = np.argsort(-detections[:, 4], kind="stable")
        if areas:
            objects = np.column_stack([objects, size.prod(axis=1) * rng.uniform(0.1, 1, n)])
        found.append((detections[order] if i != 5 else np.zeros((0, 6)), objects))
    return found


def theirs(images: list[tuple[np.ndarray, np.ndarray]]) -> COCOeval:
    annotations, detections = [], []
    for i, (found, objects) in enumerate(images):
        for kind, x0, y0, x1, y1, ignored, *area in objects.tolist():
            box = [x0, y0, x1 - x0, y1 - y0]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": i, "category_id": int(kind), "bbox": box}
                | {"area": area[0] if area else box[2] * box[3], "iscrowd": int(ignored)}
            )
        for x0, y0, x1, y1, score, kind in found.tolist():
            detections.append(
                {"image_id": i, "category_id": int(kind), "bbox": [x0, y0, x1 - x0, y1 - y0], "score": score}
            )
    truth = COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": i} for i in range(len(images))],
        "annotations": annotations,
        "categories": [{"id": k, "name": name} for k, name in enumerate(CLASSES)],
    }
    truth.createIndex()
    judge = COCOeval(truth, truth.loadRes(detections), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return judge


@pytest.mark.parametrize(
    ("seed", "crowds", "ties", "areas"),
    [(0, False, False, False), (1, True, False, False), (2, False, True, False), (3, True, True, True)],
)
def test_all_numbers_are_those_of_pycocotools(seed, crowds, ties, areas):
    images = made(seed, crowds=crowds, ties=ties, areas=areas)
    judge = theirs(images)
    matched = [[match_class(f, o, k) for f, o in images] for k in range(3)]
    ours = coco.accumulate(matched)
    stats = [ours.ap(), ours.ap(0.5), ours.ap(0.75), *(ours.ap(area=a) for a in ("small", "medium", "large"))]
    stats += [*(ours.ar(most) for most in (1, 10, 100)), *(ours.ar(area=a) for a in ("small", "medium", "large"))]
    np.testing.assert_allclose(np.nan_to_num(stats, nan=-1), judge.stats, rtol=0, atol=1e-12)
    expected = judge.eval["precision"][..., 2]
    np.testing.assert_allclose(np.nan_to_num(ours.precision, nan=-1), expected, rtol=0, atol=1e-12)
    scores = measure(CLASSES, (), images)
    reported = [-1.0 if getattr(scores, name) is None else getattr(scores, name) for name in MEASURES]
    assert reported == pytest.approx(judge.stats.tolist(), abs=1e-12)
    assert restored(scores.to_json()).to_json() == scores.to_json()
    assert "AR medium" in scores.table()
    assert scores.per_class[0].ap == pytest.approx(expected[..., 0, 0].mean(), abs=1e-12)


def test_without_objects_or_detections():
    none = np.zeros((0, 6))
    scores = measure(CLASSES, (), [(none, none)])
    assert scores.ap is None
    assert scores.error == 0
    one = np.array([[0, 10, 10, 50, 50, 0.0]])
    scores = measure(CLASSES, (), [(none, one)])
    assert (scores.ap, scores.ap_medium, scores.ap_small, scores.error) == (0.0, 0.0, None, 1.0)
    assert scores.confusion[0].tolist() == [0, 0, 0, 1]


def test_the_threshold_maximises_f1():
    objects = np.array([[0, 0, 0, 10, 10, 0], [0, 20, 20, 30, 30, 0]])
    found = np.array(
        [[0, 0, 10, 10, 0.9, 0], [50, 50, 60, 60, 0.8, 0], [20, 20, 30, 30, 0.7, 0], [70, 70, 80, 80, 0.1, 0]]
    )
    score = measure(("a",), (), [(found, objects)]).per_class[0]
    assert score.threshold == pytest.approx(0.4)
    assert (score.recall, score.precision) == (1.0, pytest.approx(2 / 3))
    assert image_f1(found, objects, [0.4]) == pytest.approx(0.8)
    assert confusion([(found, objects)], [0.4]).tolist() == [[2, 0], [1, 0]]
