"""What every test shares: the cores of the machine, and small things that are dear to make."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a worker per core already. Set before torch is imported; child processes inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The least that trains: 4 tokens an image.
TINY: dict[str, Any] = {"model": "vit_nano4", "img_size": 8, "stem": "patch", "epochs": 1, "batch_size": 64}


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's cache is read or changed, by this process or its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """Settings with which training on digits takes a second."""
    return dict(TINY)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits that can tell some of them apart. For reading only."""
    import vitrail

    return vitrail.train("digits", out=tmp_path_factory.mktemp("runs"), name="trained", **(TINY | {"epochs": 2}))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 240 digits as PNG files, `<class>/<number>.png`, twelve of each class and more. For reading only."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("images") / "digits"
    images, labels = load_digits(return_X_y=True)
    for i in range(240):
        path = folder / str(labels[i]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[i].reshape(8, 8) * 15).astype(np.uint8)).save(path)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings that begin from a model of one narrow block, for which there is no name: it trains at once."""
    import torch

    from vitrail.data.preprocess import Preprocess
    from vitrail.models import build
    from vitrail.models.vit import ViTConfig
    from vitrail.tasks import Multiclass
    from vitrail.weights import Card, save

    torch.manual_seed(0)
    config = ViTConfig(width=32, depth=1, heads=2, mlp=64, patch=4, img_size=(8, 8), channels=1, classes=10, pool="gap")
    task = Multiclass(tuple("0123456789"))
    card = Card(model="vit_nano4", config=config, task=task, preprocess=Preprocess((8, 8), 1))
    path = tmp_path_factory.mktemp("small") / "model.safetensors"
    save(path, build(config), card)
    settings = {"weights": str(path), "recipe": "small", "body_lr": 1.0, "val_fraction": 0.5}
    return settings | {"epochs": 1, "batch_size": 64}
