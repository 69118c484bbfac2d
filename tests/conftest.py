"""Shared fixtures: an isolated cache, tiny training settings, a trained run, image folders, the command line."""

from __future__ import annotations

import os
import shutil

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread per worker. Set before torch is imported; child processes inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The smallest model that trains: 4 tokens per image. With so few, most of a step would be Muon's.
TINY: dict[str, Any] = {
    "model": "vit_nano4",
    "img_size": 8,
    "stem": "patch",
    "opt": "adamw",
    "epochs": 1,
    "batch_size": 64,
}


@pytest.fixture(scope="session", autouse=True)
def _isolated_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps tests and their child processes away from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """Settings that train on digits in about a second."""
    return dict(TINY)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on digits, better than chance. Read-only."""
    import vitrail

    return vitrail.train("digits", out=tmp_path_factory.mktemp("runs"), name="trained", **(TINY | {"epochs": 2})).path


@pytest.fixture(scope="module")
def plain_runs(trained: Path, pretrained: Path) -> Iterator[None]:  # noqa: ARG001  # they have figures
    """Runs of a module draw no figures and write no report: half of the time of a tiny run, and tested elsewhere."""
    from vitrail.verbs.run import Run

    with pytest.MonkeyPatch.context() as patch:
        for module in ("vitrail.train.journal", "vitrail.evaluate.measure"):
            patch.setattr(f"{module}.save_charts", lambda *_: None)
        patch.setattr("vitrail.verbs.train.reported", lambda run: _held(Run(run), run.holds))
        yield


def _held(run: Any, holds: Any) -> Any:
    run.holds = holds
    return run


@pytest.fixture(scope="session")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The proof of `trained`, exported to ONNX. Read-only."""
    import vitrail

    return vitrail.export(trained, out=tmp_path_factory.mktemp("exported") / "digits.onnx")


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run pre-trained on digits by MAE, without their labels, and probed with them. Read-only."""
    import vitrail

    settings = TINY | {"epochs": 2, "method": "mae", "probe": "digits"}
    return vitrail.pretrain("digits", out=tmp_path_factory.mktemp("runs"), name="pretrained", **settings).path


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 240 digits as PNG files, `<class>/<number>.png`, at least twelve per class. Read-only."""
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
    """Settings that start from an unnamed model of one narrow block, which trains almost instantly."""
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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, without a window."""
    reason = "playwright is not installed: pip install .[dev]"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("There is no Chromium: install Debian's package, or run `make test` as root where apt-get can.")
    flags = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]  # a camera
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # as root Chromium has no sandbox
    with playwright.sync_playwright() as starter:
        chromium = starter.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def vitrail_says(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """Runs a command and returns its exit code and what it printed to stdout and stderr."""
    from vitrail import cli

    def run(*words: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


@pytest.fixture(scope="session")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of coloured shapes with captions. Read-only."""
    from captioned import captioned

    return captioned(tmp_path_factory.mktemp("captions"))


@pytest.fixture(scope="session")
def worded(captions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on coloured shapes with captions, better than chance. Read-only."""
    from captioned import SETTINGS

    import vitrail

    return vitrail.train(captions, out=tmp_path_factory.mktemp("runs"), name="worded", **SETTINGS).path
