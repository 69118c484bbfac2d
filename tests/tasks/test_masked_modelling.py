"""Masked patch prediction, MAE and SimMIM: losses against direct computations, and the constants they must have."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from families import TINY
from methods import VIT, batch, objective, pictures, settings
from peers import randomise

from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.decoder import patchify, unpatchify
from vitrail.models.vit import ViTConfig
from vitrail.tasks import task_type
from vitrail.tasks.masking import masked_tokens, visible_pixels

METHODS = ("masked", "mae", "simmim")


def test_patches_are_cut_in_row_major_order_and_put_together():
    images = pictures()
    patches = patchify(images, 4)
    assert patches.shape == (6, 16, 48)
    assert torch.equal(patches[2, 5].view(4, 4, 3), images[2, :, 4:8, 4:8].permute(1, 2, 0))
    assert torch.equal(unpatchify(patches, (4, 4), 4), images)


# MAE


def test_mae_loss_is_the_error_of_masked_patches():
    learner = objective("mae", randomise(build(VIT)))
    images, noise = pictures(), torch.rand(6, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        losses = learner.losses(learner.model, images, noise)
        predicted, mask = learner.predict(learner.model, images, noise)
    for b in range(6):
        visible = noise[b].argsort()[:4].tolist()
        assert sorted(set(range(16)) - set(visible)) == mask[b].nonzero().flatten().tolist()
        total = 0.0
        for n in set(range(16)) - set(visible):
            y, x = divmod(n, 4)
            pixels = images[b, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4].permute(1, 2, 0).flatten()
            target = (pixels - pixels.mean()) / (pixels.var(unbiased=True) + 1e-6).sqrt()
            total += (predicted[b, n] - target).square().mean().item() / 12
        assert losses[b].item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("patch", "channels"), [(16, 3), (4, 1)])
def test_mae_that_predicts_zero_has_a_known_loss(patch, channels):
    config = replace(VIT, patch=patch, img_size=(4 * patch, 4 * patch), channels=channels)
    learner = objective("mae", build(config))
    torch.nn.init.zeros_(learner.decoder.pred.weight)
    pixels = channels * patch**2
    loss = learner(batch(pictures(8, config)))["loss"].item()
    assert loss == pytest.approx((pixels - 1) / pixels, rel=1e-4)
    if patch == 16:
        assert loss == pytest.approx(0.99870, abs=1e-4)


@pytest.mark.parametrize("pos", ["learned", "patches", "learned2d", "relative", "sincos2d", "none"])
def test_mae_encodes_visible_patches_only(pos):
    """Masked pixels change nothing but the target; visible ones change the prediction."""
    learner = objective("mae", randomise(build(replace(VIT, pos=pos, registers=1))))
    images, noise = pictures(2), torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before, mask = learner.predict(learner.model, images, noise)
        hidden = patchify(images, 4)
        other = torch.where(mask.unsqueeze(2), torch.randn_like(hidden), hidden)
        after, _ = learner.predict(learner.model, unpatchify(other, (4, 4), 4), noise)
        changed, _ = learner.predict(learner.model, images + 1, noise)
    assert torch.equal(before, after)
    assert not torch.allclose(before, changed)


def test_mae_hides_masked_pixels_from_a_convolutional_stem():
    learner = objective("mae", randomise(build(replace(VIT, stem="conv"))))
    images, noise = pictures(2), torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before, mask = learner.predict(learner.model, images, noise)
        hidden = patchify(images, 4)
        other = torch.where(mask.unsqueeze(2), torch.randn_like(hidden), hidden)
        after, _ = learner.predict(learner.model, unpatchify(other, (4, 4), 4), noise)
    assert torch.equal(before, after)


@pytest.mark.parametrize("method", ["masked", "simmim"])
def test_pixels_behind_mask_tokens_are_hidden_from_a_convolutional_stem(method):
    learner = objective(method, randomise(build(replace(VIT, stem="conv"))))
    images, mask = pictures(2), torch.rand(2, 16, generator=torch.Generator().manual_seed(2)) < 0.5
    patches = patchify(images, 4)
    other = unpatchify(torch.where(mask.unsqueeze(2), torch.randn_like(patches), patches), (4, 4), 4)
    with torch.no_grad():
        before, after = (masked_tokens(learner.model, each, mask, learner.mask) for each in (images, other))
    assert torch.equal(before, after)


def test_a_convolutional_stem_sees_the_mean_of_the_visible_pixels_behind_the_mask():
    """Of each image and channel; other stems see the images as they are."""
    images, mask = torch.randn(2, 3, 8, 8) + 5, torch.tensor([[True, False, False, True], [False, True, True, True]])
    config = replace(VIT, img_size=(8, 8), patch=4, stem="conv")
    seen = visible_pixels(build(config), images, mask)
    assert torch.equal(seen[0, :, :4, 4:], images[0, :, :4, 4:])
    expected = torch.cat([images[0, :, :4, 4:], images[0, :, 4:, :4]], dim=2).mean(dim=(1, 2))
    assert torch.allclose(seen[0, :, 4:, 4:], expected[:, None, None].expand(3, 4, 4))
    assert torch.allclose(seen[1, :, 4:, 4:], images[1, :, :4, :4].mean(dim=(1, 2))[:, None, None].expand(3, 4, 4))
    assert visible_pixels(build(replace(config, stem="patch")), images, mask) is images


def test_mae_attends_among_visible_tokens_only(monkeypatch):
    """The encoder computes the class token and a quarter of the patches, not all of them."""
    learner = objective("mae")
    seen = []
    block = learner.model.blocks[0]
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda x, *rest: seen.append(x.shape[1]) or forward(x, *rest))
    learner(batch(pictures()))
    assert seen == [1 + 4]


# SimMIM


def test_simmim_loss_is_the_absolute_error_of_masked_pixels():
    learner = objective("simmim", randomise(build(VIT)), mask_size=8, mask_ratio=0.5)
    images, noise = pictures(), torch.rand(6, 4, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        losses = learner.losses(learner.model, images, noise)
        predicted, mask = learner.predict(learner.model, images, noise)
    for b in range(6):
        total = []
        for square in noise[b].argsort()[:2].tolist():
            y, x = (8 * i for i in divmod(square, 2))
            assert mask[b, 0, y : y + 8, x : x + 8].all()
            total.append((predicted[b] - images[b]).abs()[:, y : y + 8, x : x + 8])
        assert mask[b].sum() == 128
        assert losses[b].item() == pytest.approx(torch.stack(total).mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", sorted(TINY))
def test_simmim_trains_every_family(name):
    model = build(replace(TINY[name], classes=0))
    learner = objective("simmim", model, mask_size=8, mask_ratio=0.5)
    images = pictures(4, model.config)
    result = learner(batch(images))
    result["loss"].backward()
    assert result["loss"].isfinite()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert learner.mask.token.grad.any()
    drawn = learner.reconstruct(model.eval(), images)
    assert drawn.predicted.shape == images.shape


# Masked patch prediction


def test_half_of_the_patches_are_corrupted_in_three_ways():
    config = replace(VIT, img_size=(160, 160))
    learner = objective("masked", build(config))
    images = pictures(2, config)
    seen = []
    learner.model.encode = lambda tokens, **_: seen.append(tokens) or tokens
    with torch.no_grad():
        before = learner.model.tokens(images)[:, 1:]
        _, mask = learner.predict(learner.model, images, learner.noise(2, torch.Generator().manual_seed(0)))
    after = seen[0][:, 1:]
    places = learner.model.position_embeddings()[0][0][:, 1:]
    token = ((after - places - learner.mask.token).abs().amax(2) < 1e-5) & mask
    same = (after == before).all(2)
    assert (mask.sum(1) == 800).all()
    assert not (~same & ~mask).any()
    assert token.sum().item() / 1600 == pytest.approx(0.8, abs=0.04)
    assert (mask & same).sum().item() / 1600 == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("target", ["colour", "mini"])
def test_colours_have_three_bits_per_channel(target):
    learner = objective("masked", target=target)
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    colours = learner.quantised((pixels - 0.5) / 0.5)
    side = 4 if target == "colour" else 1
    assert colours.shape == (2, 16, 1 if target == "colour" else 16)
    y, x, s = 2, 3, 0 if target == "colour" else 6  # mini-patch row 1, column 2
    top, left = 4 * y + (s // 4) * side, 4 * x + (s % 4) * side
    mean = pixels[1, :, top : top + side, left : left + side].mean((1, 2))
    r, g, b = (min(int(8 * value), 7) for value in mean.tolist())
    assert colours[1, 4 * y + x, s] == 64 * r + 8 * g + b
    painted = learner.painted(colours)
    assert torch.equal(learner.quantised(painted), colours)


def test_the_colours_of_deep_images_differ_where_the_images_do():
    learner = objective("masked", bits=16, mean=(0.02,), std=(0.01,))
    images = torch.tensor([-9.0, -1.9, -0.1, 0.1, 1.9, 9.0]).view(6, 1, 1, 1).expand(6, 3, 16, 16)
    colours = learner.quantised(images)
    assert (colours // 64)[:, 0, 0].tolist() == [0, 0, 3, 4, 7, 7]
    assert torch.equal(learner.quantised(learner.painted(colours)), colours)


@pytest.mark.parametrize(("target", "channels"), [("colour", 3), ("colour", 1), ("mini", 3)])
def test_an_indifferent_head_has_the_loss_of_chance(target, channels):
    config = replace(VIT, channels=channels)
    learner = objective("masked", build(config), target=target)
    torch.nn.init.zeros_(learner.head.weight)
    torch.nn.init.zeros_(learner.head.bias)
    loss = learner(batch(pictures(4, config)))["loss"].item()
    assert loss == pytest.approx(math.log(8**channels), rel=1e-5)


def test_masked_loss_equals_a_direct_computation():
    for target in ("colour", "mini", "pixels"):
        learner = objective("masked", randomise(build(VIT)), target=target)
        images = pictures()
        noise = learner.noise(6, torch.Generator().manual_seed(3))
        with torch.no_grad():
            losses = learner.losses(learner.model, images, noise)
            outputs, mask = learner.predict(learner.model, images, noise)
        for b in range(6):
            each = []
            for n in mask[b].nonzero().flatten().tolist():
                if target == "pixels":
                    y, x = divmod(n, 4)
                    pixels = images[b, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4].permute(1, 2, 0).flatten()
                    each.append((outputs[b, n] - pixels).square().mean())
                else:
                    logits = outputs[b, n].view(-1, 512).log_softmax(1)
                    colours = learner.quantised(images)[b, n]
                    each.append(-logits[range(len(colours)), colours].mean())
            assert losses[b].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)


# All of them


@pytest.mark.parametrize("method", METHODS)
def test_an_optimiser_step_learns_encoder_and_decoder(method):
    learner = objective(method)
    learner(batch(pictures()))["loss"].backward()
    dead = [name for name, p in learner.named_parameters() if p.requires_grad and p.grad is None]
    assert dead == [] or (method == "mae" and not dead)
    drawn = learner.reconstruct(learner.model.eval(), pictures(3))
    hidden = drawn.masked.isnan()
    assert 0 < hidden.float().mean() < 1
    assert torch.equal(drawn.predicted[~hidden], drawn.original[~hidden])
    assert not torch.equal(drawn.predicted[hidden], drawn.original[hidden])


@pytest.mark.parametrize("method", METHODS)
def test_validation_uses_the_same_masks_every_time(method):
    learner = objective(method)
    learner.model.eval()
    with torch.no_grad():
        first, second = (learner.examine(learner.model, pictures()) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (6, 1 + 32)


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1.5, -0.5, float("nan")])
@pytest.mark.parametrize("method", METHODS)
def test_a_ratio_must_mask_some_patches_and_leave_some(method, ratio):
    config = settings(method, mask_ratio=ratio)
    with pytest.raises(UserError, match="'mask_ratio' must be above 0 and at most"):
        task_type(method)().check_model(build(VIT), config)


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_ratio_of_the_message_is_accepted(method):
    with pytest.raises(UserError, match="at most") as raised:
        task_type(method)().check_model(build(VIT), settings(method, mask_ratio=0.999))
    most = re.search(r"at most ([\d.]+),", str(raised.value))
    assert most is not None
    task_type(method)().check_model(build(VIT), settings(method, mask_ratio=float(most[1])))


def test_an_image_of_one_patch_cannot_be_masked_in_part():
    with pytest.raises(UserError, match=r"a single patch.*a smaller patch size or a larger --img-size"):
        task_type("mae")().check_model(build(replace(VIT, patch=16, img_size=(16, 16))), settings("mae"))


def test_an_image_of_one_square_needs_to_be_larger():
    side = build(TINY["swin"]).stride
    model = build(replace(TINY["swin"], img_size=(side, side)))
    with pytest.raises(UserError, match=rf"single square of {side} pixels.*larger --img-size, such as {2 * side}"):
        task_type("simmim")().check_model(model, settings("simmim", mask_size=side))


def test_masked_squares_are_whole_patches():
    with pytest.raises(UserError, match="'mask_size' must be a multiple of"):
        task_type("simmim")().check_model(build(VIT), settings("simmim", mask_size=5))


def test_methods_that_mask_tokens_need_patches():
    for method in ("mae", "masked"):
        with pytest.raises(UserError, match="only a ViT allows, not a Swin"):
            task_type(method)().check_model(build(TINY["swin"]), settings(method))


def test_targets_that_an_image_cannot_have_are_refused():
    wide = replace(VIT, channels=6)
    with pytest.raises(UserError, match="not defined for 6 channels"):
        task_type("masked")().check_model(build(wide), settings("masked", channels=6))
    odd = replace(VIT, patch=2)
    with pytest.raises(UserError, match="multiple of 4"):
        task_type("masked")().check_model(build(odd), settings("masked", target="mini"))


def test_published_decoder_and_encoder_have_the_published_sizes():
    """FAIR's MAE ViT-B: 111,655,680 trainable parameters, with fixed positions."""
    with torch.device("meta"):
        config = ViTConfig(768, 12, 12, 3072, 16, classes=0, pos="sincos2d")
        learner = task_type("mae")().objective(
            build(config), settings("mae", 224, model="vit_b16", decoder_width=512, decoder_depth=8), []
        )
    assert sum(p.numel() for p in learner.parameters()) == 111_655_680
