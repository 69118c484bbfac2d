"""Parameters and multiply-accumulates, to the last one, without allocating a weight."""

from __future__ import annotations

import pytest
import torch

from vitrail import models
from vitrail.errors import UserError
from vitrail.models.vit import ViTConfig

# As stored by torchvision, timm and keras-hub, 1000 classes.
PARAMETERS = {
    "vit_ti16": 5_717_416,
    "vit_s32": 22_878_952,
    "vit_s16": 22_050_664,
    "vit_b32": 88_224_232,
    "vit_b16": 86_567_656,
    "vit_b8": 86_576_872,
    "vit_l32": 306_535_400,
    "vit_l16": 304_326_632,
    "vit_l14": 304_203_752,
    "vit_h14": 632_045_800,
    "vit_giant14": 1_012_611_432,
    "vit_gigantic14": 1_844_440_680,
}
PARAMETERS_384 = {
    "vit_ti16": 5_790_376,
    "vit_s16": 22_196_584,
    "vit_b16": 86_859_496,
    "vit_l16": 304_715_752,
    "vit_b32": 88_297_192,
    "vit_l32": 306_632_680,
}
# torchvision's `_ops`, in billions.
GMACS = {"vit_b16": 17.564, "vit_b32": 4.409, "vit_l16": 61.555, "vit_l32": 15.378, "vit_h14": 167.295}
GMACS_384 = {
    "vit_ti16": 4.68,
    "vit_s16": 15.49,
    "vit_b16": 55.48,
    "vit_l16": 191.07,
    "vit_b32": 13.04,
    "vit_l32": 45.28,
}


def parameters_by_formula(c: ViTConfig) -> int:
    n, d = c.grid[0] * c.grid[1], c.width
    patches = c.channels * c.patch**2 * d + d
    block = 4 * d * d + 2 * d * c.mlp + 9 * d + c.mlp
    return patches + d + (n + 1) * d + c.depth * block + 2 * d + d * c.classes + c.classes


def macs_by_formula(c: ViTConfig) -> int:
    n, d = c.grid[0] * c.grid[1], c.width
    block = (n + 1) * (4 * d * d + 2 * d * c.mlp) + 2 * (n + 1) ** 2 * d
    return n * c.channels * c.patch**2 * d + c.depth * block + d * c.classes


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    assert models.parameters(models.CONFIGS[name]) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS_384)
def test_parameters_at_384_pixels_are_the_published_ones(name):
    assert models.parameters(models.configure(name, img_size=384)) == PARAMETERS_384[name]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (ViTConfig(64, 6, 4, 128, patch=4, img_size=(28, 28), channels=1, classes=10), 205_962),
        (ViTConfig(128, 6, 4, 256, patch=4, img_size=(32, 32), channels=3, classes=10), 811_146),
        (ViTConfig(256, 7, 4, 512, patch=4, img_size=(32, 32), channels=3, classes=10), 3_722_250),
        (ViTConfig(256, 6, 4, 512, patch=4, img_size=(32, 32), channels=3, classes=10), 3_195_146),
    ],
    ids=["MNIST 64x6", "CIFAR 128x6", "ViT-Lite-7/4", "ViT-Lite-6/4"],
)
def test_parameters_of_small_models_are_the_published_ones(config, count):
    assert models.parameters(config) == count


def test_parameters_follow_the_formula_for_rectangles_channels_and_classes():
    config = models.configure("vit_s16", img_size=(96, 160), channels=5, classes=7)
    assert models.parameters(config) == parameters_by_formula(config)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"head": "tanh"}, 384 * 384 + 384),
        ({"layer_scale": 1e-5}, 12 * 2 * 384),
        ({"registers": 4}, 4 * 384),
        ({"act": "swiglu"}, 12 * (384 * 1536 + 1536)),
        ({"pool": "cls_dist"}, 2 * 384 + 384 * 1000 + 1000),  # a token, its position, and its head
        ({"pool": "cls_gap"}, 384 * 1000),
        ({"pool": "mae"}, 0),
        ({"pool": "gap_norm"}, -2 * 384),
        ({"pool": "gap"}, -2 * 384),  # neither class token nor its position
        ({"pos": "none"}, -197 * 384),
        ({"pos": "sincos2d"}, -197 * 384),  # fixed
        ({"pos": "learned2d"}, -197 * 384 + 2 * 14 * 192),
        ({"pos": "relative"}, -197 * 384 + 12 * 6 * (27 * 27 + 3)),
        ({"pos": "relative", "pool": "gap"}, -198 * 384 + 12 * 6 * 27 * 27),
    ],
    ids=str,
)
def test_every_switch_costs_what_it_should(changes, extra):
    assert models.parameters(models.configure("vit_s16", **changes)) == PARAMETERS["vit_s16"] + extra


@pytest.mark.parametrize("name", GMACS)
def test_macs_are_the_published_ones(name):
    assert models.macs(models.CONFIGS[name]) == pytest.approx(GMACS[name] * 1e9, rel=1e-3)


@pytest.mark.parametrize("name", GMACS_384)
def test_macs_at_384_pixels_are_the_published_ones(name):
    config = models.configure(name, img_size=384)
    assert models.macs(config) == macs_by_formula(config) == pytest.approx(GMACS_384[name] * 1e9, rel=2e-3)


def test_the_largest_model_is_built_without_memory():
    with torch.device("meta"):
        model = models.create("vit_gigantic14")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not list(model.buffers())


def test_the_table_lists_every_model():
    rows = {row.name: row for row in models.table()}
    assert list(rows) == list(models.CONFIGS)
    assert {name: rows[name].params for name in PARAMETERS} == PARAMETERS
    assert {name: rows[name].macs for name in PARAMETERS} == {
        name: macs_by_formula(models.CONFIGS[name]) for name in PARAMETERS
    }
    assert (rows["vit_b16"].tokens, rows["vit_b16"].img_size) == (197, (224, 224))
    assert (rows["vit_nano4"].tokens, rows["vit_nano4"].img_size) == (64, (32, 32))


def test_the_table_is_searched_by_name():
    assert [row.name for row in models.table("vit_l")] == ["vit_l32", "vit_l16", "vit_l14"]
    with pytest.raises(UserError, match="No model has 'vit_x' in its name"):
        models.table("vit_x")
