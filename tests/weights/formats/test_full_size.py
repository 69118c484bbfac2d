"""B/16 of full width on a photograph, in every format and back; and the largest model of all by its shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import peers
import pytest
import torch
from peers import TOLERANCE, distance, identical, jax_arrays, jax_forward
from safetensors.torch import load_file
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from vitrail.data.preprocess import Preprocess
from vitrail.models import Model, build, configure, parameters
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, recognise, save
from vitrail.weights.formats import vit
from vitrail.weights.tensors import from_state_dict

B16 = configure("vit_b16", depth=2)  # one block is like the other: 12 of them take 6 times as long


@dataclass
class Whole:
    path: Path
    model: Model
    image: Tensor
    logits: Tensor
    features: Tensor


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    """A B/16 of random weights as a file, and what it says of a photograph. For reading only."""
    with torch.device("meta"):
        model = build(B16)
    model = model.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    seen = Preprocess((224, 224), 3, 0.9)
    image = seen(load_sample_image("china.jpg"))[None]
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.02, generator=generator)
        features = model.embed(image)
        logits = model.head(features)
    path = tmp_path_factory.mktemp("whole") / "own.safetensors"
    save(path, model, Card(model="vit_b16", config=B16, task=Multiclass(tuple(map(str, range(1000)))), preprocess=seen))
    return Whole(path, model, image, logits, features)


def on_meta(make) -> nn.Module:
    """A model of theirs whose weights are still to come."""
    with torch.device("meta"):
        return make().eval()


@torch.no_grad()
def test_timm(tmp_path, whole):
    path = convert(whole.path, tmp_path / "there.safetensors", to="timm")
    theirs = on_meta(lambda: peers.timm().create_model("vit_base_patch16_224", depth=2))
    theirs.load_state_dict(load_file(path), strict=True, assign=True)
    tokens = theirs.forward_features(whole.image)
    agree(whole, theirs.forward_head(tokens), theirs.forward_head(tokens, pre_logits=True), path)


@torch.no_grad()
def test_hugging_face(tmp_path, whole):
    path = convert(whole.path, tmp_path / "there", to="hf")
    theirs = peers.transformers().AutoModelForImageClassification.from_pretrained(path.parent).eval()
    features = theirs.vit(whole.image).last_hidden_state[:, 0]
    agree(whole, theirs.classifier(features), features, path)


@torch.no_grad()
def test_torchvision(tmp_path, whole):
    path = convert(whole.path, tmp_path / "there.safetensors", to="torchvision")
    theirs = on_meta(lambda: peers.TorchvisionViT(B16))
    theirs.load_state_dict(load_file(path), strict=True, assign=True)
    features = theirs.features(whole.image)
    agree(whole, theirs.heads(features), features, path)


@torch.no_grad()
def test_jax(tmp_path, whole):
    path = convert(whole.path, tmp_path / "there.npz", to="npz")
    model = on_meta(lambda: build(replace(B16, act="gelu_tanh"))).eval()  # as in the authors' code
    model.load_state_dict(whole.model.state_dict(), assign=True)
    features = model.embed(whole.image)
    agree(
        replace(whole, logits=model.head(features), features=features),
        *jax_forward(dict(np.load(path)), whole.image),
        path,
    )


def agree(whole: Whole, logits: Tensor, features: Tensor, path: Path) -> None:
    """Theirs says the same with the weights in its format, and those are read as the bits that they came from."""
    assert distance(whole.features, features) < TOLERANCE
    assert distance(whole.logits, logits) < TOLERANCE
    path.with_suffix(".json").unlink()  # nothing but their own file tells what it is
    assert identical(load(path).state_dict(), whole.model.state_dict())


def test_the_jax_file_has_the_names_and_shapes_of_the_release():
    with torch.device("meta"):
        state = build(configure("vit_b16", head="tanh")).state_dict()
    written = vit.FORMATS["npz"].write(state, configure("vit_b16", head="tanh"))
    small = configure("vit_b16", head="tanh", width=24, mlp=8, img_size=16, classes=2)
    assert written.keys() == jax_arrays(small).keys()
    assert written["Transformer/encoderblock_11/MultiHeadDotProductAttention_1/out/kernel"].shape == (12, 64, 768)
    assert written["embedding/kernel"].shape == (16, 16, 3, 768)


def test_dinov2s_giant():
    config = configure("dinov2_g14", classes=0)
    mask_token = config.width
    assert parameters(config) + mask_token == 1_136_480_768  # as its authors count, who keep the mask token
    with torch.device("meta"):
        theirs = peers.timm().create_model("vit_giant_patch14_dinov2")
    assert parameters(config) == sum(p.numel() for p in theirs.parameters())
    with torch.device("meta"):
        about = peers.transformers().Dinov2Config(
            hidden_size=1536,
            num_hidden_layers=40,
            num_attention_heads=24,
            image_size=518,
            patch_size=14,
            use_swiglu_ffn=True,
            use_mask_token=False,
        )
        theirs = peers.transformers().Dinov2Model(about)
    weights = recognise.recognise(from_state_dict(theirs.state_dict(), "it"), "it")
    assert peers.shown(recognise.architecture(weights, recognise.Sidecar(), None)) == config
