"""BiTs and hybrids go to timm, Hugging Face and the authors' files and come from them, with the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
import torch.nn.functional as F
from peers import TOLERANCE, distance, hf_modules, hf_vit, identical, randomise
from safetensors.torch import load_file
from scipy import ndimage
from torch import Tensor, nn

from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import ModelConfig
from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.position import Grid
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, open_run, recognise, save
from vitrail.weights.tensors import from_state_dict

BIT = BiTConfig((32, 64, 128), (2, 1, 1), True, 4, (40, 56), channels=1, classes=5)
HYBRID = HybridConfig(32, 2, 4, 128, (32, 64), (2, 1), 8, 4, 1, (32, 48), channels=1, classes=5)
STEM = replace(HYBRID, widths=(), depths=(), patch=2)  # as R+ViT-Ti/16 has it
CONFIGS = {"bit": BIT, "hybrid": HYBRID, "stem alone": STEM}
NAMES = {"timm": "a.safetensors", "hf": "a", "npz": "a.npz"}  # of what is written
every = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def noise(config: ModelConfig) -> Tensor:
    return torch.randn(2, config.channels, *config.img_size, generator=torch.Generator().manual_seed(1))


def kept(config: ModelConfig, folder: Path) -> tuple[Path, models.Model]:
    """Our model as a file with its card."""
    model = randomise(models.build(config))
    names = tuple(f"class {i}" for i in range(config.classes))
    seen = Preprocess(config.img_size, config.channels, 0.9, (0.4,), (0.2,), interpolation="bilinear")
    path = folder / "ours" / "model.safetensors"
    path.parent.mkdir()
    save(path, model, Card(model=models.name_of(config), config=config, task=Multiclass(names), preprocess=seen))
    return path, model


def timms(config: BiTConfig | HybridConfig) -> Any:
    """timm's model of the same shape with random weights."""
    layers, resnets = peers.timm("timm.layers"), peers.timm("timm.models.resnetv2")
    norm = partial(layers.GroupNormAct, num_groups=config.groups)
    shape = {"layers": config.depths, "channels": config.widths, "stem_chs": config.first, "in_chans": config.channels}
    if isinstance(config, BiTConfig):
        conv = partial(layers.StdConv2d, eps=1e-8)
        options = {"stem_type": "fixed", "num_classes": config.classes}
        return randomise(resnets.ResNetV2(**shape, norm_layer=norm, conv_layer=conv, **options))
    parts = {"stem_type": "same", "preact": False, "norm_layer": norm}
    parts["conv_layer"] = partial(layers.StdConv2dSame, eps=1e-8)
    if config.widths:
        resnet = resnets.ResNetV2(**shape, num_classes=0, global_pool="", **parts)
    else:
        resnet = resnets.create_resnetv2_stem(config.channels, config.first, **parts)
    theirs = peers.timm("timm.models.vision_transformer").VisionTransformer(
        img_size=config.img_size,
        patch_size=config.patch,
        embed_layer=partial(layers.HybridEmbed, backbone=resnet),
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp / config.width,
        act_layer=config.act,
        in_chans=config.channels,
        num_classes=config.classes,
    )
    return randomise(theirs)


class HybridPatches(nn.Module):
    """What `ViTHybridForImageClassification` has for a ViT's patches, with its names."""

    def __init__(self, backbone: nn.Module, projection: nn.Module):
        super().__init__()
        self.backbone, self.projection = backbone, projection

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.backbone(images).feature_maps[-1]).flatten(2).transpose(1, 2)


def hugging_faces(config: BiTConfig | HybridConfig) -> Any:
    """Hugging Face's model of the same shape with random weights.

    transformers 5 has no hybrid any more: it is put together as it was, of its ResNet and its ViT.
    """
    library = peers.transformers()
    resnet = {
        "embedding_size": config.first,
        "hidden_sizes": list(config.widths),
        "depths": list(config.depths),
        "num_groups": config.groups,
        "num_channels": config.channels,
    }
    if isinstance(config, BiTConfig):
        return randomise(library.BitForImageClassification(library.BitConfig(**resnet, num_labels=config.classes)))
    padding = {"global_padding": "same", "embedding_dynamic_padding": True}
    backbone = library.BitBackbone(
        library.BitConfig(**resnet, **padding, layer_type="bottleneck", out_features=[f"stage{len(config.widths)}"])
    )
    h, w = config.grid
    shape = (config.width, config.depth, config.heads, config.mlp, 1, (h, w), config.widths[-1], config.classes)
    theirs: Any = hf_vit("ViTForImageClassification", ViTConfig(*shape), layer_norm_eps=1e-6)
    embeddings = theirs.vit.embeddings
    embeddings.patch_embeddings = HybridPatches(backbone, embeddings.patch_embeddings.projection)
    embeddings.image_size = config.img_size
    return randomise(theirs)


# Theirs -> ours


def resampled(source: str, rows: Tensor, old: Grid, new: Grid) -> Tensor:
    """Positions (1, 1 + h·w, D) on another grid, as the code of each source resamples them."""
    if source == "timm":
        grown: Tensor = peers.timm("timm.layers").resample_abs_pos_embed(rows, list(new), list(old))
        return grown
    grid = rows[:, 1:].unflatten(1, old)  # 1 h w D
    if source == "hf":
        patches = F.interpolate(grid.permute(0, 3, 1, 2), new, mode="bicubic").permute(0, 2, 3, 1)
    else:
        patches = torch.from_numpy(ndimage.zoom(grid.numpy(), (1, new[0] / old[0], new[1] / old[1], 1), order=1))
    return torch.cat([rows[:, :1], patches.flatten(1, 2)], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("size", [(64, 64), (32, 96)], ids=["larger", "rectangle"])
@pytest.mark.parametrize(
    ("source", "config"),
    [("timm", BIT), ("timm", HYBRID), ("timm", STEM), ("hf", BIT), ("hf", HYBRID), ("npz", BIT), ("npz", HYBRID)],
    ids=["timm BiT", "timm hybrid", "timm stem", "hf BiT", "hf hybrid", "npz BiT", "npz hybrid"],
)
def test_other_sizes_are_those_of_the_source(tmp_path, source, config, size):
    peer = hugging_faces if source == "hf" else timms
    if source == "npz" and isinstance(config, HybridConfig):
        config = replace(config, act="gelu_tanh")  # as flax computes it
    theirs, other = peer(config), peer(replace(config, img_size=size))
    weights: Any = theirs.state_dict()
    if source == "npz":
        weights = convert(kept(config, tmp_path)[0], tmp_path / "a.npz", to="npz")
        weights.with_suffix(".json").unlink()
        theirs.load_pretrained(str(weights))
    state = theirs.state_dict()
    if isinstance(config, HybridConfig):
        name = "vit.embeddings.position_embeddings" if source == "hf" else "pos_embed"
        state[name] = resampled(source, state[name], config.grid, replace(config, img_size=size).grid)
    other.load_state_dict(state)
    ours = load(weights, model=config, img_size=size)
    answer = other(noise(ours.config))
    assert distance(ours(noise(ours.config)), getattr(answer, "logits", answer)) < TOLERANCE


@torch.no_grad()
@every
def test_timms_weights_give_timms_logits(config):
    theirs, x = timms(config), noise(config)
    ours = load(theirs.state_dict(), model=config)
    assert ours.config == config
    assert distance(ours(x), theirs(x)) < TOLERANCE


@torch.no_grad()
def test_a_folder_of_hugging_faces_bit_needs_nothing_else(tmp_path):
    theirs, x = hugging_faces(BIT), noise(BIT)
    theirs.save_pretrained(tmp_path)
    peers.transformers().BitImageProcessor(
        size={"shortest_edge": 64}, crop_size={"height": 40, "width": 56}, image_mean=[0.4], image_std=[0.2]
    ).save_pretrained(tmp_path)
    ours, card = open_run(tmp_path)
    assert ours.config == BIT
    assert card.preprocess == Preprocess((40, 56), 1, 0.625, (0.4,), (0.2,))
    assert distance(ours(x), theirs(x).logits) < TOLERANCE


@torch.no_grad()
def test_hugging_faces_hybrid_gives_its_logits():
    theirs, x = hugging_faces(HYBRID), noise(HYBRID)
    ours = load(theirs.state_dict(), model=HYBRID)
    assert peers.shown(ours.config) == HYBRID
    assert distance(ours(x), theirs(x).logits) < TOLERANCE


# Ours -> theirs


@torch.no_grad()
@every
def test_timm_takes_our_weights(tmp_path, config):
    path, ours = kept(config, tmp_path)
    written = load_file(convert(path, tmp_path / "timm.safetensors", to="timm"))
    theirs, x = timms(config), noise(config)
    theirs.load_state_dict(written, strict=True)
    assert distance(theirs(x), ours(x)) < TOLERANCE


@torch.no_grad()
def test_hugging_face_reads_the_folder_of_a_bit(tmp_path):
    path, ours = kept(BIT, tmp_path)
    convert(path, tmp_path / "theirs", to="hf")
    kind = peers.transformers().AutoModelForImageClassification
    theirs, report = kind.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values())
    assert type(theirs).__name__ == "BitForImageClassification"
    x = noise(BIT)
    assert distance(theirs(x).logits, ours(x)) < TOLERANCE


@torch.no_grad()
def test_hugging_faces_hybrid_takes_our_weights(tmp_path):
    path, ours = kept(HYBRID, tmp_path)
    written = load_file(convert(path, tmp_path / "theirs", to="hf"))
    # What the published google/vit-hybrid-base-bit-384 calls some of them.
    resnet = "vit.embeddings.patch_embeddings.backbone.bit"
    assert f"{resnet}.encoder.stages.1.layers.0.downsample.norm.weight" in written
    assert "vit.encoder.layer.1.attention.attention.query.weight" in written
    theirs, x = hugging_faces(HYBRID), noise(HYBRID)
    theirs.load_state_dict(hf_modules(written), strict=True)
    assert distance(theirs(x).logits, ours(x)) < TOLERANCE
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert about["backbone_featmap_shape"] == [1, 64, 4, 6]
    told = peers.transformers().BitConfig(**about["backbone_config"])
    same = theirs.vit.embeddings.patch_embeddings.backbone.config
    for name in ("hidden_sizes", "depths", "layer_type", "global_padding", "embedding_dynamic_padding", "num_groups"):
        assert getattr(told, name) == getattr(same, name)


@torch.no_grad()
@every
def test_timm_reads_our_npz_as_the_authors(tmp_path, config):
    path, ours = kept(config, tmp_path)
    written = convert(path, tmp_path / "theirs.npz", to="npz")
    theirs, x = timms(config), noise(config)
    theirs.load_pretrained(str(written))
    assert distance(theirs(x), ours(x)) < TOLERANCE


# There and back


@pytest.mark.parametrize(
    ("name", "to"),
    [(name, to) for name in CONFIGS for to in ("timm", "hf", "npz") if (name, to) != ("stem alone", "hf")],
)
def test_weights_come_back_as_they_were(tmp_path, name, to):
    config = CONFIGS[name]
    path, ours = kept(config, tmp_path)
    there = convert(path, tmp_path / NAMES[to], to=to)
    back, card = open_run(there)
    assert identical(back.state_dict(), ours.state_dict())
    assert card.classes == tuple(f"class {i}" for i in range(5))
    there.with_suffix(".json").unlink()  # then the tensors and the files beside them tell it
    model = None if to == "hf" else config
    again, card = open_run(there, model=model)
    assert peers.shown(again.config) == config
    assert identical(again.state_dict(), ours.state_dict())
    if to == "hf":
        assert card.classes == tuple(f"class {i}" for i in range(5))
        assert card.preprocess.mean == (0.4,)


def test_an_npz_file_shows_the_heads(tmp_path):
    path, _ = kept(HYBRID, tmp_path)
    there = convert(path, tmp_path / "theirs.npz", to="npz")
    there.with_suffix(".json").unlink()
    with pytest.raises(UserError, match="has heads 4, but `model` has 2"):
        load(there, model=replace(HYBRID, heads=2))


@torch.no_grad()
def test_size_channels_and_classes_of_others_are_adapted(tmp_path):
    path, ours = kept(replace(HYBRID, act="gelu_tanh"), tmp_path)
    there = convert(path, tmp_path / "theirs.npz", to="npz")
    there.with_suffix(".json").unlink()
    loaded = load(there, model=HYBRID, img_size=64, channels=3, classes=2)
    assert peers.shown(loaded.config) == replace(HYBRID, img_size=(64, 64), channels=3, classes=2)
    assert not loaded(noise(loaded.config)).any()  # a new head
    same = load(there, model=HYBRID, classes=2)
    assert torch.equal(same.embed(noise(HYBRID)), ours.embed(noise(HYBRID)))


# The authors' files


def test_scales_of_the_authors_hybrids_have_four_dimensions(tmp_path):
    path, ours = kept(HYBRID, tmp_path)
    there = convert(path, tmp_path / "theirs.npz", to="npz")
    arrays = dict(np.load(there))
    assert arrays["block1/unit2/gn3/scale"].shape == (1, 1, 1, 32)
    assert arrays["block2/unit1/conv_proj/kernel"].shape == (1, 1, 32, 64)
    flat = {name: value.reshape(-1) if value.shape[:3] == (1, 1, 1) else value for name, value in arrays.items()}
    np.savez(tmp_path / "newer.npz", **flat)
    assert identical(load(tmp_path / "newer.npz", model=HYBRID).state_dict(), ours.state_dict())


# Which model it is


def of_shapes(build: Callable[[], nn.Module]) -> ModelConfig:
    """The architecture that the tensors of a model show by themselves."""
    with torch.device("meta"):
        state = build().state_dict()
    weights = recognise.recognise(from_state_dict(state, "x"), "x")
    found: ModelConfig = recognise.architecture(weights, recognise.read_sidecar(weights, None), None)
    return found


@pytest.mark.parametrize("name", [*models.bit.CONFIGS, *models.hybrid.CONFIGS])
def test_every_listed_model_is_known_by_its_shapes(name):
    assert of_shapes(lambda: models.create(name)) == models.CONFIGS[name]


@pytest.mark.parametrize(
    "name", ["resnetv2_101x1_bit", "vit_base_r50_s16_384", "vit_small_r26_s32_224", "vit_tiny_r_s16_p8_224"]
)
def test_timms_own_models_are_known_by_their_shapes(name):
    assert of_shapes(lambda: peers.timm().create_model(name)) == models.canonical(name)[1]


# What is refused


@pytest.mark.parametrize(
    ("config", "to", "message"),
    [
        (replace(BIT, shrink=False), "timm", "a stem without downsampling"),
        (replace(BIT, shrink=False), "npz", "a stem without downsampling"),
        (replace(BIT, widths=(48, 64, 128)), "hf", "a stage of width 48, not a multiple of 32"),
        (replace(HYBRID, first=32), "timm", "a first stage as wide as its stem"),
        (STEM, "hf", "a ResNet without stages"),
    ],
    ids=str,
)
def test_what_others_have_no_place_for_is_refused(tmp_path, config, to, message):
    path, _ = kept(config, tmp_path)
    with pytest.raises(UserError, match=f"The model has {message}, which {to} does not support"):
        convert(path, tmp_path / NAMES[to], to=to)


def test_groups_that_nothing_shows_must_be_told():
    state = randomise(models.build(BIT)).state_dict()
    with pytest.raises(UserError, match=r"the usual 32 do not divide .* \(32, 64, 128\).*give `model`"):
        load(state)
    with pytest.raises(UserError, match=r"has widths \(32, 64, 128\), but `model` has \(256, 512, 1024, 2048\)"):
        load(state, model="bit_r50x1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_type": "bottleneck"}, "Its layer_type is 'bottleneck', but vitrail's models have 'preactivation'"),
        ({"global_padding": "SAME"}, "Its global_padding is 'SAME', but vitrail's models have None"),
        ({"output_stride": 8}, "Its output_stride is 8, but vitrail's models have no dilation"),
    ],
)
def test_bits_of_hugging_faces_that_compute_otherwise_are_refused(tmp_path, change, message):
    path, _ = kept(BIT, tmp_path)
    there = convert(path, tmp_path / "theirs", to="hf")
    there.with_suffix(".json").unlink()
    about = there.with_name("config.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | change))
    with pytest.raises(UserError, match=message):
        load(tmp_path / "theirs")


def test_a_hidden_layer_before_the_head_is_left_out_if_asked(tmp_path):
    """`R50+ViT-B_16.npz` of ImageNet-21k has one."""
    path, ours = kept(replace(HYBRID, act="gelu_tanh"), tmp_path)
    arrays = dict(np.load(convert(path, tmp_path / "theirs.npz", to="npz")))
    arrays |= {"pre_logits/kernel": np.zeros((32, 32), np.float32), "pre_logits/bias": np.zeros(32, np.float32)}
    np.savez(tmp_path / "deep.npz", **arrays)
    with pytest.raises(UserError, match=r"unexpected  pre_logits.weight \(32, 32\)"):
        load(tmp_path / "deep.npz", model=HYBRID, classes=3)
    body = load(tmp_path / "deep.npz", model=HYBRID, classes=3, partial=True)
    assert torch.equal(body.embed(noise(HYBRID)), ours.embed(noise(HYBRID)))
