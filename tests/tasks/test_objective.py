"""The objectives of the tasks, and what all of them share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peers import randomise

from vitrail.models import build, create
from vitrail.models.lora import adapters, add_adapters
from vitrail.models.vit import ViTConfig
from vitrail.tasks.objective import Batch, BinaryCrossEntropy, CrossEntropy, Objective, SquaredError, weigh

NARROW = ViTConfig(width=32, depth=1, heads=2, mlp=64, patch=4, img_size=(8, 8), channels=1, classes=3, pool="gap")


def batch(targets):
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(images, targets, torch.arange(4))


def test_each_task_has_its_loss():
    model = randomise(build(NARROW))
    logits = model(batch(torch.empty(0)).images).detach()
    shares = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.5, 0, 0.5], [0, 0, 1]])
    result = CrossEntropy(model)(batch(shares))
    assert result["loss"].item() == pytest.approx(-(shares * logits.log_softmax(1)).sum(1).mean().item(), rel=1e-5)
    assert result["top1"].item() == (logits.argmax(1) == shares.argmax(1)).float().mean()
    binary = CrossEntropy(model, "bce")(batch(shares))["loss"].item()
    each = -(shares * F.logsigmoid(logits) + (1 - shares) * F.logsigmoid(-logits))
    assert binary == pytest.approx(each.sum(1).mean().item(), rel=1e-5)
    labels = (shares > 0).float()
    assert BinaryCrossEntropy(model)(batch(labels))["loss"].item() == pytest.approx(
        -(labels * F.logsigmoid(logits) + (1 - labels) * F.logsigmoid(-logits)).mean().item(), rel=1e-5
    )
    values = 10 * shares + 5
    result = SquaredError(model, (5.0,) * 3, (10.0,) * 3)(batch(values))
    assert result["loss"].item() == pytest.approx((logits - shares).square().mean().item(), rel=1e-5)
    assert set(result) == {"loss"}


def test_a_new_objective_needs_only_its_loss():
    class Absolute(Objective):
        def compare(self, outputs, targets):
            return (outputs - targets).abs().mean()

    model = randomise(build(NARROW))
    targets = torch.zeros(4, 3)
    assert Absolute(model)(batch(targets))["loss"] == model(batch(targets).images).abs().mean()


def test_what_is_kept_is_averaged_and_merged():
    model = randomise(create("vit_nano4", classes=3, img_size=8, channels=1))
    assert CrossEntropy(model).kept() is model
    add_adapters(model.stages(), rank=2, alpha=2.0)
    objective = CrossEntropy(model, ema=0.5)
    assert objective.parts().keys() == {"model", "kept"}
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    objective.after_step(100)
    kept = objective.kept()
    assert not adapters(kept)
    assert not torch.equal(kept.head.bias, model.head.bias)
    images = batch(torch.empty(0)).images
    averaged = objective.parts()["kept"].eval()
    np.testing.assert_allclose(kept.eval()(images).detach(), averaged(images).detach(), rtol=1e-4, atol=1e-4)


def test_a_model_with_a_distillation_token_is_compared_by_the_mean_of_its_heads():
    model = randomise(build(replace(NARROW, pool="cls_dist")))
    shares = torch.eye(3)[[0, 1, 2, 0]]
    mean = sum(model.heads(batch(shares).images)) / 2
    assert CrossEntropy(model)(batch(shares))["loss"].item() == pytest.approx(F.cross_entropy(mean, shares).item())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_are_weighed_before_they_are_smoothed(smoothing):
    mixed = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0.7, 0, 0.3]])
    weights = torch.tensor([0.5, 1.0, 40.0])
    weighed = weigh(mixed * (1 - smoothing) + smoothing / 3, weights, smoothing)
    assert torch.allclose(weighed.sum(dim=1), mixed @ weights)  # an image weighs what its classes do
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    alone = [F.cross_entropy(logits[:1], torch.tensor([c]), label_smoothing=smoothing) * weights[c] for c in range(3)]
    first, last = (F.cross_entropy(logits[:1], weighed[i : i + 1]) for i in (0, 2))
    assert torch.allclose(first, alone[0])
    assert torch.allclose(last, 0.7 * alone[0] + 0.3 * alone[2])
