"""Shared fixtures: an isolated cache, tiny training settings, a trained run, image folders, the command line."""

from __future__ import annotations

import os
import pickle
import shutil
import signal

# One thread: workers share the cores, and sums have the same order in every process. Set before torch is imported;
# child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

# The smallest model with a name: 4 tokens per image. With so few, most of a step would be Muon's.
TINY: dict[str, Any] = {
    "model": "vit_nano4",
    "img_size": 8,
    "stem": "patch",
    "opt": "adamw",
    "epochs": 1,
    "batch_size": 64,
    "amp": "off",  # the default depends on the CPU
}


@pytest.fixture(scope="session", autouse=True)
def _isolated_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps tests and their child processes away from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """Settings that train on digits in half a second: two narrow blocks."""
    return TINY | {"model": "vit_w64d2h2m128p4"}


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers share."""
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    folder = (tmp_path_factory.getbasetemp().parent if parallel else tmp_path_factory.getbasetemp()) / "once"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """A worker's own copy of a folder that only one of the workers makes: `make(folder)`."""
    folder = of_all_workers(tmp_path_factory) / name
    done = folder.with_name(f"{name}.done")
    with FileLock(folder.with_name(f"{name}.lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            make(folder)
            done.touch()
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp(name) / name))


@pytest.fixture(scope="session", autouse=True)
def _speed_measured_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exports measure the speed of a model in processes of their own: here once for each kind of file.

    Plans, time budgets and studies measure that of training: here for a moment.
    """
    from vitrail.runs.speed import measured

    def remembered(source: str | Path) -> Any:
        kind = Path(source).suffix.removeprefix(".safetensors") or ".torch"
        known = of_all_workers(tmp_path_factory) / f"speed{kind}"
        with FileLock(f"{known}.lock"):
            if not known.exists() and (speed := measured(source)) is not None:
                known.write_bytes(pickle.dumps(speed))
        return pickle.loads(known.read_bytes()) if known.exists() else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.export.write.measured", remembered)
        patch.setattr("vitrail.train.pace._SECONDS", 0.2)
        patch.setattr("vitrail.studies.cost._MEASURED", 0.05)
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on digits, better than chance. Read-only."""
    import vitrail

    def make(folder: Path) -> None:
        vitrail.train("digits", out=folder.parent, name=folder.name, **(TINY | {"epochs": 2}))

    return made_once(tmp_path_factory, "trained", make)


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

    def make(folder: Path) -> None:
        proof = vitrail.export(trained, out=folder / "file" / "digits.onnx")
        (folder / "proof").write_bytes(pickle.dumps(proof))

    folder = made_once(tmp_path_factory, "exported", make)
    return replace(pickle.loads((folder / "proof").read_bytes()), file=folder / "file" / "digits.onnx")


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run pre-trained on digits by MAE, without their labels, and probed with them. Read-only."""
    import vitrail

    def make(folder: Path) -> None:
        settings = TINY | {"epochs": 2, "method": "mae", "probe": "digits"}
        vitrail.pretrain("digits", out=folder.parent, name=folder.name, **settings)

    return made_once(tmp_path_factory, "pretrained", make)


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
    return settings | {"epochs": 1, "batch_size": 64, "amp": "off"}


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


@pytest.fixture
def own_models() -> Iterator[None]:
    """Forgets the models that a test registers."""
    from vitrail.models import CONFIGS, FAMILIES
    from vitrail.models.module import MODULES

    registries: tuple[dict[str, Any], ...] = (FAMILIES, CONFIGS, MODULES)
    before = [dict(registry) for registry in registries]
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


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

    def make(folder: Path) -> None:
        vitrail.train(captions, out=folder.parent, name=folder.name, **SETTINGS)

    return made_once(tmp_path_factory, "worded", make)
