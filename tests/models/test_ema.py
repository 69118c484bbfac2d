"""The moving average of a model's weights."""

from __future__ import annotations

import copy

import pytest
import torch

from vitrail.models import build
from vitrail.models.ema import Ema
from vitrail.models.vit import ViTConfig

SMALL = ViTConfig(width=16, depth=3, heads=2, mlp=32, patch=2, img_size=(8, 8), classes=5)


def test_the_moving_average_is_the_textbook_one_after_its_first_steps():
    torch.manual_seed(0)
    model = build(SMALL)
    ema = Ema(model, 0.9)
    by_hand = {name: p.detach().double() for name, p in copy.deepcopy(model).named_parameters()}
    for step in range(100):
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        ema.update(model, step)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            by_hand[name] = decay * by_hand[name] + (1 - decay) * p.detach().double()
    for name, p in ema.model.named_parameters():
        torch.testing.assert_close(p.double(), by_hand[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [500, 2000])
def test_the_average_of_a_short_run_is_that_of_its_last_part(steps):
    """Of weights that are the number of the step: the paper's factor by itself would hardly leave the first ones."""
    model = build(SMALL)
    with torch.no_grad():
        model.head.bias.zero_()
    ema = Ema(model, 0.9999)
    for step in range(steps):
        with torch.no_grad():
            model.head.bias.fill_(step + 1)
        ema.update(model, step)
    average = ema.model.head.bias[0].item() / steps
    plain = 1 - (1 - 0.9999**steps) / (steps * (1 - 0.9999))  # of the same numbers without a warm-up
    assert plain < 0.1
    assert average == pytest.approx(0.9, abs=0.02)  # as if over the last fifth, evenly


def test_the_average_leaves_what_is_frozen_alone():
    model = build(SMALL)
    model.patch_embed.requires_grad_(False)
    ema = Ema(model, 0.5)
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    ema.update(model, 100)
    moved = {name for name, p in ema.model.named_parameters() if not torch.equal(p + 1, model.get_parameter(name))}
    assert moved == {name for name, _ in model.named_parameters() if not name.startswith("patch_embed.")}


def test_the_moving_average_is_a_model_apart():
    model = build(SMALL).train()
    before = copy.deepcopy(model.state_dict())
    ema = Ema(model, 0.5)
    with torch.no_grad():
        for p in ema.model.parameters():
            p.zero_()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert not ema.model.training
    assert not any(p.requires_grad for p in ema.model.parameters())
