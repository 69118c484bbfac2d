"""ImageNet-ReaL on made images, with a model whose classes are some of ImageNet's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import UserError
from vitrail.data.preprocess import Preprocess
from vitrail.evaluate.real import imagenet_classes
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.weights import Card, save

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.fixture
def model(tmp_path):
    """A model that answers its second class for every image."""
    classes = tuple(list(imagenet_classes())[:3])
    config = ViTConfig(32, 1, 2, 64, 4, (8, 8), 3, 3)
    model = build(config)
    with torch.no_grad():
        model.head.bias[1] = 9.0
    path = tmp_path / "model.safetensors"
    save(
        path, model, Card(model="vit_nano4", config=config, task=Multiclass(classes), preprocess=Preprocess((8, 8), 3))
    )
    return path


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "imagenet" / "val" / "n01440764"
    folder.mkdir(parents=True)
    for number in range(1, 5):
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(folder / f"ILSVRC2012_val_{number:08}.JPEG")
    return tmp_path / "imagenet"


def labels(tmp_path, document):
    path = tmp_path / "real.json"
    path.write_text(json.dumps(document))
    return path


def test_any_right_label_counts_and_images_without_one_are_skipped(model, images, tmp_path, vitrail_says):
    real = labels(tmp_path, [[0, 1], [2], [], [1]])  # right, wrong, none, right
    scores = vitrail.evaluate(model, images, real=real, device="cpu")
    assert (scores.images, scores.skipped, scores.top1) == (3, 1, pytest.approx(2 / 3))
    code, out, _ = vitrail_says("evaluate", model, images, "--real", real, "--device", "cpu", "--json")
    assert (code, json.loads(out)["top1"]) == (0, 0.666667)


def test_names_of_the_classes():
    classes = imagenet_classes()
    assert len(classes) == len(set(classes.values())) == 1000
    assert list(classes) == sorted(classes)
    assert (classes["n01440764"], classes["n02123045"]) == ("tench", "tabby")


@pytest.mark.parametrize(
    ("document", "message"),
    [({"a": 1}, "not a real.json"), ([[1000]], "from 0 to 999"), ([[1]], "has a higher number")],
)
def test_bad_labels(model, images, tmp_path, document, message):
    with pytest.raises(UserError, match=message):
        vitrail.evaluate(model, images, real=labels(tmp_path, document))


def test_bad_images_and_classes(model, images, trained, tmp_path):
    real = labels(tmp_path, [[0]] * 4)
    with pytest.raises(UserError, match="Give their folder"):
        vitrail.evaluate(model, real=real)
    with pytest.raises(UserError, match="ImageNet's 1,000 classes, but the model has 10"):
        vitrail.evaluate(trained, images, real=real)
    with pytest.raises(UserError, match="Remove the other options"):
        vitrail.evaluate(model, images, real=real, method="knn")
    with pytest.raises(UserError, match="Remove the other options"):
        vitrail.evaluate(model, images, real=real, image_dir=tmp_path)
