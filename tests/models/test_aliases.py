"""Every spelling of a model's name, what is refused, and what the options refuse."""

from __future__ import annotations

import pytest

from vitrail import models
from vitrail.errors import UserError
from vitrail.models.vit import ViTConfig

SPELLINGS = [
    # our own, any patch size
    ("vit_b16", "vit_b16", 224),
    ("vit_ti4", "vit_ti4", 224),
    ("vit_s15", "vit_s15", 225),  # the multiple of 15 that is nearest to 224
    ("vit_nano4", "vit_nano4", 32),
    ("vit_nano3", "vit_nano3", 33),
    ("vit_giant14", "vit_giant14", 224),
    ("vit_gigantic14", "vit_gigantic14", 224),
    # the paper
    ("ViT-B/16", "vit_b16", 224),
    ("ViT-Ti/16", "vit_ti16", 224),
    ("ViT-S/32", "vit_s32", 224),
    ("ViT-H/14", "vit_h14", 224),
    ("B/16", "vit_b16", 224),
    ("ViT-g/14", "vit_giant14", 224),
    ("ViT-G/14", "vit_gigantic14", 224),
    # the authors' JAX files
    ("ViT-B_16", "vit_b16", 224),
    ("ViT-L_32.npz", "vit_l32", 224),
    ("B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", "vit_b16", 224),
    ("Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "vit_ti16", 224),
    (
        "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384.npz",
        "vit_b16",
        384,
    ),
    # timm, with and without the tag of the weights
    ("vit_base_patch16_224", "vit_b16", 224),
    ("vit_base_patch16_384", "vit_b16", 384),
    ("vit_tiny_patch16_224", "vit_ti16", 224),
    ("vit_small_patch32_384.augreg_in21k_ft_in1k", "vit_s32", 384),
    ("vit_base_patch16_224.augreg_in21k_ft_in1k", "vit_b16", 224),
    ("vit_base_patch8_224.dino", "vit_b8", 224),
    ("vit_large_patch14_224", "vit_l14", 224),
    ("vit_huge_patch14_224", "vit_h14", 224),
    ("vit_giant_patch14_224", "vit_giant14", 224),
    ("vit_gigantic_patch14_224", "vit_gigantic14", 224),
    ("timm/vit_base_patch16_384.augreg_in21k_ft_in1k", "vit_b16", 384),
    # Hugging Face
    ("google/vit-base-patch16-224", "vit_b16", 224),
    ("google/vit-base-patch16-224-in21k", "vit_b16", 224),
    ("google/vit-large-patch32-384", "vit_l32", 384),
    ("google/vit-huge-patch14-224-in21k", "vit_h14", 224),
    # torchvision
    ("vit_b_16", "vit_b16", 224),
    ("vit_l_32", "vit_l32", 224),
    ("vit_h_14", "vit_h14", 224),
    # mmpretrain
    ("vit-base-p16_in21k-pre_3rdparty_in1k-384px", "vit_b16", 384),
    ("vit-large-p16_in21k-pre_3rdparty_in1k-384px", "vit_l16", 384),
    # keras
    ("vit_base_patch16_224_imagenet", "vit_b16", 224),
    ("vit_base_patch16_384_imagenet", "vit_b16", 384),
    ("vit_base_patch16_224_imagenet21k", "vit_b16", 224),
    # open_clip
    ("ViT-B-16", "vit_b16", 224),
    ("ViT-L-14-336", "vit_l14", 336),
    ("ViT-g-14", "vit_giant14", 224),
]

# spelling, name, image size, pooling, registers
DEIT_AND_DINOV2 = [
    ("deit_tiny_patch16_224", "vit_ti16", 224, "cls", 0),
    ("deit_base_patch16_384.fb_in1k", "vit_b16", 384, "cls", 0),
    ("facebook/deit-small-patch16-224", "vit_s16", 224, "cls", 0),
    ("deit_ti16", "deit_ti16", 224, "cls_dist", 0),
    ("deit_nano4", "deit_nano4", 32, "cls_dist", 0),
    ("deit_l16", "deit_l16", 224, "cls_dist", 0),
    ("deit_b16_384", "deit_b16", 384, "cls_dist", 0),
    ("deit_tiny_distilled_patch16_224", "deit_ti16", 224, "cls_dist", 0),
    ("deit_base_distilled_patch16_384.fb_in1k", "deit_b16", 384, "cls_dist", 0),
    ("facebook/deit-base-distilled-patch16-224", "deit_b16", 224, "cls_dist", 0),
    ("dinov2_s14", "dinov2_s14", 518, "cls", 0),
    ("dinov2_vitb14", "dinov2_b14", 518, "cls", 0),
    ("dinov2_vitl14_reg", "dinov2_l14", 518, "cls", 4),
    ("facebook/dinov2-base", "dinov2_b14", 518, "cls", 0),
    ("facebook/dinov2-giant", "dinov2_g14", 518, "cls", 0),
    ("facebook/dinov2-with-registers-small", "dinov2_s14", 518, "cls", 4),
    ("facebook/dinov2-base-imagenet1k-1-layer", "dinov2_b14", 518, "cls_gap", 0),
    ("vit_base_patch14_dinov2", "dinov2_b14", 518, "cls", 0),
    ("vit_giant_patch14_reg4_dinov2.lvd142m", "dinov2_g14", 518, "cls", 4),
    ("timm/vit_small_patch14_dinov2.lvd142m", "dinov2_s14", 518, "cls", 0),
]

OTHER_ARCHITECTURES = [
    "dinov2_vitb14_lc",
    "dinov2_base_patch16",
    "vit_medium_patch16_clip_224.tinyclip_yfcc15m",
    "vit_base_patch16_siglip_224",
    "vit_so400m_patch14_siglip_224",
    "ViT-B-16-SigLIP",
    "ViT-B-16-quickgelu",
    "ViT-bigG-14",
    "vit_base_patch16_rope_224",
    "vit_base_patch16_224_miil",
    "vit_base_patch32_plus_256",
    "vit_medium_patch16_reg4_256",
    "samvit_base_patch16",
    "beit_base_patch16_224",
    "swin_s3_tiny_224",
    "swinv2_cr_tiny_224",
    "coatnet_0_rw_224",
    "pvt_v2_b6",
    "mixer_x16",
    "resnetv2_50",
    "R50",
    "levit_128",
    "mobilevit_s",
    "resnet50",
]


@pytest.mark.parametrize(("spelling", "name", "side"), SPELLINGS, ids=[row[0] for row in SPELLINGS])
def test_every_spelling_is_understood(spelling, name, side):
    found, config = models.canonical(spelling)
    assert (found, config.img_size) == (name, (side, side))
    size = name.rstrip("0123456789")
    alike = next(c for listed, c in models.CONFIGS.items() if listed.rstrip("0123456789") == size)
    assert (config.width, config.depth, config.heads, config.mlp) == (
        alike.width,
        alike.depth,
        alike.heads,
        alike.mlp,
    )
    assert config.patch == int(name.removeprefix(size))


@pytest.mark.parametrize(("spelling", "name", "side", "pool", "registers"), DEIT_AND_DINOV2)
def test_the_names_of_deit_and_dinov2_say_what_they_have(spelling, name, side, pool, registers):
    found, config = models.canonical(spelling)
    assert (found, config.img_size, config.pool, config.registers) == (name, (side, side), pool, registers)
    assert models.name_of(config) == name
    assert (config.layer_scale > 0) == name.startswith("dinov2")
    assert (config.act == "swiglu") == (name == "dinov2_g14")


@pytest.mark.parametrize(
    ("spelling", "name", "side", "act"),
    [
        ("vit_base_patch16_clip_224.openai", "clip_b16", 224, "quick_gelu"),
        ("vit_base_patch32_clip_quickgelu_224.laion400m_e32", "clip_b32", 224, "quick_gelu"),
        ("vit_large_patch14_clip_336.laion2b_ft_in12k_in1k", "clip_l14", 336, "gelu"),
        ("openai/clip-vit-large-patch14-336", "clip_l14", 336, "quick_gelu"),
    ],
)
def test_the_names_of_clips_image_towers(spelling, name, side, act):
    found, config = models.canonical(spelling)
    assert (found, config.img_size, config.act) == (name, (side, side), act)
    assert models.name_of(config) == name


@pytest.mark.parametrize("name", OTHER_ARCHITECTURES)
def test_look_alikes_are_refused(name):
    with pytest.raises(UserError, match=r"There is no model .*(`vitrail models` lists the models|vitrail has no)"):
        models.canonical(name)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("vit_b61", "vit_b16"),
        ("vit_t16", "vit_ti16"),
        ("vit_nanno4", "vit_nano4"),
        ("VIT_GIGANTC14", "vit_gigantic14"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(typed, meant):
    with pytest.raises(UserError, match=f"There is no model '{typed}'. Did you mean '{meant}'?"):
        models.create(typed)


@pytest.mark.parametrize("name", ["vit_b0", "vit_b33", "vit_b", ""])
def test_a_patch_size_is_needed_between_1_and_32(name):
    with pytest.raises(UserError, match="any patch size up to 32"):
        models.canonical(name)


@pytest.mark.parametrize(
    ("name", "asked", "meant"),
    [
        ("pvt_v2_nano", "pvt_v2", True),
        ("pvt_v2_nano", "pvt", False),
        ("r26_vit_s32", "hybrid", True),
        ("swin", "swin", True),  # of a size without a name
        ("vit_w32d1p4", "vit", True),
        ("deit_s8", "vit", True),
        ("deit_s8", "deit", True),
        ("deit3_s16", "deit", False),
        ("vit_b16", "google/vit-base-patch16-384", True),
        ("vit_b16", "vit_b32", False),
    ],
)
def test_a_family_means_all_of_its_models_and_no_others(name, asked, meant):
    assert models.is_meant(name, asked) == meant


def test_a_name_with_a_size_that_its_patch_does_not_divide_is_refused():
    with pytest.raises(UserError, match="multiple of the patch size, 16, but it is 225x225"):
        models.canonical("vit_base_patch16_225")


def test_options_change_the_named_model():
    config = models.configure(
        "ViT-B/16", classes=10, img_size="192x256", pool="gap", channels=1, layer_scale=1, drop_path=0.1
    )
    expected = ViTConfig(768, 12, 12, 3072, 16, (192, 256), 1, 10, "gap", layer_scale=1.0, drop_path=0.1)
    assert config == expected
    assert isinstance(config.layer_scale, float)


def test_a_size_given_as_an_option_wins_over_the_one_in_the_name():
    assert models.configure("vit_base_patch16_384", img_size=128).img_size == (128, 128)


@pytest.mark.parametrize("size", [384, "384", (384, 384), [384, 384], "384x384"])
def test_sizes_may_be_given_in_any_form(size):
    assert models.configure("vit_b16", img_size=size).img_size == (384, 384)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clases": 10}, "A model has no option 'clases'. Did you mean 'classes'?"),
        ({"dropout": 0.1}, "A model has no option 'dropout'. It is called 'drop' here."),
        ({"classes": "ten"}, "'classes' must be a whole number, but it is 'ten'"),
        ({"classes": 10.5}, "'classes' must be a whole number, but it is 10.5"),
        ({"classes": True}, "'classes' must be a whole number, but it is True"),
        ({"drop": "a"}, "'drop' must be a number, but it is 'a'"),
        ({"pool": "avg"}, "'pool' must be one of cls, cls_dist, cls_gap, gap, gap_norm, mae, map, but it is 'avg'"),
        ({"pos": "learn"}, "'pos' must be one of .* but it is 'learn'. Did you mean 'learned'?"),
        ({"head": None}, "'head' must be one of linear, tanh, but it is None"),
        ({"img_size": "big"}, "'img_size' must be a size like 224 or 192x256, but it is 'big'"),
        ({"img_size": (1, 2, 3)}, "'img_size' must be a size"),
        (
            {"img_size": 230},
            "multiple of the patch size, 16, but it is 230x230. The nearest that fits is 224x224",
        ),
        ({"img_size": (224, 250)}, "but it is 224x250. The nearest that fits is 224x256"),
        ({"img_size": 5}, "but it is 5x5. The nearest that fits is 16x16"),
        ({"heads": 7}, "The width, 768, must be a multiple of the number of heads, 7"),
        (
            {"width": 6, "heads": 2, "pos": "sincos2d"},
            "need a width that is a multiple of 4, but it is 6",
        ),
        ({"classes": -1}, "'classes' must be at least 0, but it is -1"),
        ({"channels": 0}, "'channels' must be at least 1, but it is 0"),
        ({"patch": 0}, "'patch' must be at least 1, but it is 0"),
        ({"heads": 0}, "'heads' must be at least 1, but it is 0"),
        ({"depth": -1}, "'depth' must be at least 1, but it is -1"),
        ({"registers": -1}, "'registers' must be at least 0, but it is -1"),
        ({"drop": 1.5}, "'drop' must be at least 0 and below 1, but it is 1.5"),
        ({"drop_path": 1}, "'drop_path' must be at least 0 and below 1, but it is 1.0"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        models.configure("vit_b16", **changes)


@pytest.mark.parametrize(
    ("name", "asked", "meant"),
    [
        ("vit_b16", "google/vit-base-patch16-384", True),
        ("vit_b16", "vit_b32", False),
        ("pvt_ti", "pvt", True),
        ("pvt_v2_b0", "pvt", False),
        ("pvt_v2_b0", "pvt_v2", True),
        ("swin", "swin", True),  # of a size that has no name
        ("swin", "vit", False),
        ("vit_w32d2p4", "vit_w32d2p4", True),
        ("vit_w32d2p4", "vit", True),
        ("deit_l16", "vit", True),
        ("deit_l16", "deit", True),
        ("deit3_s16", "vit", True),
        ("deit3_s16", "deit", False),
        ("vit_b16", "deit", False),
    ],
)
def test_a_model_is_meant_by_its_names_and_by_its_family(name, asked, meant):
    assert models.is_meant(name, asked) == meant
