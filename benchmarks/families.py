"""What every family's small model learns of Fashion-MNIST in five minutes of two cores, from all images and from 5,000.

    python benchmarks/families.py speed                      # on an otherwise idle machine
    python benchmarks/families.py train                      # every run of the table that has not been made yet
    python benchmarks/families.py distil                     # DeiT with and without a teacher, likewise
    python benchmarks/families.py draw                       # figures and tables of docs/models.md and docs/distill.md

`speed` trains every model for a short time, in turns, with the command's own loop, and times its forward pass. `train`
gives every model the images that it would have seen in five minutes at that speed: so the result does not depend on
what else the machine does meanwhile, and can be had again to the bit. Everything else is what `vitrail train --model
FAMILY` chooses, with the recipe `small`, which was made for the ViT: no family has settings of its own.

Of the 60,000 training images 1,000 are held out to choose the best epoch, and 5,000 of the others are the small set;
the 10,000 test images are met once, at the end. Teacher and students, whose differences are small, are measured by the
other 54,000 training images too, which none of them has seen.

Results go to `benchmarks/results/families.json`. Several processes may `train` at a time, with fewer `--threads` each;
a process that was killed leaves a file `.taken` behind, to be removed before its run can be made again.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command does, before torch is loaded

import argparse
import csv
import fcntl
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

import vitrail
from vitrail.charts.style import BLUE, GREY, INK, ORANGE, STYLE, save
from vitrail.data import open_data
from vitrail.evaluate.stream import run_split
from vitrail.files import write_text
from vitrail.train.checkpoint import load_checkpoint
from vitrail.weights import open_run

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "families.json"
FIGURES = HERE.parent / "docs" / "images"

BUDGET = 300  # seconds
HELD = 1_000
SETS = (5_000, 59_000)
ROUNDS = 3
TAU = 3.0  # of soft distillation, as in DeiT


@dataclass(frozen=True)
class Trial:
    """One run: a family's small model on one of the sets; with a teacher that was trained before on the same set."""

    family: str
    images: int
    seed: int
    teacher: str = ""  # the name of its run
    distill: str = ""  # hard or soft
    budget: int = BUDGET  # in seconds

    @property
    def name(self) -> str:
        longer = f"-{self.budget // 60}m" if self.budget != BUDGET else ""
        taught = f"-{self.distill}-from-{self.teacher}" if self.teacher else ""
        return f"{self.family}-{self.images}-{self.seed}{longer}{taught}"

    @property
    def settings(self) -> dict[str, Any]:
        """What `vitrail train` is given beside data, model and length; all else is the recipe's choice."""
        tau = {"distill_tau": TAU} if self.distill == "soft" else {}
        return {"seed": self.seed} | ({"distill": self.distill} | tau if self.teacher else {})


COMPARED = ("vit", "hybrid", "bit")  # by the paper, and here with three seeds
OTHERS = ("deit", "swin", "mixer", "coatnet", "pvt", "pvt_v2")
# The most telling first: they are made in this order.
TRIALS = (
    *(Trial(family, images, 0) for family in (*COMPARED, *OTHERS) for images in SETS),
    *(Trial(family, images, seed) for seed in (1, 2) for images in SETS for family in COMPARED),
)
TEACHER = Trial("bit", SETS[0], 0, budget=900)
DISTILLED = (
    TEACHER,
    *(Trial("deit", SETS[0], seed, *taught) for seed in range(3) for taught in ((TEACHER.name, "hard"), ())),
    *(Trial("deit", SETS[0], seed, TEACHER.name, "soft") for seed in range(3)),
)


def shuffled(count: int) -> np.ndarray:
    """The numbers of the training images: first those held out, then those of the small set, then all others."""
    return np.random.default_rng(0).permutation(count)


def data(work: Path, images: int) -> Path:
    """The file with so many of the training images, the held-out ones and the test images."""
    path = work / f"fashion-{images}.npz"
    if not path.exists():
        splits = open_data("fashion-mnist").splits
        train, test = splits["train"], splits["val"]
        order = shuffled(len(train))
        held, chosen = order[:HELD], np.sort(order[HELD : HELD + images])
        np.savez(
            path,
            x_train=train.pixels[chosen],
            y_train=train.targets[chosen],
            x_val=train.pixels[held],
            y_val=train.targets[held],
            x_test=test.pixels,
            y_test=test.targets,
        )
    return path


def unseen(work: Path) -> Path:
    """The file with the training images that are neither in the small set nor held out."""
    path = work / "fashion-unseen.npz"
    if not path.exists():
        train = open_data("fashion-mnist").splits["train"]
        chosen = np.sort(shuffled(len(train))[HELD + SETS[0] :])
        np.savez(path, x_test=train.pixels[chosen], y_test=train.targets[chosen])
    return path


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def speed(work: Path, seconds: int) -> None:
    """Images per second in training and in inference: the median of rounds in which the families take turns."""
    source = data(work, SETS[1])
    training: dict[str, list[float]] = {family: [] for family in (*COMPARED, *OTHERS)}
    inference: dict[str, list[float]] = {family: [] for family in (*COMPARED, *OTHERS)}
    facts: dict[str, Any] = {}
    for turn in range(ROUNDS):
        for family in (*COMPARED, *OTHERS):
            run = vitrail.train(
                source,
                model=family,
                time_budget=f"{seconds}s",
                out=str(work / "speed"),
                name=family,
                overwrite=True,
            )
            last = rows(run)[-1]
            training[family].append(int(last["step"]) * 128 / float(last["seconds"]))
            model, card = open_run(run)
            inference[family].append(forward_rate(model.eval()))
            facts[family] = {
                "model": card.model,
                "img_size": card.config.img_size,
                "params": sum(p.numel() for p in model.parameters()),
            }
            print(turn, family, f"{training[family][-1]:.0f} {inference[family][-1]:.0f}", flush=True)
    with results() as found:
        found["speed"] = {
            family: facts[family]
            | {"train": statistics.median(training[family]), "inference": statistics.median(inference[family])}
            for family in (*COMPARED, *OTHERS)
        }


@torch.inference_mode()
def forward_rate(model: vitrail.models.Model, batch: int = 128, seconds: float = 3) -> float:
    """Images per second of forward passes alone."""
    images = torch.rand(batch, model.config.channels, *model.config.img_size)
    for _ in range(3):
        model(images)
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        model(images)
        count += 1
    return count * batch / (time.monotonic() - begun)


def train(work: Path, trial: Trial) -> None:
    """Makes a run and measures it, unless that was done or another process does it."""
    claim = work / f"{trial.name}.taken"
    with results() as found:
        if trial.name in found["runs"] or claim.exists():
            return
        claim.touch()
        rate = found["speed"][trial.family]["train"]
    begun = time.monotonic()
    run = vitrail.train(
        data(work, trial.images),
        model=trial.family,
        epochs=trial.budget * rate / trial.images,
        out=str(work),
        name=trial.name,
        overwrite=True,
        **trial.settings,
        **({"teacher": str(work / trial.teacher)} if trial.teacher else {}),
    )
    curve = rows(run)
    record = {
        "family": trial.family,
        "images": trial.images,
        "seed": trial.seed,
        "teacher": trial.teacher,
        "distill": trial.distill,
        "budget": trial.budget,
        "epochs": trial.budget * rate / trial.images,
        "steps": int(curve[-1]["step"]),
        "top1": vitrail.evaluate(run, split="test").top1,
        "curve": [(int(row["step"]), float(row["val_top1"])) for row in curve],
        "seconds": time.monotonic() - begun,
    }
    with results() as found:
        found["runs"][trial.name] = record
    claim.unlink()


def measure_unseen(work: Path, trial: Trial) -> None:
    """Measures a run of the small set by the images that are in no set of it, unless that was done.

    Both the weights that are kept, those of the best epoch, and the last ones: of near epochs, 1,000 held-out images
    choose by luck.
    """
    with results() as found:
        if "last" in found["runs"].get(trial.name, {"last": None}):
            return
    model, card = open_run(work / trial.name)
    split = open_data(unseen(work), classes=card.classes).splits["test"]

    def top1() -> float:
        logits, labels = run_split(model, split, card.preprocess)
        return float((logits.argmax(axis=1) == labels).mean())

    kept = top1()
    model.load_state_dict(load_checkpoint(work / trial.name, "cpu")["model"])
    last = top1()
    with results() as found:
        found["runs"][trial.name] |= {"unseen": kept, "last": last}


@contextmanager
def results() -> Iterator[dict[str, Any]]:
    """What was measured so far, to be changed by one process at a time."""
    RESULTS.parent.mkdir(exist_ok=True)
    with (RESULTS.parent / ".families.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"speed": {}, "runs": {}}
        yield found
        write_text(RESULTS, json.dumps(found, indent=1) + "\n")


def draw() -> None:
    """The figures, and the tables as Markdown on the screen."""
    found = json.loads(RESULTS.read_text())
    runs = [run for run in found["runs"].values() if run["budget"] == BUDGET]  # without the teacher, which had longer
    print("| family | model | parameters | training | inference | epochs | of 5,000 | epochs | of 59,000 |")
    print("|---|---|---|---|---|---|---|---|---|")
    ends: dict[str, list[list[float]]] = {}
    for family, facts in found["speed"].items():
        cells = []
        for images in SETS:
            chosen = [run for run in runs if (run["family"], run["images"], run["teacher"]) == (family, images, "")]
            ends.setdefault(family, []).append([100 * run["top1"] for run in chosen])
            cells += [f"{BUDGET * facts['train'] / images:.1f}", _spread(ends[family][-1])]
        speeds = f"{facts['train']:,.0f} | {facts['inference']:,.0f}"
        print(f"| {family} | `{facts['model']}` | {facts['params']:,} | {speeds} | {' | '.join(cells)} |")
    print("\n| | best epoch, 10,000 test images | best epoch, 54,000 unseen | last epoch, unseen |\n|---|---|---|---|")
    schools = _schools(found["runs"])
    for name, measured in schools.items():
        print(f"| {name} | {' | '.join(map(_spread, measured))} |")
    with mpl.rc_context(STYLE):
        save(_figure(found["speed"], ends), FIGURES / "families.png")
        save(_distilled(schools), FIGURES / "distill.png")


def _schools(runs: dict[str, Any]) -> dict[str, list[list[float]]]:
    """The teacher and how students learn, with what was measured of every run: its kept weights, and its last."""
    found = {}
    for name, school in (
        ("the teacher, BiT", [TEACHER]),
        ("without a teacher", [trial for trial in DISTILLED if trial.family == "deit" and not trial.distill]),
        ("its choices, `hard`", [trial for trial in DISTILLED if trial.distill == "hard"]),
        (f"its probabilities, `soft` at {TAU:g}", [trial for trial in DISTILLED if trial.distill == "soft"]),
    ):
        made = [runs[trial.name] for trial in school if "last" in runs.get(trial.name, ())]
        found[name] = [[100 * run[measure] for run in made] for measure in ("top1", "unseen", "last")]
    return found


def _distilled(schools: dict[str, list[list[float]]]) -> Figure:
    """A row for the teacher and each kind of student; every seed is a stroke."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    shown = [(name.replace("`", ""), top1) for name, (_, _, top1) in schools.items() if top1][::-1]
    for row, (_, top1) in enumerate(shown):
        axes.plot(statistics.mean(top1), row, "o", color=GREY if row == len(shown) - 1 else BLUE, markersize=8)
        if len(top1) > 1:
            axes.plot(top1, [row] * len(top1), "|", color=INK, markersize=9)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("top-1 in % after the last epoch, of 54,000 images that none of them has seen")
    axes.set_title("What a DeiT learns of 5,000 images, and of a teacher that saw no others")
    axes.grid(axis="y", visible=False)
    return figure


def _spread(top1: list[float]) -> str:
    """The mean, with the lowest and the highest if there are several."""
    if not top1:
        return "not measured"
    mean = f"{statistics.mean(top1):.2f} %"
    return mean if len(top1) == 1 else f"{mean} ({min(top1):.2f} to {max(top1):.2f}, {len(top1)} seeds)"


def _figure(speeds: dict[str, Any], ends: dict[str, list[list[float]]]) -> Figure:
    """A line for each family from what it learns of few images to what it learns of many; every seed is a stroke."""
    order = sorted((family for family in speeds if ends[family][0]), key=lambda f: statistics.mean(ends[f][0]))
    figure = Figure(figsize=(8, 0.42 * len(order) + 1.5), layout="constrained")
    axes = figure.subplots()
    for row, family in enumerate(order):
        means = [statistics.mean(top1) for top1 in ends[family] if top1]
        axes.plot(means, [row] * len(means), color=GREY, linewidth=1, zorder=1)
        for color, top1 in zip((ORANGE, BLUE), ends[family], strict=True):
            if top1:
                axes.plot(statistics.mean(top1), row, "o", color=color, markersize=8)
            if len(top1) > 1:
                axes.plot(top1, [row] * len(top1), "|", color=color, markersize=13)
    axes.set_yticks(range(len(order)), [f"{family}  {speeds[family]['params'] / 1e6:.2f} M" for family in order])
    axes.set_xlabel("test top-1 in %, trained on 5,000 images (orange) and on 59,000 (blue)")
    axes.set_title("Fashion-MNIST in five minutes of two CPU cores")
    axes.grid(axis="y", visible=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "train", "distil", "draw"])
    parser.add_argument("--work", type=Path, default=Path("runs/families"), help="folder for data and runs")
    parser.add_argument("--seconds", type=int, default=15, help="of training in each round of `speed`")
    parser.add_argument("--threads", type=int, help="of every process; without, as many as there are cores")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    if asked.what == "speed":
        speed(asked.work, asked.seconds)
    elif asked.what == "draw":
        draw()
    elif asked.what == "train":
        for trial in TRIALS:
            train(asked.work, trial)
    else:
        for trial in DISTILLED:
            train(asked.work, trial)
            measure_unseen(asked.work, trial)


if __name__ == "__main__":
    main()
