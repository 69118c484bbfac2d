"""Sidecar files of weights: what they specify is used, and what is assumed without them is logged."""

from __future__ import annotations

import json
from dataclasses import replace

import peers
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitrail
from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.runs.run import Run
from vitrail.tasks import Multiclass
from vitrail.weights import Card, load, open_card, save

pytestmark = pytest.mark.usefixtures("plain_runs")

CONFIG = ViTConfig(
    width=16, depth=2, heads=2, mlp=32, patch=2, img_size=(8, 8), channels=3, classes=3, pool="cls", registers=0
)
CLASSES = ("cat", "Hündin", "猫/鳥")


def card_of(config=CONFIG, preprocess=None):
    seen = preprocess or Preprocess(config.img_size, config.channels)
    return Card(model="vit_nano2", config=config, task=Multiclass(CLASSES), preprocess=seen)


def write_sidecar(folder, **about):
    """A model with a `config.json` as timm writes it."""
    save_file(build(CONFIG).state_dict(), folder / "model.safetensors")
    document = {"model_args": {"num_heads": 2}, "pretrained_cfg": {"input_size": [3, 8, 8]} | about}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize("crop", [0.9, 1.0])
def test_a_photograph_is_prepared_as_timm_does(tmp_path, interpolation, crop):
    from sklearn.datasets import load_sample_image

    about = {"mean": MEAN, "std": STD, "crop_pct": crop, "interpolation": interpolation}
    seen = replace(open_card(write_sidecar(tmp_path, **about)).preprocess, img_size=(96, 96))
    create = peers.timm("timm.data").create_transform
    settings = {"interpolation": interpolation, "mean": MEAN, "std": STD, "crop_pct": crop}
    photograph = load_sample_image("china.jpg")
    theirs = create(input_size=(3, 96, 96), is_training=False, **settings)(Image.fromarray(photograph))
    difference = (seen(photograph) - theirs).abs()
    assert difference.max() < 1.01 / 255 / min(STD)  # one step of 256 at most, and seldom
    assert difference.mean() < 2e-4


def test_what_the_configuration_does_not_say_is_assumed_and_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        load(write_sidecar(tmp_path, mean=MEAN, std=STD, crop_pct=0.8, interpolation="bilinear"))
    assert "as usual for such weights" not in caplog.text
    with caplog.at_level("INFO"):
        load(write_sidecar(tmp_path, mean=MEAN, std=STD, crop_pct=0.8))
    assert "bicubic resizing: assumed as usual for such weights, without a sidecar file" in caplog.text


@pytest.mark.parametrize(("number", "name"), [(1, "lanczos"), (2, "bilinear"), (3, "bicubic")])
def test_hugging_faces_number_of_a_resampling(tmp_path, number, name):
    seen = Preprocess((8, 8), 3, interpolation=name)
    save(tmp_path / "own.safetensors", build(CONFIG), card_of(preprocess=seen))
    vitrail.convert(tmp_path / "own.safetensors", tmp_path / "hf", to="hf")
    assert json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())["resample"] == number
    (tmp_path / "hf" / "model.json").unlink()
    card = open_card(tmp_path / "hf")
    assert card.preprocess.interpolation == name
    assert card.classes == CLASSES


def test_class_names_of_timm(tmp_path):
    assert open_card(write_sidecar(tmp_path, label_names=CLASSES)).classes == CLASSES
    assert open_card(write_sidecar(tmp_path, label_names=["one too", "few"])).classes == ("0", "1", "2")


def test_training_begins_from_weights_that_neither_show_heads_nor_have_one(tmp_path, caplog):
    model = build(models.configure("vit_nano4", stem="patch", img_size=8, channels=1, classes=10))
    body = {f"module.backbone.{name}": value for name, value in model.state_dict().items()}
    body = {name: value for name, value in body.items() if "head" not in name}
    torch.save({"teacher": body, "student": {}}, tmp_path / "dino.pth")
    settings = {"out": tmp_path / "runs", "epochs": 1, "batch_size": 256, "weights": str(tmp_path / "dino.pth")}
    with pytest.raises(UserError, match="tensors do not show the number of heads"):
        vitrail.train("digits", **settings)
    with caplog.at_level("INFO"):
        run = vitrail.train("digits", model="vit_nano4", interpolation="bilinear", **settings)
    assert "new head for 10 classes" in caplog.text
    assert open_card(run).config == replace(model.config, resample="bicubic_offset")  # DINO's
    assert open_card(run).preprocess.interpolation == "bilinear"
    assert Run(run).config.transfer.pos_resample == "bicubic_offset"
    again = vitrail.train("digits", **settings | {"weights": str(run)})
    assert open_card(again).preprocess.interpolation == "bilinear"  # as the weights had it
