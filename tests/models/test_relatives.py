"""The ViT's relatives give the same numbers as timm and Hugging Face from the same weights, and know their names."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import peers
import pytest
import torch
import torch.nn.functional as F
from peers import distance, randomise
from torch import Tensor, nn

from vitrail import models
from vitrail.errors import UserError
from vitrail.models import ModelConfig
from vitrail.models.bit import BiTConfig, StdConv
from vitrail.models.coatnet import CoAtNet, CoAtNetConfig, RelativeAttention
from vitrail.models.hybrid import HybridConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.pvt import PVTConfig, ReducedAttention
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.models.swin import SwinConfig, WindowAttention
from vitrail.models.swin_v2 import CosineAttention, SwinV2Config
from vitrail.models.vit import ViTConfig
from vitrail.models.windows import Windows

TOLERANCE = 1e-5


@torch.no_grad()
def agree(config: ModelConfig, theirs: nn.Module) -> None:
    """Our model takes their weights by name, and gives their logits and the features that their head reads."""
    theirs = randomise(theirs)
    x = noise(2, config.channels, *config.img_size)
    theirs.train()(x)  # for running averages
    theirs.eval()
    ours = models.build(config).eval()
    # timm's "stages" are our "layers": `stages` is a method of every model here.
    state = {re.sub("^stages", "layers", name): value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(state, strict=True)
    features = ours.embed(x)
    if isinstance(ours, CoAtNet):
        features = ours.head.pre_logits(features)
    assert distance(features, theirs.forward_head(theirs.forward_features(x), pre_logits=True)) < TOLERANCE
    assert distance(ours(x), theirs(x)) < TOLERANCE


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def timm(module: str, name: str, **options: Any) -> Any:
    return getattr(peers.timm(f"timm.models.{module}"), name)(**options)


def test_deit3_is_timms():
    config = ViTConfig(64, 2, 4, 256, 8, (32, 48), channels=1, classes=10, pos="patches", layer_scale=1e-6)
    shape = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    options = {"no_embed_class": True, "init_values": 1e-6, "in_chans": 1, "num_classes": 10}
    agree(config, timm("vision_transformer", "VisionTransformer", **shape, **options))


@pytest.mark.parametrize("img_size", [(32, 32), (32, 48)], ids=str)
def test_mixer_is_timms(img_size):
    config = MixerConfig(64, 3, 32, 256, 8, img_size, channels=1, classes=10)
    shape = {"img_size": img_size, "patch_size": 8, "num_blocks": 3, "embed_dim": 64}
    agree(config, timm("mlp_mixer", "MlpMixer", **shape, in_chans=1, num_classes=10))


@pytest.mark.parametrize("img_size", [(64, 64), (37, 50)], ids=str)
def test_bit_is_timms(img_size):
    config = BiTConfig((32, 64, 128), (2, 1, 1), True, 4, img_size, channels=1, classes=10)
    layers = peers.timm("timm.layers")
    theirs = timm(
        "resnetv2",
        "ResNetV2",
        layers=(2, 1, 1),
        channels=(32, 64, 128),
        stem_chs=8,
        stem_type="fixed",
        norm_layer=partial(layers.GroupNormAct, num_groups=4),
        conv_layer=partial(layers.StdConv2d, eps=1e-8),
        in_chans=1,
        num_classes=10,
    )
    agree(config, theirs)


def test_bit_has_the_same_gradients_in_bf16_where_maps_are_single_pixels():
    """PyTorch 2.13 returns whatever is in memory for what lies outside of the map, on CPUs with bf16."""
    conv, images = StdConv(16, 16, 3, stride=2), torch.randn(64, 16, 1, 1)

    def gradient(half: bool) -> Tensor:
        conv.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs = conv(images)
        outputs.float().square().mean().backward()
        return conv.weight.grad.clone()

    assert distance(gradient(True), gradient(False)) < 0.02


@pytest.mark.parametrize("whole", [True, False], ids=["resnet", "stem alone"])
def test_hybrid_is_timms(whole):
    layers = peers.timm("timm.layers")
    parts = {
        "stem_type": "same",
        "preact": False,
        "norm_layer": partial(layers.GroupNormAct, num_groups=4),
        "conv_layer": partial(layers.StdConv2dSame, eps=1e-8),
    }
    if whole:
        shape = {"layers": (2, 1), "channels": (32, 64), "stem_chs": 8, "num_classes": 0, "global_pool": ""}
        resnet = timm("resnetv2", "ResNetV2", in_chans=1, **shape, **parts)
        config = HybridConfig(64, 2, 4, 256, (32, 64), (2, 1), 8, 4, 1, (32, 48), channels=1, classes=10)
    else:
        resnet = timm("resnetv2", "create_resnetv2_stem", in_chs=1, out_chs=8, **parts)
        config = HybridConfig(64, 2, 4, 256, (), (), 8, 4, 2, (32, 48), channels=1, classes=10)
    theirs = timm(
        "vision_transformer",
        "VisionTransformer",
        img_size=(32, 48),
        patch_size=config.patch,
        embed_layer=partial(layers.HybridEmbed, backbone=resnet),
        embed_dim=64,
        depth=2,
        num_heads=4,
        in_chans=1,
        num_classes=10,
    )
    agree(config, theirs)


@pytest.mark.parametrize("img_size", [(32, 48), (28, 44), (32, 8)], ids=["whole", "padded", "one window"])
def test_swin_is_timms(img_size):
    config = SwinConfig((32, 64), (2, 2), (2, 4), 4, 2, img_size, channels=1, classes=10)
    shape = {"img_size": img_size, "patch_size": 2, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
    if img_size == (32, 8):  # its second stage is 2 wide: timm would make its windows as narrow
        shape["depths"], config = (2,), SwinConfig((32,), (2,), (2,), 4, 2, img_size, channels=1, classes=10)
        shape["num_heads"] = (2,)
    agree(config, timm("swin_transformer", "SwinTransformer", **shape, window_size=4, in_chans=1, num_classes=10))


@pytest.mark.parametrize(
    ("img_size", "window", "pretrained"),
    [((32, 48), 4, ()), ((32, 48), 4, (6, 3)), ((32, 32), 16, ()), ((28, 44), 4, ())],
    ids=["whole", "pre-trained windows", "larger than a map", "padded"],
)
def test_swin_v2_is_timms(img_size, window, pretrained):
    config = SwinV2Config((32, 64), (2, 2), (2, 4), window, pretrained, 2, img_size, channels=1, classes=10)
    shape = {"img_size": img_size, "patch_size": 2, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
    shape |= {"window_size": window, "pretrained_window_sizes": pretrained or (0, 0), "strict_img_size": False}
    agree(config, timm("swin_transformer_v2", "SwinTransformerV2", **shape, in_chans=1, num_classes=10))


@pytest.mark.parametrize("linear", [False, True], ids=["reduced", "linear"])
@pytest.mark.parametrize("img_size", [(32, 32), (30, 41)], ids=str)
def test_pvt_v2_is_timms(img_size, linear):
    config = PVTv2Config((32, 64), (2, 1), (2, 4), (4, 2), (2, 1), linear, 4, img_size, channels=1, classes=10)
    shape = {"depths": (2, 1), "embed_dims": (32, 64), "num_heads": (2, 4), "sr_ratios": (2, 1), "mlp_ratios": (4, 2)}
    theirs = timm("pvt_v2", "PyramidVisionTransformerV2", **shape, linear=linear, in_chans=1, num_classes=10)
    agree(config, theirs)


@pytest.mark.parametrize("img_size", [(32, 32), (32, 48)], ids=str)
def test_coatnet_is_timms(img_size):
    config = CoAtNetConfig((32, 64, 96), (1, 2, 1), 16, 1, True, img_size, channels=1, classes=10)
    module = peers.timm("timm.models.maxxvit")
    shape = module.MaxxVitCfg(
        embed_dim=(32, 64, 96), depths=(1, 2, 1), block_type=("C", "T", "T"), stem_width=16, head_hidden_size=96
    )
    agree(config, module.MaxxVit(shape, img_size=img_size, in_chans=1, num_classes=10))


@torch.no_grad()
def test_pvt_is_hugging_faces():
    config = PVTConfig((32, 64, 96), (1, 2, 1), (1, 2, 3), (4, 2, 2), (4, 2, 1), 4, (32, 32), channels=1, classes=10)
    theirs = peers.transformers().PvtForImageClassification(
        peers.transformers().PvtConfig(
            image_size=32,
            num_channels=1,
            num_encoder_blocks=3,
            depths=[1, 2, 1],
            sequence_reduction_ratios=[4, 2, 1],
            hidden_sizes=[32, 64, 96],
            patch_sizes=[4, 2, 2],
            strides=[4, 2, 2],
            num_attention_heads=[1, 2, 3],
            mlp_ratios=[4, 2, 2],
            num_labels=10,
        )
    )
    theirs = randomise(theirs)
    peers.set_authors_epsilon(theirs)
    ours = models.build(config).eval()
    ours.load_state_dict(peers.pvt_by_authors(theirs.state_dict()), strict=True)
    x = noise(2, 1, 32, 32)
    assert distance(ours(x), theirs(x).logits) < TOLERANCE


@pytest.mark.parametrize(
    ("attention", "arguments"),
    [
        (WindowAttention(32, 4, (6, 9), window=4, shifted=False, drop=0.0), (noise(2, 6, 9, 32),)),
        (WindowAttention(32, 4, (6, 9), window=4, shifted=True, drop=0.0), (noise(2, 6, 9, 32),)),
        (CosineAttention(32, 4, Windows((6, 9), 4, shifted=True), 3, drop=0.0), (noise(2, 6, 9, 32),)),
        (ReducedAttention(32, 4, 2, 0.0), (noise(2, 24, 32), (4, 6))),
        (ReducedAttention(32, 4, 2, 0.0, linear=True), (noise(2, 24, 32), (4, 6))),
        (RelativeAttention(32, 64, (3, 5), 0.0), (noise(2, 32, 3, 5),)),
    ],
    ids=["windows", "shifted windows", "cosine", "reduced", "linear", "relative"],
)
@torch.no_grad()
def test_attention_weights_are_those_that_forward_applies(attention, arguments, monkeypatch):
    attention = randomise(attention)
    expected = attention(*arguments)
    applied = []

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        applied.append((logits if attn_mask is None else logits + attn_mask).softmax(-1))
        return applied[-1] @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    assert distance(attention(*arguments), expected) < TOLERANCE
    weights = attention.weights(*arguments)
    assert distance(weights.flatten(1, -3), applied[0].flatten(1, -3)) < TOLERANCE  # windows and heads may be one
    assert weights.std() > 0.1 * weights.mean()  # not merely uniform


@torch.no_grad()
def test_shifted_windows_do_not_look_across_the_edge_of_the_map():
    attention = randomise(WindowAttention(8, 2, (8, 8), window=4, shifted=True, drop=0.0))
    x = torch.zeros(1, 8, 8, 8)
    changed = x.clone()
    changed[0, 0, 0] = 5.0  # it shares its window with the other three corners, which are no neighbours
    moved = (attention(changed) - attention(x)).abs().sum(-1)[0] > 1e-4
    assert moved[:2, :2].all()
    assert not moved[2:].any()
    assert not moved[:, 2:].any()


SPELLINGS = [
    ("deit3_small_patch16_224.fb_in22k_ft_in1k", "deit3_s16", 224),
    ("deit3_large_patch16_384", "deit3_l16", 384),
    ("deit3_huge_patch14_224", "deit3_h14", 224),
    ("mixer_b16_224", "mixer_b16", 224),
    ("mixer_b16_224.goog_in21k_ft_in1k", "mixer_b16", 224),
    ("timm/mixer_l16_224.goog_in21k", "mixer_l16", 224),
    ("Mixer-B/16", "mixer_b16", 224),
    ("Mixer-L_16", "mixer_l16", 224),
    ("Mixer-S/32", "mixer_s32", 224),
    ("mixer_nano", "mixer_nano", 32),
    ("resnetv2_50x1_bit", "bit_r50x1", 224),
    ("resnetv2_152x2_bit.goog_in21k_ft_in1k", "bit_r152x2", 224),
    ("resnetv2_50x1_bitm_in21k", "bit_r50x1", 224),
    ("BiT-M-R50x1", "bit_r50x1", 224),
    ("BiT-M-R50x1.npz", "bit_r50x1", 224),
    ("BiT-L (R152x4)", "bit_r152x4", 224),
    ("R101x3", "bit_r101x3", 224),
    ("google/bit-50", "bit_r50x1", 224),
    ("R50+ViT-B/16", "r50_vit_b16", 224),
    ("R50+ViT-B_16.npz", "r50_vit_b16", 224),
    ("vit_base_r50_s16_384", "r50_vit_b16", 384),
    ("vit_small_r26_s32_224.augreg_in21k_ft_in1k", "r26_vit_s32", 224),
    ("vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k", "r_vit_ti16", 384),
    ("vit_large_r50_s32_224", "r50_vit_l32", 224),
    ("R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "r_vit_ti16", 224),
    (
        "R26_S_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384.npz",
        "r26_vit_s32",
        384,
    ),
    ("google/vit-hybrid-base-bit-384", "r50_vit_b16", 384),
    ("swin_tiny_patch4_window7_224", "swin_t", 224),
    ("swin_base_patch4_window12_384.ms_in22k_ft_in1k", "swin_b_w12", 384),
    ("microsoft/swin-tiny-patch4-window7-224", "swin_t", 224),
    ("microsoft/swin-large-patch4-window12-384-in22k", "swin_l_w12", 384),
    ("Swin-T", "swin_t", 224),
    ("swinv2_tiny_window8_256.ms_in1k", "swin_v2_t", 256),
    ("swinv2_base_window12to24_192to384", "swin_v2_b_w12to24", 384),
    ("microsoft/swinv2-large-patch4-window12-192-22k", "swin_v2_l", 192),
    ("microsoft/swinv2-base-patch4-window12to16-192to256-22kto1k-ft", "swin_v2_b_w12to16", 256),
    ("SwinV2-S", "swin_v2_s", 256),
    ("swin_b", "swin_b", 224),
    ("PVT-Tiny", "pvt_ti", 224),
    ("pvt_medium", "pvt_m", 224),
    ("Zetatech/pvt-large-224", "pvt_l", 224),
    ("PVTv2-B0", "pvt_v2_b0", 224),
    ("PVT-v2-B2-Li", "pvt_v2_b2_li", 224),
    ("pvt_v2_b2_li.in1k", "pvt_v2_b2_li", 224),
    ("OpenGVLab/pvt_v2_b5", "pvt_v2_b5", 224),
    ("CoAtNet-0", "coatnet_0", 224),
    ("coatnet_3_224", "coatnet_3", 224),
]


@pytest.mark.parametrize(("spelling", "name", "side"), SPELLINGS, ids=[row[0] for row in SPELLINGS])
def test_every_spelling_is_understood(spelling, name, side):
    found, config = models.canonical(spelling)
    assert found == name == models.name_of(config)
    assert config.img_size == (side, side)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixer_b16", {"img_size": 230}, "multiple of the patch size, 16, but it is 230x230. .*is 224x224"),
        ("mixer_b16", {"mlp_tokens": 0}, "'mlp_tokens' must be at least 1, but it is 0"),
        ("mixer_b16", {"classes": -1}, "'classes' must be at least 0, but it is -1"),
        ("mixer_b16", {"drop": 1.0}, "'drop' must be at least 0 and below 1, but it is 1.0"),
        ("bit_r50x1", {"depths": (1, 2)}, r"'depths' must have one value for each of 4 widths, but it is \(1, 2\)"),
        ("bit_r50x1", {"depths": "many"}, "'depths' must be a list of whole numbers, but it is 'many'"),
        ("bit_r50x1", {"groups": 24}, "multiples of 4 · groups = 96, but one is 256"),
        ("r50_vit_b16", {"img_size": 230}, "multiple of the stride, 16, but it is 230x230. .*is 224x224"),
        ("r50_vit_b16", {"heads": 7}, "The width, 768, must be a multiple of the number of heads, 7"),
        ("r50_vit_b16", {"first": 30}, "'widths' must be multiples of 4 · groups = 128"),
        ("swin_t", {"heads": (3, 6, 12, 5)}, "The width, 768, must be a multiple of the number of heads, 5"),
        ("swin_t", {"depths": ()}, "'depths' must be at least 1, but it is \\(\\)"),
        ("pvt_ti", {"img_size": 80}, "multiple of the stride, 32, but it is 80x80"),
        ("pvt_ti", {"reductions": (8, 4, 2, 2)}, "The last of 'reductions' must be 1"),
        ("pvt_v2_b0", {"img_size": 28}, "A stage of 7x7 tokens cannot be reduced by 8x8"),
        ("coatnet_0", {"widths": (96, 192, 380, 768)}, "multiples of 32, but one is 380"),
        ("coatnet_0", {"convs": 5}, "'convs' must be from 0 to the 4 stages, but it is 5"),
        ("mixer_b16", {"heads": 3}, "A model has no option 'heads'. .*It takes width, depth"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(name, changes, message):
    with pytest.raises(UserError, match=message):
        models.configure(name, **changes)
