"""DETR against transformers' `DetrForObjectDetection`, in both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peers import TOLERANCE, distance, randomise, transformers
from safetensors.torch import save_file

import vitrail
from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.models.bit import BiTConfig
from vitrail.models.dense import DenseConfig
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Boxes
from vitrail.weights import Card
from vitrail.weights.formats import detr
from vitrail.weights.loading import save

TINY = ViTConfig(32, depth=2, heads=2, mlp=128, patch=16, img_size=(64, 64), classes=0, layer_scale=1.0)
PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def dense(body=TINY) -> models.Model:
    return randomise(models.build(DenseConfig.of(body, ("detr",), 3)))


def check(ours, theirs) -> None:
    with torch.no_grad():
        outputs, answer = ours(PIXELS), theirs(PIXELS)
    assert distance(outputs[..., 4:], answer.logits) < TOLERANCE
    x, y, w, h = answer.pred_boxes.unbind(-1)
    boxes = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1) * 64
    assert distance(outputs[..., :4], boxes) < TOLERANCE


@pytest.mark.parametrize("registers", [0, 2])
def test_detr_goes_to_transformers_and_back(registers, tmp_path):
    ours = dense(replace(TINY, registers=registers))
    task, seen = Boxes(("cell", "disc", "square")), Preprocess((64, 64), 3, fit="pad")
    card = Card(model="vit", config=ours.config, task=task, preprocess=seen)
    save(tmp_path / "run.safetensors", ours, card)
    folder = vitrail.convert(tmp_path / "run.safetensors", tmp_path / "hf", to="hf").parent
    theirs, lists = transformers().DetrForObjectDetection.from_pretrained(folder, output_loading_info=True)
    assert not lists["missing_keys"]
    assert not lists["unexpected_keys"]
    check(ours, theirs.eval())
    theirs.save_pretrained(tmp_path / "theirs")
    for source in (folder, tmp_path / "theirs"):
        (source / "model.json").unlink(missing_ok=True)
        back = vitrail.load(source)
        assert back.card.classes == ("cell", "disc", "square")
        with torch.no_grad():
            assert distance(back(PIXELS), ours(PIXELS)) < TOLERANCE
    state = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    assert detr.read(state).keys() == ours.state_dict().keys()  # names of modules are read too


def test_the_full_size_transformer_is_that_of_the_published_models():
    """Encoder and decoder of 256 channels and 6 layers, on a map of their ResNet's width."""
    with torch.device("meta"):
        head = models.build(DenseConfig.of(BiTConfig((256, 2048), (1, 1)), ("detr",), 91)).head
    resnet = 23_454_912  # of 41,524,768 in DETR-R50, without BatchNorm's frozen parameters
    assert sum(parameter.numel() for parameter in head.parameters()) == 41_524_768 - resnet


def test_a_detr_on_a_resnet_is_refused(tmp_path):
    ours = dense()
    tensors = {n: v for n, v in detr.write(ours.state_dict(), ours.config).items() if "backbone" not in n}
    tensors["model.backbone.conv_encoder.model.conv1.weight"] = torch.zeros(64, 3, 7, 7)
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(vitrail.UserError, match=r"DETR whose backbone is not a DINOv2.* BatchNorm"):
        vitrail.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("body", "feature"),
    [
        (replace(TINY, layer_scale=0.0), "on a backbone other than a ViT with LayerScale"),
        (BiTConfig((64, 128), (1, 1), groups=8, img_size=(64, 64), classes=0), "other than a ViT with LayerScale"),
        (replace(TINY, img_size=(64, 96)), "an image that is not square"),
        (replace(TINY, pool="gap"), "pooling 'gap'"),
    ],
)
def test_what_does_not_fit(body, feature):
    assert feature in detr.unsupported(DenseConfig.of(body, ("detr",), 3))
