"""Parameters and multiply-accumulates, to the last one, without allocating a weight."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vitrail import models
from vitrail.errors import UserError
from vitrail.models import ModelConfig
from vitrail.models.bit import BiTConfig, StdConv
from vitrail.models.counts import COUNTS
from vitrail.models.hybrid import HybridConfig
from vitrail.models.vit import ViTConfig

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

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

# 1000 classes, at the native size: parameters, and multiply-accumulates in billions, as the authors or timm give them.
PUBLISHED = {
    "deit_ti16": (5_910_800, "1.3"),
    "deit_s16": (22_436_432, "4.6"),
    "deit_b16": (87_338_192, "17.7"),
    "deit3_s16": (22_059_496, "4.6"),
    "deit3_m16": (38_849_512, "8.0"),
    "deit3_b16": (86_585_320, "17.5"),
    "deit3_l16": (304_374_760, "61.6"),
    "deit3_h14": (632_126_440, "167.4"),
    "clip_b32": (88_225_000, "4.4"),
    "clip_b16": (86_568_424, "17.6"),
    "clip_l14": (304_204_776, "81.1"),
    "r_vit_ti16": (6_337_704, "0.44"),
    "r26_vit_s32": (36_431_912, "3.56"),
    "r26_vit_b32": (101_383_976, "6.81"),
    "r50_vit_b16": (98_659_112, "21.66"),
    "r50_vit_b32": (110_945_832, None),
    "r50_vit_l32": (328_994_856, "19.58"),
    "bit_r50x1": (25_549_352, "4.23"),
    "bit_r50x2": (97_988_712, None),
    "bit_r50x3": (217_319_080, "37.06"),
    "bit_r101x1": (44_541_480, "8.04"),
    "bit_r101x3": (387_934_888, "71.23"),
    "bit_r152x2": (236_335_208, "46.95"),
    "bit_r152x4": (936_533_224, "186.9"),
    "mixer_s32": (19_104_624, "1.00"),
    "mixer_s16": (18_528_264, "3.79"),
    "mixer_b32": (60_293_428, "3.24"),
    "mixer_b16": (59_880_472, "12.62"),
    "mixer_l32": (206_939_264, "11.27"),
    "mixer_l16": (208_196_168, "44.60"),
    "mixer_h14": (432_350_952, None),
    "swin_t": (28_288_354, "4.5"),
    "swin_s": (49_606_258, "8.7"),
    "swin_b": (87_768_224, "15.4"),
    "swin_b_w12": (87_903_584, "47.1"),
    "swin_l": (196_532_476, "34.5"),
    "swin_l_w12": (196_735_516, "103.9"),
    "swin_v2_t": (28_347_154, "5.96"),
    "swin_v2_t_w16": (28_347_154, "6.68"),
    "swin_v2_s": (49_728_418, "11.58"),
    "swin_v2_s_w16": (49_728_418, "12.82"),
    "swin_v2_b": (87_918_816, "20.37"),
    "swin_v2_b_w12": (87_918_816, "11.90"),
    "swin_v2_b_w16": (87_918_816, "22.02"),
    "swin_v2_b_w12to16": (87_918_816, "22.02"),
    "swin_v2_b_w12to24": (87_918_816, "55.25"),
    "swin_v2_l": (196_739_932, "26.17"),
    "swin_v2_l_w12to16": (196_739_932, "47.81"),
    "swin_v2_l_w12to24": (196_739_932, "116.15"),
    "pvt_ti": (13_229_288, "1.9"),
    "pvt_s": (24_485_864, "3.8"),
    "pvt_m": (44_208_104, "6.7"),
    "pvt_l": (61_369_320, "9.8"),
    "pvt_v2_b0": (3_666_760, "0.57"),
    "pvt_v2_b1": (14_009_000, "2.12"),
    "pvt_v2_b2": (25_362_856, "4.05"),
    "pvt_v2_b2_li": (22_553_512, "3.91"),
    "pvt_v2_b3": (45_238_696, "6.92"),
    "pvt_v2_b4": (62_556_072, "10.14"),
    "pvt_v2_b5": (81_956_008, "11.76"),
    "coatnet_0": (25_036_820, "4.58"),
    "coatnet_1": (42_225_776, "8.70"),
    "coatnet_2": (74_684_744, "16.50"),
    "coatnet_3": (166_966_264, "36.56"),
    "coatnet_4": (275_425_288, "62.48"),
    "coatnet_5": (687_472_008, "145.49"),
}
PUBLISHED_384 = {
    "r_vit_ti16": 6_355_944,
    "r26_vit_s32": 36_468_392,
    "r50_vit_b16": 98_950_952,
    "r50_vit_b32": 111_018_792,
    "r50_vit_l32": 329_092_136,
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


def norms(config: ModelConfig) -> int:
    """What timm's tables count beside: 5 operations for a value that is normalised, 4 for a standardised weight."""
    counted = []
    with torch.device("meta"):
        model = models.build(config)
        for module in model.modules():
            if isinstance(module, (nn.GroupNorm, nn.LayerNorm)):
                module.register_forward_hook(lambda _, __, output: counted.append(5 * output.numel()))
            elif isinstance(module, StdConv):
                counted.append(4 * module.weight.numel())
        model(torch.empty(1, config.channels, *config.img_size))
    return sum(counted)


def operations(config: Any) -> int:
    """The MACs of a model, counted in models with fewer blocks: each block of a stage adds the same."""
    if isinstance(depth := getattr(config, "depth", None), int) and depth > 2:
        one, two = (models.macs(replace(config, depth=few)) for few in (1, 2))
        return one + (depth - 1) * (two - one)
    depths = getattr(config, "depths", ())
    if max(depths, default=0) > 4:
        i = depths.index(max(depths))
        # Even numbers, because every second block of a Swin is another.
        two, four = (models.macs(replace(config, depths=(*depths[:i], few, *depths[i + 1 :]))) for few in (2, 4))
        return two + (depths[i] - 2) * (four - two) // 2
    return models.macs(config)


# Every model is counted here and nowhere else: it takes a while.
@pytest.mark.parametrize("name", models.CONFIGS)
def test_counts_are_the_published_ones_and_those_of_the_page(name):
    config = models.CONFIGS[name]
    count, macs = models.parameters(config), operations(config)
    assert COUNTS.get(name) == (count, macs), f'In models/counts.py, write "{name}": ({count:_}, {macs:_}),'
    h, w = config.img_size
    assert f"| {name} | {count:,} | {macs / 1e9:.2f} | {config.length} | {h}x{w} |\n" in PAGE.read_text()
    if name in PARAMETERS:
        assert count == PARAMETERS[name]
        assert macs == macs_by_formula(config)
    if name in GMACS:
        assert macs == pytest.approx(GMACS[name] * 1e9, rel=1e-3)
    if name in PUBLISHED:
        published, text = PUBLISHED[name]
        assert count == published
        if text is not None:
            digit = 10.0 ** -len(text.partition(".")[2])
            macs += norms(config) if isinstance(config, (BiTConfig, HybridConfig)) else 0
            assert macs / 1e9 == pytest.approx(float(text), rel=0.01, abs=digit / 2)


def test_the_page_lists_the_models_in_their_order():
    rows = re.findall(r"^\| (\w+) \| [\d,]+ \| [\d.]+ \| \d+ \| \w+ \|$", PAGE.read_text(), re.M)
    assert rows == list(models.CONFIGS)


@pytest.mark.parametrize("name", [*PARAMETERS_384, *PUBLISHED_384])
def test_parameters_at_384_pixels_are_the_published_ones(name):
    assert models.parameters(models.configure(name, img_size=384)) == {**PARAMETERS_384, **PUBLISHED_384}[name]


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


def test_a_swin_v2_of_imagenet_21k_has_the_published_parameters():
    assert models.parameters(models.configure("swin_v2_b_w12", classes=21_841)) == 109_280_841


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
        ({"pos": "patches"}, -384),
        ({"pos": "sincos2d"}, -197 * 384),  # fixed
        ({"pos": "learned2d"}, -197 * 384 + 2 * 14 * 192),
        ({"pos": "relative"}, -197 * 384 + 12 * 6 * (27 * 27 + 3)),
        ({"pos": "relative", "pool": "gap"}, -198 * 384 + 12 * 6 * 27 * 27),
    ],
    ids=str,
)
def test_every_switch_costs_what_it_should(changes, extra):
    assert models.parameters(models.configure("vit_s16", **changes)) == PARAMETERS["vit_s16"] + extra


@pytest.mark.parametrize("name", GMACS_384)
def test_macs_at_384_pixels_are_the_published_ones(name):
    config = models.configure(name, img_size=384)
    assert models.macs(config) == macs_by_formula(config) == pytest.approx(GMACS_384[name] * 1e9, rel=2e-3)


def test_the_largest_model_is_built_without_memory():
    with torch.device("meta"):
        model = models.create("vit_gigantic14")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not list(model.buffers())


def test_the_table_has_a_row_for_every_model():
    names = [name for name in models.CONFIGS if "vit_nano" in name]
    rows = {row.name: row for row in models.rows("vit_nano")}
    assert list(rows) == names
    config = models.CONFIGS["vit_nano4"]
    assert (rows["vit_nano4"].params, rows["vit_nano4"].macs) == (models.parameters(config), models.macs(config))
    assert (rows["vit_nano4"].tokens, rows["vit_nano4"].img_size) == (64, (32, 32))


def test_the_table_is_searched_by_name():
    assert [row.name for row in models.rows("vit_l")] == ["vit_l32", "vit_l16", "vit_l14", "r50_vit_l32"]
    with pytest.raises(UserError, match="No model has 'vit_x' in its name"):
        models.rows("vit_x")


def test_every_model_but_the_small_ones_is_compared():
    relatives = {name for name in models.CONFIGS if not name.startswith(("vit_", "dinov2_"))}
    assert relatives - PUBLISHED.keys() == {name for name in relatives if "_nano" in name}


def test_small_siblings_are_small():
    small = {name: models.CONFIGS[name] for name in models.CONFIGS if name.endswith("_nano")}
    families = {models.family(config) for config in models.CONFIGS.values()}
    assert set(small) == {f"{family}_nano" for family in families if family != "vit"}
    for name in small:
        config = models.configure(name, classes=10)
        assert models.parameters(config) < 1_200_000
        assert models.macs(config) < 80e6
        assert max(config.img_size) <= 64
