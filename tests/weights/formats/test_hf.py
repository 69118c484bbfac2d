"""The preprocessing that is written for transformers gives the pixels that vitrail's own gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from vitrail.data.preprocess import Preprocess
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, open_card, save

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp=32, patch=16, img_size=(64, 64), classes=2)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def processor(folder, seen):
    """transformers' own processor for what is written of a model that sees images so."""
    config = replace(CONFIG, img_size=seen.img_size)
    card = Card(model="vit_w16", config=config, task=Multiclass(("a", "b")), preprocess=seen)
    save(folder / "own.safetensors", build(config), card)
    there = convert(folder / "own.safetensors", folder / "there", to="hf").parent
    return peers.transformers().AutoImageProcessor.from_pretrained(there, backend="pil")


def pixels(theirs, image):
    return theirs(Image.fromarray(image), return_tensors="pt")["pixel_values"][0]


def test_the_fields_are_what_transformers_understand(tmp_path):
    theirs = processor(tmp_path, Preprocess((64, 64), 3, 0.8, **IMAGENET))
    assert type(theirs).__name__ == "BitImageProcessorPil"
    assert dict(theirs.size) == {"shortest_edge": 80}
    assert dict(theirs.crop_size) == {"height": 64, "width": 64}
    assert (theirs.do_resize, theirs.do_center_crop, theirs.do_rescale, theirs.do_normalize) == (True,) * 4
    assert theirs.resample == Image.Resampling.BICUBIC
    assert theirs.rescale_factor == 1 / 255
    assert (tuple(theirs.image_mean), tuple(theirs.image_std)) == (IMAGENET["mean"], IMAGENET["std"])


@pytest.mark.parametrize(
    ("crop", "size", "numbers"),
    [(1.0, (64, 64), {}), (1.0, (64, 98), IMAGENET), (0.8, (80, 80), IMAGENET), (0.8, (120, 80), {})],
    ids=["whole", "wide", "cropped", "high"],
)
def test_a_photograph_that_needs_no_resizing_gives_the_same_pixels(tmp_path, crop, size, numbers):
    seen = Preprocess((64, 64), 3, crop, **numbers)
    image = np.ascontiguousarray(load_sample_image("china.jpg")[100 : 100 + size[0], 200 : 200 + size[1]])
    assert torch.allclose(pixels(processor(tmp_path, seen), image), seen(image), atol=1e-5)


@pytest.mark.parametrize("crop", [1.0, 0.8])
def test_a_resized_photograph_differs_by_rounding_alone(tmp_path, crop):
    seen = Preprocess((64, 64), 3, crop, mean=(0.0,), std=(1 / 255,))  # so that pixels are 0..255
    image = np.ascontiguousarray(
        load_sample_image("china.jpg")[:, :600]
    )  # centres fall alike, which may be a pixel off
    difference = (pixels(processor(tmp_path, seen), image) - seen(image)).abs()
    assert difference.max() <= 2
    assert difference.mean() < 0.1


def test_a_rectangle_is_resized_as_a_whole(tmp_path):
    seen = Preprocess((32, 64), 3)
    image = np.ascontiguousarray(load_sample_image("china.jpg")[:32, :64])
    assert torch.allclose(pixels(processor(tmp_path, seen), image), seen(image), atol=1e-5)


def test_their_files_alone_say_the_same(tmp_path):
    seen = Preprocess((64, 64), 3, 0.8, **IMAGENET)
    processor(tmp_path, seen)
    (tmp_path / "there" / "model.json").unlink()
    assert open_card(tmp_path / "there").preprocess == seen
