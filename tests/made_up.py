"""Data and weights to resolve settings for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vitrail.data import ArraySplit, Data
from vitrail.data.preprocess import Preprocess
from vitrail.models import build, canonical
from vitrail.tasks import Multiclass
from vitrail.weights import Card, save


def data_of(size=8, images=1000, channels=3, classes=("a", "b", "c")):
    """A data set of black images that need no memory, however many and large they are."""
    h, w = size if isinstance(size, tuple) else (size, size)
    pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (images, h, w, channels))
    split = ArraySplit(pixels, np.zeros(images, np.int64), "made-up/train")
    return Data("made-up", Multiclass(tuple(classes)), {"train": split, "val": split}, (h, w), channels, ())


def model_file(folder):
    """Weights of a small model for 12x12 grey images of two classes."""
    config = replace(canonical("vit_nano2")[1], img_size=(12, 12), channels=1, classes=2, registers=3)
    card = Card(model="vit_nano2", config=config, task=Multiclass(("x", "y")), preprocess=Preprocess((12, 12), 1))
    save(folder / "model.safetensors", build(config), card)
    return str(folder / "model.safetensors")
