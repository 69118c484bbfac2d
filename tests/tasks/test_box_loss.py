"""The losses of box heads, against a direct computation and transformers."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from peers import transformers

from vitrail.tasks.dense_loss import assign, dense_loss
from vitrail.tasks.iou import centred, giou
from vitrail.tasks.set_loss import matching, set_loss

SIZE = (64, 96)


def objects(*rows: tuple[float, ...], most: int = 5) -> torch.Tensor:
    padded = torch.full((1, most, 6), -1.0)
    padded[0, : len(rows)] = torch.tensor(rows).reshape(-1, 6)
    return padded


def points(stride: int = 8, least: float = 0.0, most: float = math.inf) -> torch.Tensor:
    y, x = torch.meshgrid(*((torch.arange(side // stride) + 0.5) * stride for side in SIZE), indexing="ij")
    rest = torch.tensor([stride, least, most]).expand(x.numel(), 3)
    return torch.cat([x.reshape(-1, 1), y.reshape(-1, 1), rest], dim=1)


def slow_owner(point: list[float], listed: list[list[float]]) -> int:
    """The smallest object that contains a point near its centre."""
    best, owner = math.inf, -1
    x, y, stride, least, most = point
    for i, (kind, x0, y0, x1, y1, ignored) in enumerate(listed):
        near = abs(x - (x0 + x1) / 2) < 1.5 * stride and abs(y - (y0 + y1) / 2) < 1.5 * stride
        fits = least <= max(x1 - x0, y1 - y0) < most
        area = (x1 - x0) * (y1 - y0)
        if kind >= 0 and not ignored and x0 < x < x1 and y0 < y < y1 and near and fits and area < best:
            best, owner = area, i
    return owner


def test_points_answer_for_the_smallest_object_whose_centre_is_near():
    listed = objects((0, 4, 4, 60, 60, 0), (1, 10, 10, 30, 28, 0), (2, 60, 8, 92, 60, 1), (1, 70, 20, 80, 30, 0))
    where = points()
    owner, left_out = assign(where, listed)
    assert owner[0].tolist() == [slow_owner(point, listed[0].tolist()) for point in where.tolist()]
    assert {0, 1, 3} <= set(owner[0].tolist())
    inside = (where[:, 0] > 60) & (where[:, 0] < 92) & (where[:, 1] > 8) & (where[:, 1] < 60)
    assert torch.equal(left_out[0], inside & (owner[0] < 0))
    assert (assign(points(least=0, most=12), listed)[0] >= 0).sum() == (owner == 3).sum()


def test_the_dense_loss_falls_to_almost_nothing_for_perfect_outputs():
    listed = objects((0, 4, 4, 60, 60, 0), (1, 70, 20, 90, 44, 0))
    where = points()
    owner, _ = assign(where, listed)
    outputs = torch.full((1, len(where), 6), -9.0)
    outputs[..., :4] = torch.tensor([0.0, 0.0, 8.0, 8.0])
    for q in (owner[0] >= 0).nonzero().flatten().tolist():
        thing = listed[0, owner[0, q]]
        outputs[0, q, :4], outputs[0, q, 4 + int(thing[0])] = thing[1:5], 9.0
    assert dense_loss(outputs, where, listed)["loss"] < 1e-3
    empty = torch.zeros(1, len(where), 6, requires_grad=True)
    nothing = dense_loss(empty, where, objects())
    nothing["loss"].backward()
    assert nothing["loss_box"] == 0
    assert empty.grad is not None
    assert empty.grad.isfinite().all()


def random_set(seed: int, queries: int = 7, classes: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(1, queries, 2, generator=generator) * 40
    size = torch.rand(1, queries, 2, generator=generator) * 20 + 4
    return torch.cat([corner, corner + size, torch.randn(1, queries, classes + 1, generator=generator)], dim=-1)


def test_the_matching_is_the_cheapest_of_all():
    outputs, listed = random_set(0), objects((0, 5, 5, 20, 20, 0), (2, 30, 10, 50, 40, 0), (1, 0, 0, 60, 60, 0))
    shares = torch.tensor([96.0, 64.0, 96.0, 64.0])
    boxes, logits = outputs[0, :, :4] / shares, outputs[0, :, 4:]
    kinds, truth = listed[0, :3, 0].long(), listed[0, :3, 1:5] / shares

    def cost(rows: tuple[int, ...]) -> float:
        total = 0.0
        for j, i in enumerate(rows):
            far = (centred(boxes[i]) - centred(truth[j])).abs().sum()
            total += float(-logits[i].softmax(-1)[kinds[j]] + 5 * far - 2 * giou(boxes[i], truth[j]))
        return total

    best = min(permutations(range(7), 3), key=cost)
    rows, columns = matching(logits, boxes, kinds, truth)
    assert {int(c): int(r) for r, c in zip(rows, columns, strict=True)} == dict(enumerate(best))


@pytest.mark.parametrize("listed", [objects((0, 5, 5, 20, 20, 0), (2, 30, 10, 50, 40, 0)), objects()])
def test_the_set_loss_is_that_of_transformers(listed):
    outputs = random_set(1)
    ours = set_loss(outputs, SIZE, listed)
    hf = transformers()
    loss = __import__("transformers.loss.loss_for_object_detection", fromlist=["x"])
    real = listed[0][listed[0, :, 0] >= 0]
    shares = torch.tensor([96.0, 64.0, 96.0, 64.0])
    config = hf.YolosConfig(num_labels=3)
    labels = [{"class_labels": real[:, 0].long(), "boxes": centred(real[:, 1:5] / shares)}]
    boxes = centred(outputs[..., :4] / shares)
    theirs, parts, _ = loss.ForObjectDetectionLoss(outputs[..., 4:], labels, "cpu", boxes, config, None, None)
    assert float(ours["loss"]) == pytest.approx(float(theirs), rel=1e-5)
    assert float(ours["loss_class"]) == pytest.approx(float(parts["loss_ce"]), rel=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("place", [0, 5])
def test_the_set_loss_of_outputs_that_diverged_is_not_finite(wrong, place):
    """Also if they belong to a prediction without an object."""
    for i in range(7):
        outputs = random_set(1).index_put_((torch.tensor(0), torch.tensor(i), torch.tensor(place)), torch.tensor(wrong))
        loss = set_loss(outputs.requires_grad_(), SIZE, objects((0, 5, 5, 20, 20, 0)))["loss"]
        loss.backward()
        assert math.isfinite(wrong) or not loss.isfinite()
