"""The losses of images with captions, against a slow computation, and their values at the start."""

from __future__ import annotations

import math

import pytest
import torch

from vitrail.models import build
from vitrail.models.text import TextConfig
from vitrail.models.two_tower import TwoTowerConfig, clip
from vitrail.models.vit import ViTConfig
from vitrail.tasks.contrast import Sigmoid, Softmax
from vitrail.tasks.objective import Batch
from vitrail.tokenizers import Tokenizer

IMAGE = ViTConfig(16, 1, 2, 32, 8, (16, 16), classes=0)
CAPTIONS = [("a cat",), ("a dog", "a brown dog"), ("a cat",), ("a bird",), ("two birds",)]


def objective(kind, captions=CAPTIONS):
    torch.manual_seed(0)
    if kind is Sigmoid:
        config = TwoTowerConfig(IMAGE, TextConfig(16, 1, 2, 32, 259, 16), 8)
    else:
        config = clip(IMAGE, 64, 8, 259, 16)
    return kind(build(config), captions, Tokenizer(), 16)


def slow(kind, logits, same):
    n = len(logits)
    if kind is Sigmoid:
        pairs = [(1 if same[i][j] else -1) * logits[i][j] for i in range(n) for j in range(n)]
        return sum(math.log(1 + math.exp(-z)) for z in pairs) / n
    total = 0.0
    for rows in (logits, [list(column) for column in zip(*logits, strict=True)]):
        for i in range(n):
            others = [rows[i][j] for j in range(n) if j == i or not same[i][j]]
            total += math.log(sum(map(math.exp, others))) - rows[i][i]
    return total / (2 * n)


@pytest.mark.parametrize("kind", [Sigmoid, Softmax])
def test_losses_match_a_direct_computation(kind):
    torch.manual_seed(1)
    logits = torch.randn(4, 4, dtype=torch.float64) * 3
    groups = torch.tensor([0, 1, 0, 2])
    same = groups[:, None] == groups[None, :]
    found = objective(kind).loss(logits, same).item()
    assert found == pytest.approx(slow(kind, logits.tolist(), same.tolist()), rel=1e-9)


def test_start_values():
    """CLIP starts at ln B; SigLIP near the cost of the pairs, as the bias calls all others apart."""
    zeros, eye = torch.zeros(8, 8), torch.eye(8, dtype=torch.bool)
    assert objective(Softmax).loss(zeros, eye).item() == pytest.approx(math.log(8), rel=1e-6)
    expected = math.log1p(math.exp(10)) + 7 * math.log1p(math.exp(-10))
    assert objective(Sigmoid).loss(zeros - 10, eye).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [Sigmoid, Softmax])
def test_equal_captions_are_not_negatives(kind):
    chosen = objective(kind)
    images, numbers = torch.randn(2, 3, 16, 16), torch.tensor([0, 2])  # both "a cat"
    alike = chosen(Batch(images, torch.zeros(2, 0), numbers))["loss"]
    alone = [chosen(Batch(images[i : i + 1], torch.zeros(1, 0), numbers[i : i + 1]))["loss"] for i in (0, 1)]
    if kind is Softmax:
        assert alike.item() == pytest.approx(0.0, abs=1e-6)
    else:  # each image has two positives, equal texts
        assert alike.item() == pytest.approx(sum(loss.item() for loss in alone), rel=1e-4)


def test_captions_of_equal_tokens_are_equal():
    captions = [("A cat",), ("a cat",), ("a very long caption of one",), ("a very long caption of another",)]
    chosen = objective(Sigmoid, captions)  # reads 16 tokens
    assert chosen.own[0] == chosen.own[1] != chosen.own[2] == chosen.own[3]


def test_a_step_draws_one_of_several_captions():
    chosen = objective(Sigmoid)
    batch = Batch(torch.randn(1, 3, 16, 16), torch.zeros(1, 0), torch.tensor([1 + 5]))  # a repetition of image 1
    losses = set()
    for seed in range(8):
        torch.manual_seed(seed)
        losses.add(round(chosen(batch)["loss"].item(), 6))
    assert len(losses) == 2


def test_clips_scale_is_clamped():
    chosen = objective(Softmax)
    torch.nn.init.constant_(chosen.model.logit_scale, 9.0)
    chosen.after_step(0)
    assert chosen.model.logit_scale.exp().item() == pytest.approx(100, rel=1e-5)
