"""Self-supervised pre-training on few labels: every method against training from scratch, on Fashion-MNIST.

    python benchmarks/pretrain.py ratio                       # on an otherwise idle machine
    python benchmarks/pretrain.py mae dino --seeds 0 1 2      # pre-train, then fine-tune and probe
    python benchmarks/pretrain.py scratch small --seeds 0 1 2
    python benchmarks/pretrain.py draw

`ratio` times training steps of MAE and of supervised training, with the same ViT-Ti/16, in turn.

Every method pre-trains for 10 minutes on the 60,000 training images without labels, and is then fine-tuned for 2
minutes on 1 %, 10 % and 100 % of the labels, a stratified sample by seed. `scratch` is `vitrail train` with the same
labels for 12 minutes, `small` for 2. Accuracies are of 9,800 test images: fine-tuned, and by k-NN and a linear probe on
frozen features, fitted to the same labels. The other 200 test images are each run's validation images. Minutes are
CPU minutes of one core: a run has one thread, so that two runs can share two cores; `cpu_clock.py` says how much the
load matters. The first seed of a contestant finds how many epochs fit; its other seeds train as many, on any machine.
On another machine, a minute is as long as the epochs take there that MAE trained in a minute on the first: pre-train
`mae` with seed 0 before a new contestant. Fine-tuning takes as long after every method, so its epochs are those of the
method that was measured first.

`--longer 4` trains everything for four times the epochs. `--data PHOTOS --img-size 128 --labels 50` does the same on a
folder of photographs, with 50 labels in all.
Results are added to `benchmarks/results/pretrain.json`; finished parts are not repeated. `draw` makes the figures and
the table of docs/pretrain.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.runs.run import Run
    from vitrail.studies.rule import Estimate

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the vitrail command, before torch is imported

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "pretrain.json"
FIGURE = HERE.parent / "docs" / "images" / "pretrain.png"
METHODS = ("masked", "mae", "simmim", "dino", "lejepa")
BASELINES = {"scratch": 12.0, "small": 2.0}  # minutes
PRETRAINING, TUNING = 10.0, 2.0
FASHION = "fashion-mnist"
_TITLES = {"scratch": "scratch, 12 minutes", "small": "scratch, 2 minutes"}

Record = dict[str, Any]


def labelled(data: str, share: float | int, seed: int, folder: Path) -> Path:
    """A data set with a stratified sample of the labelled training images.

    200 of the validation images, at most a tenth, are "val", for the curves and the choice of the epoch; the others are
    "test".
    """
    import numpy as np

    from vitrail.data import open_data
    from vitrail.data.dataset import ArraySplit, FileSplit
    from vitrail.data.holdout import stratify

    opened = open_data(data)
    train, val = opened.splits["train"], opened.splits["val"]
    count = round(share * len(train)) if isinstance(share, float) else share
    chosen = np.arange(len(train))
    if count < len(train):
        chosen = stratify(train.targets, count / len(train), seed)[1]
    test, few = stratify(val.targets, min(0.1, 200 / len(val)), 0)
    if isinstance(train, ArraySplit) and isinstance(val, ArraySplit):
        file = folder / f"{opened.name}.npz"
        parts = {"train": (train, chosen), "val": (val, few), "test": (val, test)}
        arrays = {f"x_{name}": split.pixels[rows] for name, (split, rows) in parts.items()}
        np.savez(file, **arrays, **{f"y_{name}": split.targets[rows] for name, (split, rows) in parts.items()})
        return file
    assert isinstance(train, FileSplit)
    assert isinstance(val, FileSplit)
    file = folder / f"{opened.name}.csv"
    parts = (("train", train, chosen), ("val", val, few), ("test", val, test))
    rows = [
        f"{Path(split.paths[i]).resolve()},{opened.classes[split.targets[i]]},{name}"
        for name, split, numbers in parts
        for i in numbers
    ]
    file.write_text("\n".join(["image,label,split", *rows]) + "\n")
    return file


def ratio(rounds: int = 7) -> Record:
    """Images per second of MAE's training steps and of supervised ones, for the same ViT-Ti/16, taking turns."""
    import numpy as np
    import torch

    from vitrail.config import override
    from vitrail.data import ArraySplit, Data
    from vitrail.device import keep_freed_memory
    from vitrail.tasks import Multiclass, task_type
    from vitrail.tasks.objective import Batch
    from vitrail.train.optim import build_optimizers
    from vitrail.train.prepare import prepare
    from vitrail.train.resolve import resolve

    keep_freed_memory()
    pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (1000, 224, 224, 3))
    images, labels = torch.randn(32, 3, 224, 224), torch.eye(1000)[torch.arange(32)]
    steps: dict[str, Callable[[], None]] = {}
    for name in ("train", "mae"):
        task = Multiclass(tuple(map(str, range(1000)))) if name == "train" else task_type(name)()
        targets = np.zeros(1000, np.int64) if name == "train" else np.zeros((1000, 0), np.float32)
        split = ArraySplit(pixels, targets, "made-up")
        data = Data("made-up", task, {"train": split, "val": split}, (224, 224), 3, ())
        given = {"model": "vit_ti16", "img_size": 224, "device": "cpu", "opt": "adamw"}
        config = override(resolve("made-up", data, given), {"amp": "off"})
        model, _ = prepare(config, data)
        objective = task.objective(model.train(), config, targets)
        optimizers = build_optimizers(model, config.optim, False, objective.added().values())

        def step(objective: Any = objective, optimizers: Any = optimizers, wide: bool = name == "train") -> None:
            batch = Batch(images, labels if wide else torch.zeros(32, 0), torch.arange(32))
            objective(batch)["loss"].backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        steps[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, take in steps.items():
            begun = time.perf_counter()
            take()
            if number:  # the first is slow
                seconds[name].append(time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(seconds["train"], seconds["mae"], strict=True)]
    return {
        "images_per_second": {name: round(32 / statistics.median(times), 2) for name, times in seconds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def length(key: str, minutes: float, before: list[Record], longer: float) -> Record:
    """The setting that ends a run: as many epochs as in the records of other seeds, or a time budget."""
    from cpu_clock import budget

    if before:
        return {"epochs": longer * before[0][key]}
    return {"time_budget": budget(longer * minutes, cores=1)}


def pace(out: Path) -> float:
    """How long a minute of the first machine is here, by the time that MAE takes for the same epochs."""
    from vitrail.runs.run import Run

    run = Run(out / "mae-0")
    return float(run.history[-1]["seconds"]) / 60 / PRETRAINING if run.exists and run.finished else 1.0


def pretrained(out: Path, data: str, who: str, seed: int, longer: float) -> Path:
    """Where a pre-trained model is kept."""
    name = f"{who}-{seed}" if data == FASHION else f"{Path(data).name}-{who}-{seed}"
    return out / (name if longer == 1 else f"{name}-{longer:g}x")


def trained_epochs(run: Run) -> float:
    """The epochs of a run, with the share of the last one that fitted its time."""
    steps = max(len(run.data().splits["train"]) // run.config.optim.batch_size, 1)
    return round(run.history[-1]["step"] / steps, 3)


def measure(who: str, data: str, share: float | int, seed: int, how: Record, runs: list[Record]) -> Record:
    """Accuracies of one contestant with a share of the labels; pre-trained models are kept in `how["out"]`.

    `runs` are the records of what was measured before.
    """
    import vitrail
    from vitrail.runs.run import Run

    out, longer = Path(how["out"]), how["longer"]
    runs = [run for run in runs if run["data"] == Path(data).name and "longer" not in run]
    same = [run for run in runs if run["who"] == who]
    alike = [run for run in runs if run["share"] == share and run["who"] in (METHODS if who in METHODS else (who,))]
    settings = {name: value for name, value in how.items() if name not in ("out", "longer")}
    settings |= {"seed": seed, "amp": "off"}  # the same arithmetic on every machine
    with tempfile.TemporaryDirectory() as folder:
        labels = labelled(data, share, seed, Path(folder))
        minutes = BASELINES.get(who, TUNING) * pace(out)
        given: Record = settings | length("epochs", minutes, alike, longer) | {"out": folder}
        record: Record = {"who": who, "data": Path(data).name, "share": share, "seed": seed}
        record |= {"longer": longer} if longer != 1 else {}
        if who in METHODS:
            run = pretrained(out, data, who, seed, longer)
            if not (Run(run).exists and Run(run).finished):
                first = settings | length("pretraining_epochs", PRETRAINING * pace(out), same, longer)
                vitrail.pretrain(data, method=who, **first, out=out, name=run.name)
            record["pretraining_epochs"] = trained_epochs(Run(run))
            given |= {"weights": run}
            for method in ("knn", "linear"):
                probe = vitrail.evaluate(run, labels, method=method, split="test", out=Path(folder) / method)
                record[method] = probe.top1
        trained = vitrail.train(labels, **given)
        tuned = vitrail.evaluate(trained, split="test").top1
        return record | {"tuned": tuned, "epochs": trained_epochs(Run(trained.path))}


def gain(runs: list[Record], who: str, share: float | int) -> Estimate | None:
    """What a method gains over training from scratch, paired by seed: both have the same labelled images."""
    from vitrail.studies.rule import difference

    tuned = {(run["who"], run["seed"]): run["tuned"] for run in runs if run["share"] == share}
    seeds = [seed for name, seed in tuned if name == who and ("scratch", seed) in tuned]
    return difference([tuned[who, n] for n in seeds], [tuned["scratch", n] for n in seeds]) if seeds else None


def draw(out: Path) -> None:
    """Saves the figures and prints the tables as Markdown. Reconstructions are those of the runs of seed 0 in `out`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    from vitrail.charts.style import BLUE, GREY, STYLE, save

    for who in METHODS:
        if (drawn := out / f"{who}-0" / "reconstruction.png").exists():
            shutil.copy(drawn, FIGURE.with_name(f"pretrain-{who}.png"))
    runs = json.loads(RESULTS.read_text())["runs"]
    for name, longer in dict.fromkeys((run["data"], run.get("longer", 1)) for run in runs):
        those = [run for run in runs if (run["data"], run.get("longer", 1)) == (name, longer)]
        print(f"\n{name}" + (f", {longer:g} times the epochs" if longer != 1 else ""))
        tables(those)
    runs = [run for run in runs if "longer" not in run]
    with mpl.rc_context(STYLE):
        shares = sorted({run["share"] for run in runs if run["data"] == FASHION})
        names = [who for who in (*BASELINES, *METHODS) if any((r["data"], r["who"]) == (FASHION, who) for r in runs)]
        ranges = {
            share: [100 * r["tuned"] for r in runs if (r["data"], r["share"]) == (FASHION, share)] for share in shares
        }
        span = max(max(values) - min(values) for values in ranges.values()) + 0.6  # the same for all panels
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, share in zip(figure.subplots(1, len(shares), sharey=True), shares, strict=True):
            for row, who in enumerate(names):
                ends = [100 * r["tuned"] for r in runs if (r["data"], r["who"], r["share"]) == (FASHION, who, share)]
                if not ends:
                    continue
                colour = GREY if who in BASELINES else BLUE
                axes.plot(ends, [row] * len(ends), "o", color=colour, markersize=4, alpha=0.6)
                axes.plot(statistics.mean(ends), row, "|", color=colour, markersize=16, markeredgewidth=2)
                if who == "scratch":
                    axes.axvline(statistics.mean(ends), color=GREY, linewidth=0.8, linestyle=":")
            axes.set_title(f"{share:.0%} of the labels", pad=8)
            axes.set_xlabel("test top-1 in %")
            axes.set_yticks(range(len(names)), [_TITLES.get(who, who) for who in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            middle = (max(ranges[share]) + min(ranges[share])) / 2
            axes.set_xlim(middle - span / 2, middle + span / 2)
            axes.xaxis.set_major_locator(MultipleLocator(1))
        save(figure, FIGURE)


def tables(runs: list[Record]) -> None:
    """Prints the accuracies and what they gain over training from scratch."""
    shares = sorted({run["share"] for run in runs})
    titles = [f"{share:.0%}" if isinstance(share, float) else f"{share} labels" for share in shares]
    print(f"\n| | {' | '.join(f'{title}: fine-tuned (seeds) | linear | k-NN' for title in titles)} |")
    print(f"|---|{'---|' * (3 * len(shares))}")
    names = [who for who in (*BASELINES, *METHODS) if any(run["who"] == who for run in runs)]
    for who in names:
        cells = []
        for share in shares:
            found = [run for run in runs if (run["who"], run["share"]) == (who, share)]
            for kind in ("tuned", "linear", "knn"):
                values = [100 * run[kind] for run in found if kind in run]
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                seeds = f" ({len(values)})" if kind == "tuned" else ""
                cells.append(f"{statistics.mean(values):.1f}{spread}{seeds}" if values else "")
        print(f"| {who} | {' | '.join(cells)} |")
    print(f"\n| fine-tuned, minus scratch | {' | '.join(titles)} |\n|---|{'---|' * len(shares)}")
    for who in (who for who in names if who in METHODS):
        gains = [gain(runs, who, share) for share in shares]
        print(f"| {who} | {' | '.join('' if each is None else each.text() for each in gains)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["ratio", *METHODS, *BASELINES, "draw"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data", default=FASHION)
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.1, 1.0], help="of the labels")
    parser.add_argument("--labels", type=int, help="labelled images in all, instead of --shares")
    parser.add_argument("--longer", type=float, default=1.0, help="times the epochs")
    parser.add_argument("--batch-size", type=int, help="another batch size; the results are printed, not kept")
    parser.add_argument("--runs", default="runs/pretrain", help="where pre-trained models are kept")
    args = parser.parse_args()
    if args.batch_size and set(args.what) & set(METHODS):
        parser.error("--batch-size is for scratch and small: a pre-trained model is kept for later runs")
    known: Record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"ratio": {}, "runs": []}
    settings = {name: value for name in ("img_size", "batch_size") if (value := getattr(args, name))}
    name = Path(args.data).name
    if args.what == ["draw"]:
        draw(Path(args.runs))
        return
    if args.what == ["ratio"]:
        known["ratio"] = ratio()
        print(known["ratio"])
        write(known)
        return
    shares: list[float | int] = [args.labels] if args.labels else args.shares
    for seed in args.seeds:
        for who in args.what:
            for share in shares:
                keys = ("who", "data", "share", "seed")
                done = [(*(run[key] for key in keys), run.get("longer", 1)) for run in known["runs"]]
                if args.batch_size or (who, name, share, seed, args.longer) not in done:
                    how = settings | {"out": args.runs, "longer": args.longer}
                    record = measure(who, args.data, share, seed, how, [] if args.batch_size else known["runs"])
                    print(record, flush=True)
                    if args.batch_size:
                        continue
                    known = json.loads(RESULTS.read_text())  # others may have written meanwhile
                    known["runs"].append(record)
                    write(known)


def write(results: Record) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
