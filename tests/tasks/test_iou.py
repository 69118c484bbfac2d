"""IoU, GIoU and suppression, against their definitions computed box by box."""

from __future__ import annotations

import pytest
import torch

from vitrail.tasks.iou import giou, iou, pairs, suppress


def boxes(count: int, seed: int = 0, side: float = 40.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 100
    return torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * side + 1], dim=1)


def slow(a: list[float], b: list[float]) -> tuple[float, float]:
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(w, 0) * max(h, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return both / union, both / union - (hull - union) / hull


def test_iou_and_giou_by_their_definitions():
    a, b = boxes(20), boxes(30, seed=1)
    expected = torch.tensor([[slow(x, y) for y in b.tolist()] for x in a.tolist()])
    torch.testing.assert_close(iou(*pairs(a, b)), expected[..., 0])
    torch.testing.assert_close(giou(*pairs(a, b)), expected[..., 1])
    assert iou(torch.zeros(4), torch.zeros(4)) == 0  # no area


@pytest.mark.parametrize("side", [20.0, 60.0, 200.0])
def test_suppression_is_greedy_within_each_class(side):
    found, kinds = boxes(300, side=side), torch.arange(300) % 3
    kept: list[int] = []
    for i in range(300):
        if not any(kinds[i] == kinds[j] and slow(found[i].tolist(), found[j].tolist())[0] > 0.5 for j in kept):
            kept.append(i)
    batch = torch.stack([found, found.flip(0)])
    answer = suppress(batch, torch.stack([kinds, kinds.flip(0)]), 0.5)
    assert answer[0].nonzero().flatten().tolist() == kept
    assert answer[1].sum() > 1


def chain(count: int) -> torch.Tensor:
    """Boxes that each overlap the next alone by more than a half, so that every decision depends on all before it."""
    left = torch.arange(count) * 3.0
    return torch.stack([left, torch.zeros(count), left + 10, torch.full((count,), 10.0)], dim=1)


def test_suppression_follows_the_longest_chain():
    answer = suppress(chain(300)[None], torch.zeros(1, 300), 0.5)
    assert answer[0].tolist() == [True, False] * 150
