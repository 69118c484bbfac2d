"""Every family's small model on Fashion-MNIST: five minutes on two cores, with 59,000 and with 5,000 images.

    python benchmarks/families.py speed                      # on an otherwise idle machine
    python benchmarks/families.py train                      # all missing runs of the table
    python benchmarks/families.py distil                     # DeiT with and without a teacher, likewise
    python benchmarks/families.py draw                       # figures and tables of docs/models.md and docs/distill.md

`speed` trains the models in turn for a short time and times their forward passes. `train` trains every model for the
number of images that it would see in five minutes at that speed, so the result does not depend on the load of the
machine and is reproducible bit for bit. All other settings are those of `vitrail train --model FAMILY` with the recipe
`small`, which was tuned for the ViT; no family has its own.

Of the 60,000 training images 1,000 are held out to select the best epoch, and 5,000 of the rest are the small set. The
10,000 test images are used once, at the end. Teacher and students, which differ little, are also evaluated on the other
54,000 training images, which none of them has seen.

Results are written to `benchmarks/results/families.json`. Several processes may `train` at once, with fewer
`--threads` each; after a killed process, delete its `.taken` file to repeat the run.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the vitrail command, before torch is imported

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
    """One run: a family's small model on one of the sets, optionally with a teacher trained on the same set."""

    family: str
    images: int
    seed: int
    teacher: str = ""  # name of the teacher's run
    distill: str = ""  # hard or soft
    budget: int = BUDGET  # in seconds

    @property
    def name(self) -> str:
        longer = f"-{self.budget // 60}m" if self.budget != BUDGET else ""
        taught = f"-{self.distill}-from-{self.teacher}" if self.teacher else ""
        return f"{self.family}-{self.images}-{self.seed}{longer}{taught}"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `vitrail train` besides data, model and length; all others are the recipe's."""
        tau = {"distill_tau": TAU} if self.distill == "soft" else {}
        return {"seed": self.seed} | ({"distill": self.distill} | tau if self.teacher else {})


COMPARED = ("vit", "hybrid", "bit")  # compared in the paper, and here with three seeds
OTHERS = ("deit", "swin", "mixer", "coatnet", "pvt", "pvt_v2")
# In order of importance.
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
    """Training image numbers: first the held-out ones, then the small set, then the rest."""
    return np.random.default_rng(0).permutation(count)


def data(work: Path, images: int) -> Path:
    """The file with `images` training images, the held-out images and the test images."""
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
    """The file with the training images outside the small set and the hold-out."""
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
    """Images per second in training and inference: medians over rounds in which the families take turns."""
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
    """Images per second of the forward pass."""
    images = torch.rand(batch, model.config.channels, *model.config.img_size)
    for _ in range(3):
        model(images)
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        model(images)
        count += 1
    return count * batch / (time.monotonic() - begun)


def train(work: Path, trial: Trial) -> None:
    """Trains and evaluates a run, unless it is done or claimed by another process."""
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
    """Evaluates a run on the small set by images outside its splits, unless it is done.

    Both the saved weights, of the best epoch, and the last ones: 1,000 held-out images are too few to rank similar
    epochs.
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
    """The results so far, locked for update by one process at a time."""
    RESULTS.parent.mkdir(exist_ok=True)
    with (RESULTS.parent / ".families.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"speed": {}, "runs": {}}
        yield found
        write_text(RESULTS, json.dumps(found, indent=1) + "\n")


def draw() -> None:
    """Saves the figures and prints the tables as Markdown."""
    found = json.loads(RESULTS.read_text())
    runs = [run for run in found["runs"].values() if run["budget"] == BUDGET]  # not the teacher
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
    methods = _distillation(found["runs"])
    for name, measured in methods.items():
        print(f"| {name} | {' | '.join(map(_spread, measured))} |")
    with mpl.rc_context(STYLE):
        save(_figure(found["speed"], ends), FIGURES / "families.png")
        save(_distilled(methods), FIGURES / "distill.png")


def _distillation(runs: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Top-1 of the teacher and of the students by method: test images, unseen images, unseen with the last weights."""
    found = {}
    for name, trials in (
        ("the teacher, BiT", [TEACHER]),
        ("without a teacher", [trial for trial in DISTILLED if trial.family == "deit" and not trial.distill]),
        ("hard labels, `hard`", [trial for trial in DISTILLED if trial.distill == "hard"]),
        (f"soft labels, `soft` at {TAU:g}", [trial for trial in DISTILLED if trial.distill == "soft"]),
    ):
        finished = [runs[trial.name] for trial in trials if "last" in runs.get(trial.name, ())]
        found[name] = [[100 * run[measure] for run in finished] for measure in ("top1", "unseen", "last")]
    return found


def _distilled(methods: dict[str, list[list[float]]]) -> Figure:
    """One row for the teacher and for each kind of student; every seed is a tick."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    shown = [(name.replace("`", ""), top1) for name, (_, _, top1) in methods.items() if top1][::-1]
    for row, (_, top1) in enumerate(shown):
        axes.plot(statistics.mean(top1), row, "o", color=GREY if row == len(shown) - 1 else BLUE, markersize=8)
        if len(top1) > 1:
            axes.plot(top1, [row] * len(top1), "|", color=INK, markersize=9)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("top-1 in % after the last epoch, on 54,000 unseen images")
    axes.set_title("DeiT on 5,000 images, without and with a teacher trained on the same images")
    axes.grid(axis="y", visible=False)
    return figure


def _spread(top1: list[float]) -> str:
    """The mean, with the range if there are several seeds."""
    if not top1:
        return "not measured"
    mean = f"{statistics.mean(top1):.2f} %"
    return mean if len(top1) == 1 else f"{mean} ({min(top1):.2f} to {max(top1):.2f}, {len(top1)} seeds)"


def _figure(speeds: dict[str, Any], ends: dict[str, list[list[float]]]) -> Figure:
    """One line per family from its accuracy with few images to that with many; every seed is a tick."""
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
    parser.add_argument("--seconds", type=int, default=15, help="training time per round of `speed`")
    parser.add_argument("--threads", type=int, help="threads per process (default: all cores)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.what == "speed":
        speed(args.work, args.seconds)
    elif args.what == "draw":
        draw()
    elif args.what == "train":
        for trial in TRIALS:
            train(args.work, trial)
    else:
        for trial in DISTILLED:
            train(args.work, trial)
            measure_unseen(args.work, trial)


if __name__ == "__main__":
    main()
