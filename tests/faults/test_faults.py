"""A signal at every change of the file system, and a full or failing disk at every write, of every verb that writes.

SIGKILL and SIGTERM must end the command, wherever it is. After each fault, the same command or `--resume` gives what an
undisturbed command gives, or one sentence. The suite tries a few places per verb; `make faults` tries all of them, and
`VITRAIL_FAULTS=5` every fifth.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from forks import SIGNALS, Answer, Case, Forks
from PIL import Image
from safetensors.numpy import load_file

STRIDE = int(os.environ.get("VITRAIL_FAULTS", "0"))  # 0: a few places
TINY = ["--model", "vit_w16d1h2m32p4", "--img-size", "8", "--opt", "adamw", "--batch-size", "8"]
TRAIN = ["train", "images", "--out", "runs", "--name", "run", "--epochs", "1", *TINY]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A folder with 16 images and a finished run of them."""
    folder = tmp_path_factory.mktemp("home")
    random = np.random.default_rng(0)
    for i in range(16):
        path = folder / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    words = [word if word != "run" else "done" for word in TRAIN]
    answer = forks(Case(words, str(folder), environment=environment(folder)))
    assert answer.code == 0, answer.error
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {"VITRAIL_CACHE": str(folder / "cache")}


# What an undisturbed command leaves: anything that can be compared.


def model(folder: Path) -> object:
    return sorted((name, value.tobytes()) for name, value in load_file(folder / "model.safetensors").items())


def run(folder: Path) -> object:
    """The weights and the history of a run, without its times."""
    header, *rows = (line.split(",") for line in (folder / "metrics.csv").read_text().splitlines())
    kept = [i for i, name in enumerate(header) if name not in ("seconds", "wait")]
    return model(folder), [[row[i] for i in kept] for row in rows]


def files(folder: Path) -> object:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def folds(folder: Path) -> object:
    return (folder / "folds.csv").read_text(), [run(folder / f"fold{number}") for number in (1, 2)]


def arrays(file: Path) -> object:
    with np.load(file) as content:
        return {name: content[name].tolist() for name in content.files}


def index(file: Path) -> object:
    """The vectors of an index by the images' names, which are absolute paths."""
    with np.load(file) as content:
        names = [Path(name).name for name in content["files"].tolist()]
        return names, content["model"].tolist(), content["vectors"].tolist()


def page(file: Path) -> object:
    text = re.sub(r"[\d.]+ ?(s|m|ms)\b|on \d{4}-\d\d-\d\d", "", file.read_text())
    return len(re.findall("<section", text)), "vitrail-report" in text


def digest(file: Path) -> object:
    return sha256(file.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Scenario:
    """A command that writes, and how its result is read."""

    words: list[str]
    result: Callable[[Path], object]
    place: str
    few: int = 3  # places tried in the suite, of each kind of fault
    where: str = ""  # a regular expression of the paths to strike at: other scenarios cover the rest
    plain: bool = False  # without figures and report: likewise

    def case(self, folder: Path) -> Case:
        settings = {"environment": environment(folder), "where": self.where, "plain": self.plain}
        return Case(self.words, str(folder), **settings)


ENDS = {"kill": (-9,), "term": (-15, 130), "full": (0, 1, 2), "io": (0, 1, 2)}  # exit codes by fault
SEARCH = ["search", "runs/done", "images", "images/a/0.png", "--index", "index.npz"]
RESUME = ["train", "--resume", "runs/run"]
SCENARIOS = {
    "train": Scenario(TRAIN, run, "runs/run", 3),
    "cache": Scenario([*TRAIN, "--crop-scale", "0.5"], run, "runs/run", 1, "/cache/", plain=True),
    "folds": Scenario([*TRAIN, "--folds", "2"], folds, "runs/run", 2, "^(?!.*fold1)", plain=True),
    "pretrain": Scenario(["pretrain", *TRAIN[1:], "--val-fraction", "0.25"], run, "runs/run", 1, plain=True),
    "report": Scenario(["report", "runs/done", "--out", "page.html"], page, "page.html", 1),
    "predict": Scenario(["predict", "runs/done", "images", "--out", "a.csv"], digest, "a.csv", 1),
    "convert": Scenario(["convert", "runs/done", "out/a.safetensors"], digest, "out/a.safetensors", 2),
    "shard": Scenario(["shard", "images", "shards", "--shard-size", "5"], files, "shards", 3),
    "embed": Scenario(["embed", "runs/done", "images", "--out", "e.npz"], arrays, "e.npz", 2),
    "search": Scenario(SEARCH, index, "index.npz", 1),
    "export": Scenario(["export", "runs/done", "--out", "out/a.onnx"], digest, "out/a.onnx", 0),
}


@pytest.fixture(scope="module")
def undisturbed(home: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """By scenario, the answer and the result of the command without a fault."""
    known: dict[str, tuple[Answer, object]] = {}

    def get(name: str) -> tuple[Answer, object]:
        if name not in known:
            folder = Path(shutil.copytree(home, tmp_path_factory.mktemp(name) / "home"))
            answer = forks(SCENARIOS[name].case(folder))
            assert not answer.trouble(), answer
            assert answer.code == 0, answer.error
            known[name] = answer, SCENARIOS[name].result(folder / SCENARIOS[name].place)
        return known[name]

    return get


def places(count: int, few: int) -> list[int]:
    """The numbers to strike at: all, or a few, evenly spread; one is in the middle."""
    if STRIDE:
        return list(range(1, count + 1, STRIDE))
    return sorted({round(x) for x in np.linspace(1, count, few)}) if few > 1 else [(count + 1) // 2] * few


@pytest.mark.parametrize("fault", ENDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_costs_nothing(name, fault, home, forks, undisturbed, tmp_path):
    scenario = SCENARIOS[name]
    if not STRIDE and not scenario.few:
        pytest.skip("one case takes half a minute: make faults")
    whole, wanted = undisturbed(name)
    few = scenario.few if fault == "kill" else max(scenario.few // 2, 1)
    failures = []
    for at in places(whole.changes if fault in SIGNALS else whole.writes, few):
        folder = Path(shutil.copytree(home, tmp_path / "home"))
        case = replace(scenario.case(folder), fault=fault, at=at)
        struck = forks(case)
        why = "" if struck.code < 0 else struck.trouble()
        if not why and struck.code not in ENDS[fault]:
            why = f"exit code {struck.code}: {struck.error[-500:]}"
        failures += [f"{fault} {at}: {why}"] * bool(why)
        if (again := recover(forks, case, scenario)) is not None:
            failures.append(f"{fault} {at}, then: {again}")
        elif (result := scenario.result(folder / scenario.place)) != wanted:
            failures.append(f"{fault} {at}: another result, {str(result)[:200]}")
        left = [path.name for path in folder.rglob("*") if path.name.startswith(".") and path.name.endswith(".tmp")]
        failures += [f"{fault} {at}: left {left}"] * bool(left)
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)


def test_sigterm_during_the_report_costs_the_report(home, forks, undisturbed, tmp_path):
    whole, wanted = undisturbed("train")
    for at in range(whole.changes - 1, 0, -1):  # backwards, to the last one before the report is there
        folder = Path(shutil.copytree(home, tmp_path / f"{at}"))
        trained = folder / "runs" / "run"
        struck = forks(Case(TRAIN, str(folder), "term", at, environment=environment(folder)))
        assert struck.code in ENDS["term"], struck.error
        assert run(trained) == wanted
        if not (trained / "report.html").exists():
            break
    assert list(trained.glob(".report.html*")), "not in the report"
    assert forks(Case(["report", "runs/run"], str(folder), environment=environment(folder))).code == 0
    assert page(trained / "report.html") == page(home / "runs" / "done" / "report.html")


def recover(forks: Forks, case: Case, scenario: Scenario) -> str | None:
    """Runs the command again, or resumes or replaces as its sentence says; returns what went wrong."""
    answer = forks(replace(case, fault=""))
    if answer.code == 2 and "--resume" in answer.sentence:
        verb = scenario.words[0]
        answer = forks(replace(case, fault="", words=[verb, *RESUME[1:]]))
    elif answer.code == 2 and "--overwrite" in answer.sentence:
        answer = forks(replace(case, fault="", words=[*case.words, "--overwrite"]))
    elif answer.code == 2 and "already has shards" in answer.sentence:  # all of them, as the result shows
        return None
    return None if answer.code == 0 and not answer.trouble() else answer.trouble() or answer.error[-1500:]
