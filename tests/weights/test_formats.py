"""Weights of the peers' own classes give their numbers here, and ours give the same numbers there."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
from peers import distance, randomise
from safetensors.torch import load_file, save_file

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build, configure
from vitrail.models.vit import ViTConfig
from vitrail.weights import Card, foreign, load, open_card, open_run, save, start_from
from vitrail.weights.convert import convert
from vitrail.weights.tensors import from_memory

TOLERANCE = 1e-5
CONFIG = ViTConfig(width=32, depth=2, heads=4, mlp=128, patch=4, img_size=(24, 24), classes=5)


def images(config=CONFIG):
    return torch.randn(2, config.channels, *config.img_size, generator=torch.Generator().manual_seed(1))


def timm_vit(config=CONFIG, name="vision_transformer.VisionTransformer", **options):
    module, _, cls = name.partition(".")
    model = getattr(peers.timm(f"timm.models.{module}"), cls)(
        img_size=config.img_size,
        patch_size=config.patch,
        in_chans=config.channels,
        num_classes=config.classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp / config.width,
        **options,
    )
    return randomise(model)


def hf_vit(name, config=CONFIG, **options):
    transformers = peers.transformers()
    kind = name.removesuffix("ForImageClassification").removesuffix("WithTeacher").removesuffix("Model")
    kind = kind.removesuffix("ForImageClassification")
    settings = {"intermediate_size": config.mlp} if kind in ("ViT", "DeiT", "ViTMAE") else {"mlp_ratio": 4}
    about = getattr(transformers, f"{kind}Config")(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        image_size=config.img_size[0] if config.img_size[0] == config.img_size[1] else config.img_size,
        patch_size=config.patch,
        num_channels=config.channels,
        num_labels=config.classes,
        layer_norm_eps=1e-6,
        **settings,
        **options,
    )
    return randomise(getattr(transformers, name)(about))


def ours(config=CONFIG):
    return randomise(build(config))


def keep(model, path, config=CONFIG):
    """Our model as a file with its card."""
    names = tuple(f"class {i}" for i in range(config.classes))
    seen = Preprocess(config.img_size, config.channels, 0.9, (0.4,), (0.2,))
    save(path, model, Card(model="vit_w32", config=config, classes=names, preprocess=seen))
    return path


def same(model, other):
    old, new = model.state_dict(), other.state_dict()
    return old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


# timm, and those with its names


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"init_values": 0.1}, {"layer_scale": 1e-5}),
        ({"reg_tokens": 4, "init_values": 0.1, "no_embed_class": True}, {"registers": 4, "layer_scale": 1e-5}),
        ({"reg_tokens": 3}, {"registers": 3}),
        ({"no_embed_class": True}, {}),
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, {"pool": "gap"}),
        ({"class_token": False, "global_pool": "map"}, {"pool": "map"}),
        ({"global_pool": "avg"}, {"pool": "gap_norm", "registers": 1}),
        ({"global_pool": "avg", "reg_tokens": 2}, {"pool": "gap_norm", "registers": 3}),
        ({"global_pool": "avg", "class_token": False}, {"pool": "gap_norm"}),
    ],
    ids=[
        "plain",
        "LayerScale",
        "DINOv2 with registers",
        "registers",
        "DeiT III",
        "gap",
        "map",
        "MAE",
        "MAE, registers",
        "MAE, no class",
    ],
)
def test_timm(options, changes):
    theirs = timm_vit(**options)
    model = load(theirs.state_dict(), model=CONFIG)
    assert model.config == replace(CONFIG, **changes)
    x = images()
    assert distance(model.embed(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True)) < TOLERANCE
    assert distance(model(x), theirs(x)) < TOLERANCE


@torch.no_grad()
def test_a_distilled_deit_gives_its_features_and_asks_for_a_head():
    theirs = timm_vit(name="deit.VisionTransformerDistilled")
    with pytest.raises(UserError, match=r"unexpected  head_dist\.weight \(5, 32\)(.|\n)*two vectors.*classes=N"):
        load(theirs.state_dict(), model=CONFIG)
    model = load(theirs.state_dict(), model=CONFIG, classes=3)
    assert distance(model.embed(images()), theirs.forward_features(images())[:, 0]) < TOLERANCE
    assert not model.head.weight.any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("wrap", "extra"),
    [
        (lambda state: {"model": state, "epoch": 3}, {}),
        (lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}}, {}),
        (lambda state: {"model": {"x": torch.zeros(1)}, "model_ema": state}, {}),
        (lambda state: {"state_dict": {}, "state_dict_ema": state}, {}),
        (lambda state: {"teacher": {f"module.backbone.{n}": v for n, v in state.items()}}, {}),
        (lambda state: {"model": state}, {"mask_token": torch.zeros(1, 1, 32), "decoder_embed.weight": torch.zeros(2)}),
    ],
    ids=["model", "module", "model_ema", "state_dict_ema", "teacher", "MAE"],
)
def test_wrappings_are_opened(tmp_path, wrap, extra):
    theirs = timm_vit()
    torch.save(wrap(theirs.state_dict() | extra), tmp_path / "model.pth")
    model = load(tmp_path / "model.pth", CONFIG)
    assert distance(model(images()), theirs(images())) < TOLERANCE


@torch.no_grad()
def test_a_body_without_a_head_asks_for_one(tmp_path):
    theirs = timm_vit(init_values=0.1)
    theirs.reset_classifier(0)  # as DINOv2's files are
    heads = {"module.head.mlp.0.weight": torch.zeros(3, 3), "module.head.last_layer.weight_g": torch.zeros(3, 1)}
    body = {f"module.backbone.{name}": value for name, value in theirs.state_dict().items()}
    torch.save({"teacher": body | heads}, tmp_path / "dino.pth")
    with pytest.raises(UserError, match=r"has no head that tells classes apart\. Ask for a new one: classes=N"):
        load(tmp_path / "dino.pth", CONFIG)
    model, card = open_run(tmp_path / "dino.pth", model=CONFIG, classes=("cat", "dog"))
    assert distance(model.embed(images()), theirs(images())) < TOLERANCE
    assert card.classes == ("cat", "dog")
    assert card.preprocess.mean == (0.485, 0.456, 0.406)


def test_a_config_of_timm_says_heads_size_and_preprocessing(tmp_path):
    config = replace(CONFIG, heads=2, img_size=(16, 32))
    save_file(timm_vit(config).state_dict(), tmp_path / "model.safetensors")
    about = {"input_size": [3, 224, 224], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.95}
    document = {"pretrained_cfg": about, "model_args": {"num_heads": 2, "img_size": [16, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    card = open_card(tmp_path)
    assert card.config == config
    assert card.preprocess == Preprocess((16, 32), 3, 0.95, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


# Hugging Face


@torch.no_grad()
@pytest.mark.parametrize("saved", [True, False], ids=["file", "modules"])
@pytest.mark.parametrize(
    "name", ["ViTForImageClassification", "ViTModel", "Dinov2Model", "Dinov2WithRegistersModel", "ViTMAEModel"]
)
def test_hugging_face(tmp_path, name, saved):
    theirs = hf_vit(name, **({"mask_ratio": 0.0} if name == "ViTMAEModel" else {}))
    if saved:
        theirs.save_pretrained(tmp_path)
    source = tmp_path if saved else theirs.state_dict()
    classes = 5 if "Classification" in name else 7
    model = load(source, None if saved else CONFIG, classes=classes)
    answer = theirs(images())
    if "Classification" in name:
        assert distance(model(images()), answer.logits) < TOLERANCE
    else:
        assert distance(model.embed(images()), answer.last_hidden_state[:, 0]) < TOLERANCE
    if name == "ViTModel":
        assert distance(torch.tanh(model.pre_logits(model.embed(images()))), answer.pooler_output) < TOLERANCE


@torch.no_grad()
def test_a_dinov2_classifier_gives_its_features_and_asks_for_a_head():
    theirs = hf_vit("Dinov2ForImageClassification")
    with pytest.raises(UserError, match=r"unexpected  head_patches\.weight \(5, 32\)(.|\n)*classes=N"):
        load(theirs.state_dict(), CONFIG)
    model = load(theirs.state_dict(), CONFIG, classes=4)
    assert distance(model.embed(images()), theirs.dinov2(images()).last_hidden_state[:, 0]) < TOLERANCE


@torch.no_grad()
def test_hugging_faces_distilled_deit():
    theirs = hf_vit("DeiTForImageClassificationWithTeacher")
    model = load(theirs.state_dict(), CONFIG, classes=2)
    assert distance(model.embed(images()), theirs.deit(images()).last_hidden_state[:, 0]) < TOLERANCE


def test_hugging_faces_files_say_classes_and_preprocessing(tmp_path):
    labels = {i: f"thing {i}" for i in range(5)}
    hf_vit("ViTForImageClassification", id2label=labels).save_pretrained(tmp_path)
    processor = {"image_mean": [0.1] * 3, "image_std": [0.2] * 3, "do_center_crop": True, "crop_size": 24}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor | {"size": {"shortest_edge": 30}}))
    card = open_card(tmp_path)
    assert card.classes == tuple(labels.values())
    assert card.preprocess == Preprocess((24, 24), 3, 0.8, (0.1,) * 3, (0.2,) * 3)


@torch.no_grad()
def test_another_epsilon_is_said(tmp_path, caplog):
    theirs = hf_vit("ViTForImageClassification")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_eps": 1e-12}))
    with caplog.at_level("INFO", "vitrail"):
        assert distance(load(tmp_path)(images()), theirs(images()).logits) < TOLERANCE
    assert "LayerNorm's epsilon is 1e-06 in all models here, not 1e-12." in caplog.text


def test_gated_mlps_are_refused(tmp_path):
    hf_vit("Dinov2Model", use_swiglu_ffn=True).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="SwiGLU"):
        load(tmp_path)


# JAX and torchvision, laid out by hand


def jax_arrays(config):
    """Random arrays with the names and shapes of the authors' files."""
    d, h, p, m = config.width, config.heads, config.patch, config.mlp
    shapes = {
        "cls": (1, 1, d),
        "embedding/kernel": (p, p, 3, d),
        "embedding/bias": (d,),
        "Transformer/posembed_input/pos_embedding": (1, config.length, d),
        "Transformer/encoder_norm/scale": (d,),
        "Transformer/encoder_norm/bias": (d,),
        "pre_logits/kernel": (d, d),
        "pre_logits/bias": (d,),
        "head/kernel": (d, config.classes),
        "head/bias": (config.classes,),
    }
    for i in range(config.depth):
        block = f"Transformer/encoderblock_{i}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes |= {f"{block}/{norm}/scale": (d,), f"{block}/{norm}/bias": (d,)}
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            shapes |= {f"{attention}/{part}/kernel": (d, h, d // h), f"{attention}/{part}/bias": (h, d // h)}
        shapes |= {f"{attention}/out/kernel": (h, d // h, d), f"{attention}/out/bias": (d,)}
        shapes |= {f"{block}/MlpBlock_3/Dense_0/kernel": (d, m), f"{block}/MlpBlock_3/Dense_0/bias": (m,)}
        shapes |= {f"{block}/MlpBlock_3/Dense_1/kernel": (m, d), f"{block}/MlpBlock_3/Dense_1/bias": (d,)}
    generator = np.random.default_rng(0)
    return {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def jax_forward(arrays, x, depth):
    """The authors' model, written with their names: (logits, features) of images (B, C, H, W)."""
    a = {name: torch.from_numpy(value) for name, value in arrays.items()}

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], a[f"{name}/scale"], a[f"{name}/bias"], 1e-6)

    p = a["embedding/kernel"].shape[0]
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
    x = torch.einsum("bhwpqc,pqcd->bhwd", x, a["embedding/kernel"]).flatten(1, 2) + a["embedding/bias"]
    x = torch.cat([a["cls"].expand(b, -1, -1), x], 1) + a["Transformer/posembed_input/pos_embedding"]
    for i in range(depth):
        block = f"Transformer/encoderblock_{i}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        y = norm(x, f"{block}/LayerNorm_0")
        q, k, v = (
            torch.einsum("bnd,dhe->bnhe", y, a[f"{attention}/{part}/kernel"]) + a[f"{attention}/{part}/bias"]
            for part in ("query", "key", "value")
        )
        weights = (torch.einsum("bnhe,bmhe->bhnm", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        y = torch.einsum("bhnm,bmhe->bnhe", weights, v)
        x = x + torch.einsum("bnhe,hed->bnd", y, a[f"{attention}/out/kernel"]) + a[f"{attention}/out/bias"]
        y = norm(x, f"{block}/LayerNorm_2")
        y = torch.nn.functional.gelu(
            y @ a[f"{block}/MlpBlock_3/Dense_0/kernel"] + a[f"{block}/MlpBlock_3/Dense_0/bias"]
        )
        x = x + y @ a[f"{block}/MlpBlock_3/Dense_1/kernel"] + a[f"{block}/MlpBlock_3/Dense_1/bias"]
    features = norm(x, "Transformer/encoder_norm")[:, 0]
    hidden = features
    if "pre_logits/kernel" in a:
        hidden = torch.tanh(hidden @ a["pre_logits/kernel"] + a["pre_logits/bias"])
    return hidden @ a["head/kernel"] + a["head/bias"], features


@torch.no_grad()
@pytest.mark.parametrize("head", ["tanh", "linear"])
@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_jax(tmp_path, head, prefix):
    arrays = jax_arrays(CONFIG)
    if head == "linear":
        arrays = {name: value for name, value in arrays.items() if not name.startswith("pre_logits")}
    np.savez(tmp_path / "ViT.npz", **{prefix + name: value for name, value in arrays.items()})
    model, card = open_run(tmp_path / "ViT.npz")  # this format shows the heads
    assert model.config == replace(CONFIG, head=head)
    assert (card.preprocess.mean, card.preprocess.std) == ((0.5,), (0.5,))
    logits, features = jax_forward(arrays, images(), CONFIG.depth)
    assert distance(model.embed(images()), features) < TOLERANCE
    assert distance(model(images()), logits) < TOLERANCE


def test_big_vision_has_other_numbers_in_its_names(tmp_path):
    arrays = jax_arrays(CONFIG)
    table = {"MlpBlock_3": "MlpBlock_0", "LayerNorm_2": "LayerNorm_1", "Attention_1": "Attention_0"}
    renamed = {}
    for name, value in arrays.items():
        for old, new in table.items():
            name = name.replace(old, new)
        renamed["params/" + name.replace("Transformer/posembed_input/", "")] = value
    np.savez(tmp_path / "theirs.npz", **arrays)
    np.savez(tmp_path / "big.npz", **renamed)
    assert same(load(tmp_path / "theirs.npz"), load(tmp_path / "big.npz"))


TORCHVISION = {
    "norm1": "ln_1",
    "attn.qkv.weight": "self_attention.in_proj_weight",
    "attn.qkv.bias": "self_attention.in_proj_bias",
    "attn.proj": "self_attention.out_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj": "conv_proj",
    "head.": "heads.head.",
}


def torchvision_state(state):
    """timm's tensors, whose numbers are known to be right, under the names of torchvision."""
    renamed = {}
    for name, value in state.items():
        name = "encoder.ln." + name[5:] if name.startswith("norm.") else name
        for old, new in TORCHVISION.items():
            name = name.replace(old, new)
        renamed[name.replace("blocks.", "encoder.layers.encoder_layer_")] = value
    return renamed


@torch.no_grad()
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_torchvision(old):
    theirs = timm_vit()
    state = torchvision_state(theirs.state_dict())
    if old:
        state = {n.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): v for n, v in state.items()}
    assert distance(load(state, CONFIG)(images()), theirs(images())) < TOLERANCE


# There and back


@pytest.mark.parametrize("size", [(24, 24), (24, 16)], ids=["square", "rectangular"])
@pytest.mark.parametrize(
    ("to", "changes"),
    [
        ("vitrail", {"stem": "conv", "pos": "relative", "pool": "gap"}),
        ("timm", {}),
        ("timm", {"registers": 2, "layer_scale": 0.5}),
        ("timm", {"pool": "map", "registers": 1}),
        ("timm", {"pool": "gap_norm", "registers": 1}),
        ("hf", {}),
        ("hf", {"layer_scale": 0.5}),
        ("hf", {"registers": 3, "layer_scale": 0.5}),
        ("npz", {}),
        ("npz", {"head": "tanh"}),
        ("npz", {"pool": "gap", "channels": 1}),
        ("torchvision", {"head": "tanh"}),
    ],
)
def test_there_and_back_every_bit_is_kept(tmp_path, to, changes, size):
    config = replace(CONFIG, **changes, img_size=size)
    model = ours(config)
    path = keep(model, tmp_path / "own.safetensors", config)
    there = convert(path, tmp_path / ("there.npz" if to == "npz" else "there.safetensors"), to=to)
    back = convert(there, tmp_path / "back.safetensors")
    assert load_file(back).keys() == model.state_dict().keys()
    again, card = open_run(back)
    assert same(model, again)
    assert card == open_card(path)


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"registers": 4, "layer_scale": 0.5}, {"reg_tokens": 4, "init_values": 1.0}),
        ({"pool": "gap"}, {"class_token": False, "global_pool": "avg", "fc_norm": False}),
        ({"pool": "map"}, {"class_token": False, "global_pool": "map"}),
        ({"pool": "gap_norm", "registers": 1}, {"class_token": False, "global_pool": "avg", "reg_tokens": 1}),
    ],
)
def test_timm_loads_what_is_written_for_it(tmp_path, changes, options):
    config = replace(CONFIG, **changes)
    model = ours(config)
    path = convert(keep(model, tmp_path / "own.safetensors", config), tmp_path / "timm.safetensors", to="timm")
    theirs = timm_vit(**options)
    theirs.load_state_dict(load_file(path), strict=True)
    assert distance(theirs(images()), model(images())) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "ViT"),
        ({"layer_scale": 0.5}, "Dinov2"),
        ({"layer_scale": 0.5, "registers": 3}, "Dinov2WithRegisters"),
    ],
)
def test_transformers_load_what_is_written_for_them(tmp_path, changes, name):
    config = replace(CONFIG, **changes)
    model = ours(config)
    convert(keep(model, tmp_path / "own.safetensors", config), tmp_path / "there", to="hf")
    cls = getattr(peers.transformers(), f"{name}ForImageClassification")
    theirs, report = cls.from_pretrained(tmp_path / "there", output_loading_info=True)
    assert not any(report.values()), report
    assert distance(theirs.eval()(images()).logits, model(images())) < TOLERANCE
    assert theirs.config.id2label[4] == "class 4"
    (tmp_path / "there" / "model.json").unlink()  # without our card, their own files say as much
    assert same(load(tmp_path / "there"), model)


@torch.no_grad()
def test_a_jax_file_that_is_written_is_that_of_the_authors(tmp_path):
    model = ours(replace(CONFIG, head="tanh"))
    path = convert(keep(model, tmp_path / "own.safetensors", model.config), tmp_path / "there.npz", to="npz")
    arrays = dict(np.load(path))
    expected = jax_arrays(CONFIG)
    assert {name: value.shape for name, value in arrays.items()} == {n: v.shape for n, v in expected.items()}
    assert distance(jax_forward(arrays, images(), CONFIG.depth)[0], model(images())) < TOLERANCE


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        ("hf", {"pool": "gap"}, "pooling other than the class token's, for which hf has no place"),
        ("hf", {"registers": 1}, "registers without LayerScale"),
        ("npz", {"layer_scale": 0.1}, "LayerScale, for which npz"),
        ("timm", {"pos": "sincos2d"}, "positions 'sincos2d', for which timm"),
        ("timm", {"stem": "conv"}, "a convolutional stem"),
        ("torchvision", {"pool": "gap"}, "pooling other"),
    ],
)
def test_what_a_format_has_no_place_for_is_refused(tmp_path, to, changes, message):
    path = keep(ours(replace(CONFIG, **changes)), tmp_path / "own.safetensors", replace(CONFIG, **changes))
    out = tmp_path / ("there.npz" if to == "npz" else "there.safetensors")
    with pytest.raises(UserError, match=message):
        convert(path, out, to=to)
    assert not out.exists()


def test_convert_refuses_wrong_names_and_what_is_there(tmp_path):
    model = ours()
    path = keep(model, tmp_path / "own.safetensors")
    with pytest.raises(UserError, match=r"for npz are a \.npz file, but .*x is none\. Name it x\.npz"):
        convert(path, tmp_path / "x", to="npz")
    with pytest.raises(UserError, match=r"'to' must be one of .*Did you mean 'timm'"):
        convert(path, tmp_path / "x.safetensors", to="tim")
    with pytest.raises(UserError, match="is there already"):
        convert(path, path)
    assert convert(path, path, overwrite=True) == path
    assert same(load(path), model)


# What is recognised, adapted and said


@pytest.mark.parametrize("name", ["vit_ti16", "vit_s16", "vit_b16", "vit_l16", "vit_h14"])
def test_models_of_the_papers_are_known_by_their_shapes(name):
    config = configure(name)
    with torch.device("meta"):
        state = build(config).state_dict()
    tensors = from_memory(state, "it")
    weights = foreign.recognise(tensors, "it")
    assert foreign.architecture(weights, foreign.Beside(), None) == config


@pytest.mark.parametrize("format", foreign.FORMATS)
def test_a_b16_of_full_size_is_known_in_every_format(format):
    config = configure("vit_b16")
    with torch.device("meta"):
        state = build(config).state_dict()
    weights = foreign.recognise(from_memory(foreign.FORMATS[format].write(state, config), "it"), "it")
    assert weights.format == format
    assert foreign.architecture(weights, foreign.Beside(), None) == config
    assert {n: v.shape for n, v in weights.shapes(196).items()} == {n: v.shape for n, v in state.items()}


def test_dinov2_at_518_pixels_is_known_by_its_shapes():
    config = replace(configure("vit_b14"), img_size=(518, 518), registers=4, layer_scale=1e-5)
    with torch.device("meta"):
        tensors = from_memory(build(config).state_dict(), "it")
    assert foreign.architecture(foreign.recognise(tensors, "it"), foreign.Beside(), None) == config


def test_all_that_is_adapted_is_logged(caplog):
    state = timm_vit().half().state_dict()
    with caplog.at_level("INFO", "vitrail"):
        model = vitrail.load(state, CONFIG, classes=3, img_size=(16, 32), channels=1)
    assert model.config == replace(CONFIG, classes=3, img_size=(16, 32), channels=1)
    text = "\n".join(record.message for record in caplog.records)
    for part in (
        "timm weights of a vit_w32d2p4 at 24x24",
        "mean 0.5 and std 0.5 are those usual",
        "new head for 3 classes",
        "positions resampled from 6x6 to 4x8 patches (bicubic)",
        "patch filters changed from 3 to 1 channels",
        "float16 became float32",
    ):
        assert f"From The state dict: {part}" in text


def test_training_starts_from_foreign_weights(tmp_path):
    np.savez(tmp_path / "ViT.npz", **jax_arrays(CONFIG))
    model = build(replace(CONFIG, head="tanh", classes=2))
    notes = start_from(tmp_path / "ViT.npz", model, ("cat", "dog"))
    assert "new head for 2 classes" in notes
    expected = load(tmp_path / "ViT.npz")
    assert torch.equal(model.blocks[1].attn.qkv.weight, expected.blocks[1].attn.qkv.weight)


def test_a_model_shares_nothing_with_the_one_its_weights_come_from():
    theirs = timm_vit()
    model = load(theirs.state_dict(), CONFIG)
    before = theirs.norm.weight.clone()
    with torch.no_grad():
        model.norm.weight.zero_()
    assert torch.equal(theirs.norm.weight, before)


def test_another_model_than_the_one_asked_for_is_refused():
    state = timm_vit().state_dict()
    with pytest.raises(UserError, match="has width 32, but `model` asks for 768"):
        load(state, "vit_b16")
    with pytest.raises(UserError, match="has depth 2, but `model` asks for 3"):
        load(state, replace(CONFIG, depth=3))


def test_positions_of_no_square_need_to_be_told():
    state = timm_vit(replace(CONFIG, img_size=(16, 32))).state_dict()
    with pytest.raises(UserError, match="33 positions, which are no square of patches"):
        load(state, CONFIG)
    assert load(state, replace(CONFIG, img_size=(16, 32))).config.img_size == (16, 32)


def test_the_table_of_what_does_not_fit():
    state = timm_vit().state_dict()
    del state["blocks.1.norm2.weight"]
    state["norm_pre.weight"] = torch.zeros(32)
    state["blocks.0.mlp.fc2.weight"] = torch.zeros(32, 64)
    with pytest.raises(UserError) as caught:
        load(state, CONFIG)
    assert str(caught.value).splitlines()[1:] == [
        "  missing     blocks.1.norm2.weight (32,)",
        "  unexpected  norm_pre.weight (32,)",
        "  reshaped    blocks.0.mlp.fc2.weight (32, 64), not (32, 128)",
        "Take what fits with partial=True, or --partial of train and convert.",
    ]
