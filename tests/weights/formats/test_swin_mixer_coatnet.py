"""Weights of the ViT's relatives come from their peers and go to them, and give the same numbers on both sides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import peers
import pytest
import torch
from families import BACKBONES
from peers import TOLERANCE, distance, identical, randomise
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.swin import SwinConfig
from vitrail.models.swin_v2 import SwinV2Config
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, open_card, open_run, recognise, save, start_from
from vitrail.weights.tensors import from_state_dict

SWIN = SwinConfig((32, 64), (2, 2), (2, 4), 4, 2, (32, 48), channels=1, classes=5)
SWIN_V2 = SwinV2Config((32, 64), (2, 2), (2, 4), 4, (3, 2), 2, (32, 48), channels=1, classes=5)
MIXER = MixerConfig(32, 2, 16, 128, 8, (32, 48), channels=1, classes=5)
COATNET = CoAtNetConfig((32, 64, 96), (1, 2, 1), 16, 1, True, (32, 48), channels=1, classes=5)
NAMES = tuple(f"class {i}" for i in range(5))


def timm_peer(config: models.ModelConfig) -> nn.Module:
    """timm's model of the same shape with random weights and averages."""
    common: dict[str, Any] = {"img_size": config.img_size, "in_chans": config.channels, "num_classes": config.classes}
    theirs: nn.Module
    if isinstance(config, SwinConfig):
        shape = {"patch_size": config.patch, "embed_dim": config.widths[0], "window_size": config.window}
        lists = {"depths": config.depths, "num_heads": config.heads}
        theirs = peers.timm("timm.models.swin_transformer").SwinTransformer(**common, **shape, **lists)
    elif isinstance(config, SwinV2Config):
        shape = {"patch_size": config.patch, "embed_dim": config.widths[0], "window_size": config.window}
        lists = {"depths": config.depths, "num_heads": config.heads, "pretrained_window_sizes": config.pretrained}
        theirs = peers.timm("timm.models.swin_transformer_v2").SwinTransformerV2(**common, **shape, **lists)
    elif isinstance(config, MixerConfig):
        shape = {"patch_size": config.patch, "embed_dim": config.width, "num_blocks": config.depth}
        theirs = peers.timm("timm.models.mlp_mixer").MlpMixer(**common, **shape)
    elif isinstance(config, CoAtNetConfig):
        module = peers.timm("timm.models.maxxvit")
        kinds = tuple("C" if i < config.convs else "T" for i in range(len(config.widths)))
        shape = {"embed_dim": config.widths, "depths": config.depths, "block_type": kinds, "stem_width": config.first}
        theirs = module.MaxxVit(module.MaxxVitCfg(**shape, head_hidden_size=config.width), **common)
    else:
        raise AssertionError(config)
    theirs = randomise(theirs)
    with torch.no_grad():
        theirs.train()(images(config))  # for running averages
    return theirs.eval()


def images(config: models.ModelConfig) -> Tensor:
    return torch.randn(2, config.channels, *config.img_size, generator=torch.Generator().manual_seed(1))


def keep(model, path):
    """Our model as a file with its card."""
    config = model.config
    seen = Preprocess(config.img_size, config.channels, 0.9, (0.4,), (0.2,))
    save(path, model, Card(model=models.name_of(config), config=config, task=Multiclass(NAMES), preprocess=seen))
    return path


OURS = pytest.mark.parametrize("config", [SWIN, SWIN_V2, MIXER, COATNET], ids=["swin", "swin_v2", "mixer", "coatnet"])

# timm


@torch.no_grad()
@OURS
def test_timms_weights_give_its_logits(config):
    theirs = timm_peer(config)
    model = load(theirs.state_dict(), model=config)
    assert model.config == config
    assert distance(model(images(config)), theirs(images(config))) < TOLERANCE


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm's interpolation
@pytest.mark.parametrize("size", [(96, 96), (32, 64)], ids=["larger", "rectangle"])
@pytest.mark.parametrize("config", [replace(SWIN, img_size=(64, 64)), replace(COATNET, img_size=(64, 64))])
def test_timm_agrees_at_other_sizes(config, size):
    """Swin's maps are padded to whole windows; CoAtNet's biases are resampled."""
    theirs, other = timm_peer(config), timm_peer(replace(config, img_size=size))
    read = peers.timm("timm.models.maxxvit").checkpoint_filter_fn if isinstance(config, CoAtNetConfig) else None
    state = theirs.state_dict() if read is None else read(theirs.state_dict(), other)
    other.load_state_dict({name: value for name, value in state.items() if "attn_mask" not in name}, strict=False)
    for source in (dict, microsofts) if isinstance(config, SwinConfig) else (dict,):
        model = load(source(theirs.state_dict()), model=config, img_size=size)
        assert distance(model(images(model.config)), other(images(model.config))) < TOLERANCE


@torch.no_grad()
@OURS
def test_timm_takes_ours_and_gives_them_back(tmp_path, config):
    model = randomise(models.build(config))
    path = convert(keep(model, tmp_path / "own.safetensors"), tmp_path / "timm.safetensors", to="timm")
    theirs = timm_peer(config)
    theirs.load_state_dict(load_file(path), strict=True)
    assert distance(theirs(images(config)), model(images(config))) < TOLERANCE
    again, card = open_run(path)
    assert card.classes == NAMES
    path.with_suffix(".json").unlink()
    for back in (again, load(path, model=config)):
        assert back.config == config
        floats = {name: value for name, value in back.state_dict().items() if value.is_floating_point()}
        assert identical(floats, {name: model.state_dict()[name] for name in floats})


TIMM = [
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window12_384",
    "mixer_b16_224",
    "mixer_s32_224",
    "coatnet_0_224",
    "coatnet_3_224",
]


@pytest.mark.parametrize("name", TIMM)
def test_timms_models_are_known_by_their_shapes_as_by_their_names(name):
    with torch.device("meta"):
        theirs = peers.timm().create_model(name).state_dict()
    weights = recognise.recognise(from_state_dict(theirs, "it"), "it")
    config = recognise.architecture(weights, recognise.Sidecar(), None)
    assert config == models.canonical(name)[1]
    with torch.device("meta"):
        ours = models.build(config).state_dict()
    assert {n: v.shape for n, v in weights.shapes(config).items()} == {n: v.shape for n, v in ours.items()}


def test_the_windows_of_a_swin_v2_are_as_something_tells_them(tmp_path):
    state = models.build(replace(SWIN_V2, img_size=(32, 32))).state_dict()
    with pytest.raises(UserError, match="does not show the size of its windows"):
        load(state)
    save_file(state, tmp_path / "model.safetensors")
    about = {"architecture": "swinv2_base_window12to24_192to384", "pretrained_cfg": {"input_size": [1, 32, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(about | {"model_args": {"pretrained_window_sizes": [12, 6]}}))
    config = open_card(tmp_path).config
    assert (config.window, config.pretrained) == (24, (12, 6))
    model = models.build(replace(SWIN_V2, window=2, img_size=(32, 32)))
    start_from(state, model, Multiclass(NAMES))  # into a model with other windows
    assert identical(model.state_dict(), state)


def test_timms_own_coatnets_are_other_networks():
    with torch.device("meta"):
        theirs = peers.timm().create_model("coatnet_nano_rw_224").state_dict()
    with pytest.raises(UserError, match=r"a stem of 32 and 64 channels: it is one of timm's coatnet_\*_rw_\*"):
        load(theirs)


# Hugging Face


def hf_swin(config: SwinConfig | SwinV2Config) -> Any:
    v2 = isinstance(config, SwinV2Config)
    more = {"pretrained_window_sizes": list(config.pretrained)} if isinstance(config, SwinV2Config) else {}
    about = getattr(peers.transformers(), "Swinv2Config" if v2 else "SwinConfig")(
        image_size=config.img_size,
        patch_size=config.patch,
        num_channels=config.channels,
        embed_dim=config.widths[0],
        depths=list(config.depths),
        num_heads=list(config.heads),
        window_size=config.window,
        num_labels=config.classes,
        **more,
    )
    return randomise(hf_kind(config)(about))


def hf_kind(config: SwinConfig | SwinV2Config) -> Any:
    v2 = isinstance(config, SwinV2Config)
    return getattr(peers.transformers(), "Swinv2ForImageClassification" if v2 else "SwinForImageClassification")


SWINS = pytest.mark.parametrize("config", [SWIN, SWIN_V2], ids=["swin", "swin_v2"])


@torch.no_grad()
@SWINS
def test_hugging_faces_swin_gives_its_logits(tmp_path, config):
    theirs = hf_swin(config)
    theirs.save_pretrained(tmp_path)
    for source, told in ((tmp_path, None), (theirs.state_dict(), config)):  # names of its files, and of its modules
        model = load(source, model=told)
        assert model.config == config
        assert distance(model(images(config)), theirs(images(config)).logits) < TOLERANCE
    for size in ((64, 64), (32, 80)):  # of whole windows
        model = load(tmp_path, img_size=size)
        assert distance(model(images(model.config)), theirs(images(model.config)).logits) < TOLERANCE


@torch.no_grad()
@SWINS
def test_hugging_face_takes_our_swin(tmp_path, config):
    model = randomise(models.build(config))
    convert(keep(model, tmp_path / "own.safetensors"), tmp_path / "hf", to="hf")
    kind = hf_kind(config)
    theirs, info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert distance(theirs.eval()(images(config)).logits, model(images(config))) < TOLERANCE
    assert theirs.config.id2label == dict(enumerate(NAMES))
    (tmp_path / "hf" / "model.json").unlink()
    again, card = open_run(tmp_path / "hf")
    assert (again.config, card.classes, card.preprocess.mean) == (config, NAMES, (0.4,))
    assert identical(again.state_dict(), model.state_dict())


# The files of the authors


def microsofts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """timm's Swin as Microsoft's files have it: merges at the end of a stage, and the buffers of the modules."""
    theirs = {}
    for name, value in state.items():
        name = re.sub(r"layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        theirs[name.replace("head.fc.", "head.")] = value
    index = torch.zeros(16, 16, dtype=torch.int64)
    return theirs | {
        "layers.0.blocks.0.attn.relative_position_index": index,
        "layers.0.blocks.1.attn_mask": torch.zeros(24, 16, 16),
    }


@torch.no_grad()
def test_microsofts_swin_gives_timms_logits(tmp_path):
    theirs = timm_peer(SWIN)
    files = microsofts(theirs.state_dict())
    known = peers.timm("timm.models.swin_transformer").checkpoint_filter_fn({"model": files}, theirs)
    assert identical(known, theirs.state_dict())  # so they are what timm takes for Microsoft's
    torch.save({"model": files, "epoch": 299}, tmp_path / "swin.pth")
    model, card = open_run(tmp_path / "swin.pth", model=SWIN)
    assert model.config == SWIN
    assert distance(model(images(SWIN)), theirs(images(SWIN))) < TOLERANCE
    assert card.preprocess.crop == 0.875
    with pytest.raises(UserError, match="A swin can be written for vitrail, hf or timm, but not for npz"):
        convert(tmp_path / "swin.pth", tmp_path / "x.npz", to="npz", model=SWIN)


# All families are told apart


@pytest.mark.parametrize("name", [name for name in recognise.MODULES if name in BACKBONES])
def test_every_family_is_known_in_every_format(name):
    config = models.configure("vit_ti16" if name == "vit" else f"{name}_nano")
    with torch.device("meta"):
        state = models.build(config).state_dict()
    own = recognise.recognise(from_state_dict(state, "it"), "it")
    assert (own.family, own.shapes().keys()) == (name, state.keys())
    for format, layout in recognise.formats_of(name).items():
        if layout.write is not None:
            theirs = {f"module.model.{key}": value for key, value in layout.write(state, config).items()}
            found = recognise.recognise(from_state_dict(theirs, "it"), "it")
            assert (found.family, found.format) == (name, format)
            shapes = found.shapes(config if name == "vit" else None)
            assert {n: v.shape for n, v in shapes.items()} == {n: v.shape for n, v in state.items()}


@OURS
def test_our_own_tensors_need_no_card(config):
    small = models.build(models.configure(f"{models.family(config)}_nano", classes=3))
    again = load(small.state_dict(), model=small.config)
    assert again.config == small.config


def test_whether_a_coatnets_stem_shrinks_is_as_something_tells_it(tmp_path):
    small = models.create("coatnet_nano", classes=3)
    assert load(small.state_dict()).config == small.config  # a listed model
    model = models.build(replace(COATNET, shrink=False, img_size=(16, 16)))
    start_from(model.state_dict(), models.build(model.config), Multiclass(NAMES))  # the model to train
    path = keep(model, tmp_path / "own.safetensors")
    with pytest.raises(UserError, match="reshaped    shrink: False, not True"):
        start_from(path, models.build(replace(COATNET, img_size=(32, 32))), Multiclass(NAMES))


# Others than those that are asked for


@torch.no_grad()
@OURS
def test_classes_channels_and_size_are_adapted(config):
    theirs = timm_peer(config).state_dict()
    size = config.img_size if isinstance(config, MixerConfig) else (48, 64)
    model = load(theirs, model=config, classes=3, channels=3, img_size=size)
    assert model.config == replace(config, classes=3, channels=3, img_size=size)
    grey = torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(1))
    plain = models.resize(load(theirs, model=config), size)
    assert distance(model.embed(grey.expand(-1, 3, -1, -1)), plain.embed(grey)) < 1e-4


@OURS
def test_weights_without_a_head_begin_a_training(config):
    config = replace(config, img_size=(32, 32))
    theirs = timm_peer(config).state_dict()
    body = {name: value for name, value in theirs.items() if not re.fullmatch(r"head(\.fc)?\.(weight|bias)", name)}
    headless = load(body, model=config)
    x = torch.randn(2, config.channels, 32, 32, generator=torch.Generator().manual_seed(1))
    assert distance(headless(x), load(theirs, model=config).embed(x)) < 1e-5
    with pytest.raises(UserError, match="has no classification head"):
        open_run(body, model=config)
    model = models.build(replace(config, classes=2))
    notes = start_from({"model": body}, model, Multiclass(("a", "b")))
    assert "new head for 2 classes" in notes
    first = next(name for name in theirs if name.startswith(("stem", "patch_embed")))
    assert torch.equal(model.state_dict()[first], theirs[first])


@OURS
def test_what_is_missing_is_named_and_left_out_if_asked(config):
    theirs = timm_peer(config).state_dict()
    lost = next(name for name in reversed(theirs) if name.endswith("norm2.weight"))
    del theirs[lost]
    name = lost.replace("stages.", "layers.")
    with pytest.raises(UserError, match=rf"does not match a \w+:\n  missing     {re.escape(name)}"):
        load(theirs, model=config)
    fresh = models.build(config).state_dict()[name]
    assert torch.equal(load(theirs, model=config, partial=True).state_dict()[name], fresh)


def test_the_image_size_and_preprocessing_are_as_usual_where_nothing_says_them(tmp_path):
    with torch.device("meta"):
        state = models.create("swin_b_w12").state_dict()
    weights = recognise.recognise(from_state_dict(state, "it"), "it")
    config = recognise.architecture(weights, recognise.Sidecar(), None)
    assert (config.img_size, config.window) == ((384, 384), 12)
    seen, note = recognise.preprocessing(weights, config, recognise.Sidecar())
    assert (seen.crop, seen.mean[0]) == (1.0, 0.485)
    assert (
        note
        == "mean 0.485, std 0.229, crop 1, bicubic resizing: assumed as usual for such weights, without a sidecar file"
    )
    save_file(models.build(MIXER).state_dict(), tmp_path / "model.safetensors")
    about = {"pretrained_cfg": {"input_size": [1, 32, 48], "mean": [0.1], "std": [0.3], "crop_pct": 0.7}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    card = open_card(tmp_path)
    assert (card.config, card.preprocess.mean, card.preprocess.crop) == (MIXER, (0.1,), 0.7)
