"""Parameters and multiply-accumulates of the ViT's relatives, to the last one, without allocating a weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitrail import models
from vitrail.models import ModelConfig
from vitrail.models.bit import BiTConfig, StdConv
from vitrail.models.hybrid import HybridConfig

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    config, (count, text) = models.CONFIGS[name], PUBLISHED[name]
    assert models.parameters(config) == count
    if text is not None:
        digit = 10.0 ** -len(text.partition(".")[2])
        counted = models.macs(config) + (norms(config) if isinstance(config, (BiTConfig, HybridConfig)) else 0)
        assert counted / 1e9 == pytest.approx(float(text), rel=0.01, abs=digit / 2)


@pytest.mark.parametrize("name", PUBLISHED_384)
def test_counts_at_384_pixels_are_the_published_ones(name):
    assert models.parameters(models.configure(name, img_size=384)) == PUBLISHED_384[name]


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


def test_every_model_but_the_small_ones_is_compared():
    relatives = {name for name in models.CONFIGS if not name.startswith(("vit_", "dinov2_"))}
    assert relatives - PUBLISHED.keys() == {name for name in relatives if "_nano" in name}


def test_small_siblings_are_small():
    small = {name: models.CONFIGS[name] for name in models.CONFIGS if name.endswith("_nano")}
    assert set(small) == {f"{family}_nano" for family in models.FAMILIES if family != "vit"}
    for name in small:
        config = models.configure(name, classes=10)
        assert models.parameters(config) < 1_200_000
        assert models.macs(config) < 80e6
        assert max(config.img_size) <= 64
