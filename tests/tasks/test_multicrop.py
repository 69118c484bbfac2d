"""DINO and LeJEPA: losses against direct computations, the constants of collapse, and the crops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from families import TINY
from methods import VIT, batch, objective, pictures, settings
from peers import randomise

from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.projection import DinoHead
from vitrail.models.resized import Resized
from vitrail.tasks import task_type
from vitrail.tasks.dino import cross_view, entropy
from vitrail.tasks.lejepa import sigreg
from vitrail.tasks.pretraining import FeatureMeter

SMALL = replace(VIT, img_size=(8, 8))


def views(images=4):
    """Two large and four small views of each image."""
    return batch(pictures(2 * images), pictures(4 * images, SMALL), views=2)


# DINO


def test_dino_loss_is_the_cross_entropy_of_all_pairs_of_views():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 16, generator=generator)
    targets = torch.randn(2, 4, 16, generator=generator).softmax(-1)
    total, pairs = 0.0, 0
    for i in range(2):
        for j in range(6):
            if i != j:
                for b in range(4):
                    shares = [math.exp(value / 0.1) for value in logits[j, b].tolist()]
                    total -= sum(
                        t * math.log(s / sum(shares)) for t, s in zip(targets[i, b].tolist(), shares, strict=True)
                    )
                pairs += 4
    assert cross_view(targets, logits).item() == pytest.approx(total / pairs, rel=1e-4)


@pytest.mark.parametrize(("prototypes", "constant"), [(65_536, 11.0904), (4096, 8.3178), (1024, 6.9315)])
def test_a_uniform_teacher_has_the_constant_of_collapse(prototypes, constant):
    logits = torch.zeros(3, 2, prototypes)
    uniform = logits[:2].softmax(-1)
    assert cross_view(uniform, logits).item() == pytest.approx(constant, abs=1e-4)
    assert entropy(uniform).mean().item() == pytest.approx(constant, abs=1e-4)


@pytest.mark.parametrize(("prototypes", "count"), [(65_536, 22_286_592), (1024, 5_771_520)])
def test_the_head_has_the_published_size(prototypes, count):
    head = DinoHead(384, prototypes)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert trained == count
    assert sum(p.numel() for p in head.parameters()) == count + prototypes  # and the gains, which stay 1


def test_dino_targets_use_the_old_centre_which_then_moves():
    learner = objective("dino", randomise(build(VIT)))
    learner.centre.normal_()
    before = learner.centre.clone()
    with torch.no_grad():
        taught = learner.teacher_head(learner.teacher.model.embed(views().images))
        result = learner(views())
    targets = ((taught - before) / learner.temperature).softmax(-1)
    assert result["entropy"].item() == pytest.approx(entropy(targets).mean().item(), rel=1e-5)
    assert torch.allclose(learner.centre, 0.9 * before + 0.1 * taught.mean(0), atol=1e-6)


def test_the_teacher_follows_the_student_and_is_kept():
    learner = objective("dino", images=128, batch_size=16, epochs=10.0)
    with torch.no_grad():
        for p in learner.model.parameters():
            p += 1
        for p in learner.head.parameters():
            p += 1
    before = {name: value.clone() for name, value in learner.teacher.model.state_dict().items()}
    head = learner.teacher_head.mlp[0].weight.clone()
    step = 40  # half of 80: the momentum is halfway from its start to 1
    learner.after_step(step)
    momentum = min(1 - (1 - learner.momentum) / 2, (1 + step) / (10 + step))
    for name, value in learner.teacher.model.state_dict().items():
        expected = momentum * before[name] + (1 - momentum) * learner.model.state_dict()[name]
        assert torch.allclose(value, expected, atol=1e-6), name
    moved = momentum * head + (1 - momentum) * learner.head.mlp[0].weight
    assert torch.allclose(learner.teacher_head.mlp[0].weight, moved, atol=1e-6)
    assert learner.kept() is learner.teacher.model


@pytest.mark.parametrize(
    ("images", "epochs", "frozen"),
    [(32, 30.0, 2), (320, 1.5, 3), (32, 3.0, 0)],
    ids=["one epoch", "a tenth of 30 steps", "a tenth of 6 steps"],
)
def test_the_last_layer_is_frozen_in_the_first_epoch_or_tenth(images, epochs, frozen):
    learner = objective("dino", images=images, batch_size=16, epochs=epochs)
    last = learner.head.last_layer.parametrizations.weight.original1
    learnt = []
    for step in range(4):
        learner.zero_grad()
        learner(views())["loss"].backward()
        learnt.append(last.grad is not None)
        learner.after_step(step)
    assert learnt == [step >= frozen for step in range(4)]


def test_collapse_of_the_teacher_is_named():
    spread, same = _scores(torch.randn(200, 32)), _scores(torch.ones(200, 32))
    for scores, reached, healthy, words in (
        (spread, 3.0, True, "look healthy"),
        (spread, math.log(1024) - 0.01, False, "uniform"),
        (spread, 0.001, False, "few prototypes"),
        (same, 3.0, False, "almost the same point"),
        (_scores(torch.randn(2, 32)), 3.0, None, "need 10 validation images or more"),
    ):
        told = task_type("dino")().health(scores, {"entropy": reached}, settings("dino"))
        assert told[0] is healthy
        assert words in told[1]


def _scores(features):
    meter = FeatureMeter()
    meter.add(torch.cat([torch.zeros(len(features), 1), features], 1).numpy(), None)
    return meter.scores()


# LeJEPA


def test_sigreg_equals_a_direct_computation():
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(5, 3, generator=generator)
    directions = torch.randn(3, 2, generator=generator)
    total = 0.0
    for m in range(2):
        unit = directions[:, m] / directions[:, m].norm()
        values = (projected @ unit).tolist()
        for k in range(17):
            t = 3 * k / 16
            weight = (3 / 16 if k in (0, 16) else 6 / 16) * math.exp(-(t**2) / 2)
            real = sum(math.cos(t * x) for x in values) / 5 - math.exp(-(t**2) / 2)
            imaginary = sum(math.sin(t * x) for x in values) / 5
            total += 5 * weight * (real**2 + imaginary**2) / 2
    assert sigreg(projected, directions).item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("images", "width"), [(64, 16), (256, 4)])
def test_sigreg_has_known_values_for_normal_and_collapsed_projections(images, width):
    generator = torch.Generator().manual_seed(0)
    values = [
        sigreg(torch.randn(images, width, generator=generator), torch.randn(width, 256, generator=generator)).item()
        for _ in range(100)
    ]
    assert sum(values) / 100 == pytest.approx(1.0525, rel=0.05)
    collapsed = sigreg(torch.zeros(images, width), torch.randn(width, 256, generator=generator)).item()
    assert collapsed == pytest.approx(0.40205 * images, rel=1e-3)


def test_lejepa_compares_all_views_with_the_mean_of_the_large_ones():
    learner = objective("lejepa", randomise(build(VIT)), sigreg=0.1)
    projected = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(1))
    learner.features = lambda _: projected
    learner.projector = torch.nn.Identity()
    torch.manual_seed(5)
    result = learner(views())
    mean = (projected[0] + projected[1]) / 2
    distance = sum((view - mean).square().mean().item() for view in projected) / 6
    torch.manual_seed(5)
    normality = sigreg(projected, torch.randn(64, 256)).item()
    assert result["loss"].item() == pytest.approx(0.9 * distance + 0.1 * normality, rel=1e-5)


# Crops of another size


@pytest.mark.parametrize("pos", ["learned", "patches", "learned2d", "relative", "sincos2d", "none"])
def test_small_crops_share_the_weights_of_the_model(pos):
    model = randomise(build(replace(VIT, pos=pos)))
    small = Resized(model, (8, 8))
    images = pictures(3, SMALL)
    found = small.embed(model, images)
    state = type(model).resized_state(
        model.state_dict(), model.config, replace(model.config, img_size=(8, 8)), "bicubic"
    )
    alone = build(replace(model.config, img_size=(8, 8)))
    alone.load_state_dict(state)
    assert torch.allclose(found, alone.eval().embed(images), atol=1e-6)
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("method", ["dino", "lejepa"])
@pytest.mark.parametrize("name", ["vit", *sorted(TINY.keys() - {"mixer"})])
def test_every_family_learns_from_crops(method, name):
    config = VIT if name == "vit" else replace(TINY[name], img_size=(16, 16), classes=0)
    model = build(config)
    learner = objective(method, model, local_size=8)
    small = replace(config, img_size=(8, 8))
    result = learner(batch(pictures(8, config), pictures(16, small), views=2))
    result["loss"].backward()
    assert result["loss"].isfinite()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    model.eval()
    assert learner.examine(learner.kept(), pictures(4, config)).shape == (4, 1 + config.features)


def test_a_mixer_learns_from_crops_of_one_size_only():
    model = build(replace(TINY["mixer"], img_size=(16, 16), classes=0))
    with pytest.raises(UserError, match=r"cannot read small crops. Use --local-crops 0."):
        task_type("dino")().check_model(model, settings("dino", local_size=8))
    task_type("dino")().check_model(model, settings("dino", local_crops=0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 1}, "a forward pass would have only one"),
        ({"local_size": 7}, "'local_size' must be a multiple of 4 and at most the image size, 16, but it is 7"),
        ({"local_size": 32}, "at most the image size, 16, but it is 32"),
        ({"local_size": 24, "img_size": (32, 32)}, "The images of made-up are 16x16, smaller than crops of 24x24"),
        ({"global_scale": (0.9, 0.4)}, "'global_scale' must be two shares"),
        ({"local_scale": (0.1,)}, "'local_scale' must be two shares"),
        ({"local_crops": 0, "global_crops": 1}, "compares crops of an image, so it needs two or more"),
    ],
)
@pytest.mark.parametrize("method", ["dino", "lejepa"])
def test_settings_that_cannot_work_are_refused(method, given, message):
    with pytest.raises(UserError, match=message):
        task_type(method)().check_model(build(VIT), settings(method, **given))


# Features


def test_rank_and_spread_of_known_features():
    generator = torch.Generator().manual_seed(0)
    everywhere = _scores(torch.randn(4000, 16, generator=generator))
    assert everywhere.rank == pytest.approx(16, abs=0.1)
    assert everywhere.spread == pytest.approx(1, abs=0.02)
    line = _scores(torch.randn(500, 1, generator=generator) * torch.randn(1, 16, generator=generator))
    assert line.rank == pytest.approx(1, abs=1e-3)
    noise = 1e-7 * torch.randn(500, 16, generator=generator)
    assert _scores(1 + noise).rank == 1  # the rounding of one point is not a rank of 16
    point = _scores(torch.ones(500, 16))
    assert point.spread == pytest.approx(0, abs=1e-6)


def test_merged_meters_measure_as_one():
    features = torch.randn(100, 9, generator=torch.Generator().manual_seed(0)).numpy()
    whole, first, second = FeatureMeter(), FeatureMeter(), FeatureMeter()
    whole.add(features, None)
    first.add(features[:30], None)
    second.add(features[30:], None)
    first.merge(second)
    assert first.scores().row() == pytest.approx(whole.scores().row(), rel=1e-9)
