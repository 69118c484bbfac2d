"""Folders that cannot be written to: reading from them works, and whatever writes ends with one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Case, Forks, can_mount


@pytest.fixture(scope="module")
def home(trained: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and runs that cannot be written to: in `disk`, which is mounted read-only, and in `foreign`."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(trained, folder / "disk" / "run")
    half = Path(shutil.copytree(trained, folder / "disk" / "half"))
    (half / "config.yaml").write_text((half / "config.yaml").read_text().replace("epochs: 2.0", "epochs: 9.0"))
    for number in "01":
        shutil.copytree(digits / number, folder / "pictures" / number)
    shutil.copy(folder / "pictures/0/0.png", folder / "pictures/1/0.png")  # an error for `check` to draw
    shutil.copytree(half, folder / "foreign" / "half").chmod(0o555)
    (folder / "foreign").chmod(0o555)
    if not can_mount(folder / "disk"):
        pytest.skip("a folder cannot be mounted read-only here")
    return folder


@pytest.fixture(scope="module")
def forks(home: Path) -> Iterator[Forks]:
    with Forks(read_only=home / "disk") as server:
        yield server


TINY = "--model vit_nano4 --img-size 8 --epochs 1"
WRITING = [
    f"train pictures --out disk/new {TINY}",
    f"train pictures --out disk/new --find-lr {TINY}",
    f"train pictures --out disk --name run --overwrite {TINY}",
    "train --resume disk/half",
    f"pretrain pictures --out disk/new {TINY}",
    "report disk/run",
    "report disk/run --out disk/page.html",
    "evaluate disk/run",
    "explain disk/run pictures",
    "embed disk/run pictures --out disk/a.npz",
    "embed disk/run pictures --out disk/a.parquet",
    "predict disk/run pictures --out disk/a.csv",
    "search disk/run pictures pictures/0/0.png --index disk/a.npz",
    "convert disk/run disk/a.safetensors",
    "convert disk/run disk/run/model.safetensors --overwrite",
    "export disk/run --out disk/a.onnx",
    "shard pictures disk/shards",
    "check pictures --out disk/check",
    "study positions digits --budget 1h --out disk/study",
]


@pytest.mark.parametrize("words", WRITING)
def test_writing_ends_with_one_sentence(words, home, forks):
    answer = forks(Case(words.split(), str(home), environment={"VITRAIL_CACHE": str(home / "cache")}))
    assert not answer.trouble()
    assert answer.code == 2, answer
    assert "disk" in answer.sentence
    if "--find-lr" in words:
        assert len(answer.error.splitlines()) == 1  # before anything was computed


@pytest.mark.parametrize(
    "words",
    [
        f"train pictures --out foreign/new {TINY}",
        f"train pictures --out foreign --name half --overwrite {TINY}",
        "train --resume foreign/half",
        "report foreign/half",
        "convert disk/run foreign/a.safetensors",
    ],
)
def test_so_does_writing_to_a_folder_of_another_user(words, home, forks):
    environment = {"VITRAIL_CACHE": str(home / "cache")}
    answer = forks(Case(words.split(), str(home), environment=environment, unprivileged=True))
    assert not answer.trouble()
    assert answer.code == 2, answer
    assert "foreign" in answer.sentence


@pytest.mark.parametrize("words", ["predict disk/run pictures/0", "evaluate disk/run --out metrics"])
def test_reading_works_without_a_cache(words, home, forks):
    answer = forks(Case(words.split(), str(home), environment={"VITRAIL_CACHE": str(home / "disk/cache")}))
    assert answer.code == 0, answer
    assert not answer.trouble()
