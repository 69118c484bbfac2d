"""Weights of PVT and PVT v2 come from timm, transformers and their authors, and go to timm and transformers."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

import peers
import pytest
import torch
import torch.nn.functional as F
from peers import TOLERANCE, distance, identical, images, randomise, set_authors_epsilon
from safetensors.torch import load_file

from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models.pvt import PVTConfig
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, recognise, save, start_from
from vitrail.weights.formats import hf, pvt, pvt_v2
from vitrail.weights.sidecar import Sidecar
from vitrail.weights.tensors import Tensors

PVT = PVTConfig((32, 64, 96), (1, 2, 1), (1, 2, 3), (4, 2, 2), (4, 2, 1), 4, (32, 32), channels=1, classes=5)
PVT_V2 = PVTv2Config(
    (32, 64, 96), (1, 2, 1), (1, 2, 3), (4, 2, 2), (4, 2, 1), False, 4, (48, 40), channels=1, classes=5
)
LINEAR = replace(PVT_V2, linear=True)
ALL = pytest.mark.parametrize("config", [PVT, PVT_V2, LINEAR], ids=["v1", "v2", "linear"])
V2 = pytest.mark.parametrize("config", [PVT_V2, LINEAR], ids=["v2", "linear"])
MODULES = {PVTConfig: pvt, PVTv2Config: pvt_v2}
NAMES = [name for name, config in models.CONFIGS.items() if type(config) in MODULES]


def hugging_face(config):
    """transformers' model of the same shape with random weights."""
    v1 = isinstance(config, PVTConfig)
    strides = [config.patch, *[2] * (len(config.widths) - 1)]
    shape = {
        "image_size": config.img_size[0] if v1 else list(config.img_size),
        "num_channels": config.channels,
        "num_labels": config.classes,
        "num_encoder_blocks": len(config.widths),
        "depths": list(config.depths),
        "hidden_sizes": list(config.widths),
        "num_attention_heads": list(config.heads),
        "mlp_ratios": list(config.ratios),
        "strides": strides,
        "patch_sizes": strides if v1 else [2 * stride - 1 for stride in strides],
        "sequence_reduction_ratios" if v1 else "sr_ratios": list(config.reductions),
    }
    module = peers.transformers()
    if v1:
        return randomise(module.PvtForImageClassification(module.PvtConfig(**shape)))
    return randomise(module.PvtV2ForImageClassification(module.PvtV2Config(**shape, linear_attention=config.linear)))


def timm(config):
    """timm's PVT v2 of the same shape with random weights."""
    theirs = peers.timm("timm.models.pvt_v2").PyramidVisionTransformerV2(
        in_chans=config.channels,
        num_classes=config.classes,
        depths=config.depths,
        embed_dims=config.widths,
        num_heads=config.heads,
        sr_ratios=config.reductions,
        mlp_ratios=config.ratios,
        linear=config.linear,
    )
    return randomise(theirs)


def keep(config, folder):
    """A random model of ours as a file with its card."""
    model = randomise(models.build(config))
    card = Card(model="pvt", config=config, task=Multiclass(tuple("abcde")), preprocess=Preprocess(config.img_size, 1))
    save(folder / "own.safetensors", model, card)
    return model, folder / "own.safetensors"


# Theirs


@ALL
@torch.no_grad()
def test_transformers_weights_are_read_from_their_folder_and_come_back_as_they_were(tmp_path, config):
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert ours.config == replace(config, eps=1e-6)  # which config.json says
    x = images(config)
    assert distance(ours(x), theirs(x).logits) < TOLERANCE
    back = convert(tmp_path / "theirs", tmp_path / "back", to="hf")
    assert identical(load_file(back), theirs.state_dict())


@V2
@torch.no_grad()
def test_timms_weights_are_read_and_come_back_as_they_were(tmp_path, config):
    theirs = timm(config)
    ours = load(theirs.state_dict(), model=config)
    x = images(config)
    assert distance(ours(x), theirs(x)) < TOLERANCE
    own = convert(theirs.state_dict(), tmp_path / "own.safetensors", model=config)
    assert identical(load_file(convert(own, tmp_path / "timm.safetensors", to="timm")), theirs.state_dict())


@V2
@torch.no_grad()
@pytest.mark.parametrize("size", [(96, 96), (64, 32)], ids=["larger", "rectangle"])
def test_other_sizes_need_no_change(tmp_path, config, size):
    for theirs in (timm(config), hugging_face(config)):
        if hasattr(theirs, "save_pretrained"):
            theirs.save_pretrained(tmp_path)
        source = tmp_path if hasattr(theirs, "save_pretrained") else theirs.state_dict()
        ours = load(source, config, img_size=size)
        answer = theirs(images(ours.config))
        assert distance(ours(images(ours.config)), getattr(answer, "logits", answer)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("side", [64, 48])
@pytest.mark.parametrize("source", ["hf", "authors"])
def test_other_sizes_of_v1_are_those_of_its_authors(tmp_path, source, side):
    """Positions are resampled bilinearly, without antialiasing; the class token keeps its own.

    transformers has the same code, but cannot run it at another size: a model of that size has the positions here.
    """
    theirs, other = hugging_face(PVT), hugging_face(replace(PVT, img_size=(side, side)))
    if source == "authors":
        set_authors_epsilon(theirs)
        set_authors_epsilon(other)
    state = theirs.state_dict()
    for name, rows in state.items():
        if name.endswith("position_embeddings"):
            prefix = rows.shape[1] % 2  # the class token, in the last stage
            old, new = (isqrt(count - prefix) for count in (rows.shape[1], other.get_parameter(name).shape[1]))
            picture = rows[:, prefix:].mT.unflatten(2, (old, old))
            grown = F.interpolate(picture, (new, new), mode="bilinear").flatten(2).mT
            state[name] = torch.cat([rows[:, :prefix], grown], dim=1)
    other.load_state_dict(state)
    theirs.save_pretrained(tmp_path)
    weights = tmp_path if source == "hf" else peers.pvt_by_authors(theirs.state_dict())
    ours = load(weights, PVT, img_size=side)
    assert distance(ours(images(ours.config)), other(images(ours.config)).logits) < TOLERANCE


def in_the_authors_names(state, stages):
    """timm's PVT v2 as its authors name it: they have stages side by side, counted from 1."""
    renamed = {}
    for name, value in state.items():
        name = name.replace("mlp.dwconv", "mlp.dwconv.dwconv").replace("patch_embed.", "patch_embed1.")
        for i in range(stages):
            name = name.replace(f"stages.{i}.downsample", f"patch_embed{i + 1}")
            name = name.replace(f"stages.{i}.blocks", f"block{i + 1}").replace(f"stages.{i}.norm", f"norm{i + 1}")
        renamed[name] = value
    return renamed


@V2
@torch.no_grad()
def test_files_of_pvt_v2s_authors_are_read(tmp_path, config):
    theirs = timm(config)
    original = in_the_authors_names(theirs.state_dict(), len(config.widths))
    # timm reads files of the authors, too.
    assert identical(peers.timm("timm.models.pvt_v2").checkpoint_filter_fn(original, theirs), theirs.state_dict())
    torch.save({"model": original}, tmp_path / "pvt_v2.pth")
    ours = load(tmp_path / "pvt_v2.pth", model=config)
    assert ours.config == config
    x = images(config)
    assert distance(ours(x), theirs(x)) < TOLERANCE


@torch.no_grad()
def test_files_of_pvts_authors_are_read(tmp_path):
    theirs = hugging_face(PVT)
    torch.save(peers.pvt_by_authors(theirs.state_dict()), tmp_path / "pvt.pth")
    ours = load(tmp_path / "pvt.pth", model=PVT)
    assert ours.config == PVT
    set_authors_epsilon(theirs)
    x = images(PVT)
    assert distance(ours(x), theirs(x).logits) < TOLERANCE


@ALL
@torch.no_grad()
def test_tensors_of_transformers_alone_are_taken_for_the_authors(config):
    theirs = hugging_face(config)
    ours = load(theirs.state_dict(), model=config)
    assert ours.config == config
    set_authors_epsilon(theirs)
    x = images(config)
    assert distance(ours(x), theirs(x).logits) < TOLERANCE


@ALL
@torch.no_grad()
def test_bodies_without_a_head_and_with_a_prefix_get_what_is_asked_for(config):
    theirs = hugging_face(config)
    body = {f"module.{name}": value for name, value in theirs.base_model.state_dict().items()}
    ours = load(body, model=config, classes=3)
    assert ours.config == replace(config, classes=3)
    whole = load(theirs.state_dict(), model=config)
    x = images(config)
    assert torch.equal(ours.embed(x), whole.embed(x))
    other = load(theirs.state_dict(), model=config, img_size=64, channels=3)
    assert other(images(other.config)).shape == (2, 5)


# Ours


@ALL
@torch.no_grad()
def test_transformers_reads_what_is_written_for_it(tmp_path, config):
    ours, path = keep(config, tmp_path)
    convert(path, tmp_path / "theirs", to="hf")
    classes = peers.transformers().AutoModelForImageClassification
    theirs, report = classes.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values())
    assert theirs.config.id2label == dict(enumerate("abcde"))
    x = images(config)
    assert distance(theirs(x).logits, ours(x)) < 10 * TOLERANCE  # it has one epsilon for all norms
    set_authors_epsilon(theirs)
    assert distance(theirs(x).logits, ours(x)) < TOLERANCE


@V2
@torch.no_grad()
def test_timm_takes_what_is_written_for_it(tmp_path, config):
    ours, path = keep(config, tmp_path)
    theirs = timm(config)
    theirs.load_state_dict(load_file(convert(path, tmp_path / "timm.safetensors", to="timm")), strict=True)
    x = images(config)
    assert distance(theirs(x), ours(x)) < TOLERANCE


@pytest.mark.parametrize(
    ("config", "to", "message"),
    [
        (replace(PVT, img_size=(32, 64)), "hf", "images that are not square, which hf does not support"),
        (replace(PVT, patch=2), "hf", "a first patch size of 2, which hf does not support"),
        (replace(PVT_V2, patch=2), "timm", "a first patch size of 2, which timm does not support"),
        (PVT, "timm", "timm"),
        (PVT_V2, "npz", "npz"),
    ],
)
def test_what_a_format_has_no_place_for_is_refused(tmp_path, config, to, message):
    _, path = keep(config, tmp_path)
    suffix = {"hf": "", "timm": ".safetensors", "npz": ".npz"}[to]
    with pytest.raises(UserError, match=message):
        convert(path, tmp_path / f"theirs{suffix}", to=to)


# Architectures


def on_meta(build, *arguments):
    with torch.device("meta"):
        return build(*arguments).state_dict()


def shapes(state):
    return {name: tuple(value.shape) for name, value in state.items()}


def hugging_faces(config):
    """What transformers builds from the `config.json` that is written for it."""
    about = MODULES[type(config)].hf_config(config)
    names = tuple(map(str, range(config.classes)))
    document = hf.sidecar_files(about, names, Preprocess(config.img_size, config.channels))["config.json"]
    model = peers.transformers().AutoModelForImageClassification
    return on_meta(model.from_config, peers.transformers().AutoConfig.for_model(**document))


@pytest.mark.parametrize("name", NAMES)
def test_every_named_model_is_known_by_its_shapes_and_is_the_peers(name):
    config = models.configure(name)
    state = on_meta(models.build, config)
    assert seen(state) == config
    for format, layout in MODULES[type(config)].FORMATS.items():
        if layout.write is not None and layout.unsupported(config) is None:
            theirs = layout.write(state, config)
            assert seen(theirs) == config
            peer = hugging_faces(config) if format == "hf" else on_meta(peers.timm().create_model, name)
            assert shapes(theirs) == shapes(peer)


def seen(state):
    """The architecture that is seen in tensors without their values."""
    weights = recognise.recognise(Tensors(state, state.__getitem__), "It")
    return recognise.architecture(weights, Sidecar(), None)


def test_what_no_tensor_shows_must_be_told():
    model = models.build(PVT)
    own = model.state_dict()
    with pytest.raises(
        UserError, match=r"PVT of widths \(32, 64, 96\), whose tensors do not show the number of heads.* give `model`"
    ):
        load(own)
    assert start_from(own, model, Multiclass(tuple("01234")))  # the model to train tells them
    wide = models.build(replace(PVT, img_size=(32, 64))).state_dict()
    with pytest.raises(UserError, match="128 positions in its first stage, which fit no square image"):
        load(wide, model=PVT)
    assert load(wide, model=replace(PVT, img_size=(64, 32))).config.img_size == (64, 32)


@pytest.mark.parametrize(
    ("config", "model", "changes", "message"),
    [
        (PVT, PVT_V2, {}, "is a PVT, but `model` is"),
        (PVT, replace(PVT, depths=(1, 1, 1)), {}, r"has depths \(1, 2, 1\), but `model` has \(1, 1, 1\)"),
        (PVT, "pvt_ti", {}, r"has widths \(32, 64, 96\), but `model` has \(64, 128, 320, 512\)"),
        (LINEAR, "pvt_v2_b2_li", {}, r"has widths \(32, 64, 96\), but `model` has \(64, 128, 320, 512\)"),
        (PVT_V2, LINEAR, {}, "has linear False, but `model` has True"),
        (PVT, PVT, {"block1.0.mlp.fc1.weight": (100, 32)}, "has an MLP of 100 for a width of 32"),
        (PVT, PVT, {"patch_embed1.proj.weight": (32, 1, 4, 2)}, "patches of 4x2 pixels"),
        (PVT, PVT, {"block2.0.mlp.fc1.weight": None}, "is not a complete PVT: block2.0.mlp.fc1.weight is missing"),
        (PVT_V2, PVT_V2, {"patch_embed.proj.weight": (32, 1, 6, 6)}, "6x6 filters in its stem"),
        (PVT_V2, PVT_V2, {"layers.1.blocks.1.norm1.bias": None}, "missing     layers.1.blocks.1.norm1.bias"),
    ],
)
def test_what_does_not_fit_is_refused(config, model, changes, message):
    state = models.build(config).state_dict()
    for name, shape in changes.items():
        old = state.pop(name)
        if shape is not None:
            state[name] = old.new_zeros(shape)
    with pytest.raises(UserError, match=message):
        load(state, model=model)


def test_a_part_is_taken_if_asked_for():
    state = models.build(LINEAR).state_dict()
    del state["layers.1.blocks.1.norm1.bias"]
    assert load(state, model=LINEAR, partial=True).config == LINEAR
