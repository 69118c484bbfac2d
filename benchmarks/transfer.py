"""Transfer learning: a ViT pre-trained on eight classes of Fashion-MNIST, and 20 images of the other two.

    python benchmarks/transfer.py confused                 # how the pairs of unseen classes were chosen
    python benchmarks/transfer.py pretrain --pair tops     # 50,000 images of the 8 other classes
    python benchmarks/transfer.py target --pair tops       # the 2 unseen classes, with every method
    python benchmarks/transfer.py resize --pair tops       # from 28 to 42 pixels
    python benchmarks/transfer.py draw                     # the figure and the tables of docs/transfer.md

Data and runs are stored in the folder `--work`. `--pair shoes` holds out another pair of classes. Results are added to
`benchmarks/results/transfer.json`; those already there are not measured again. Run one process at a time.

Nothing is selected on the test images. Every setting is a recipe's default of that time or fixed below. A run
validates on its own 20 images, keeps the last of its best epochs, and is tested once, at its end. From scratch, three
settings are measured, and the best of them is compared. `finetune` had 50 epochs when this was measured; because of
these results it now takes at least 200 steps.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

import vitrail
from vitrail.charts.style import BLUE, GREY, INK, ORANGE, SKY, STYLE, save
from vitrail.data import open_data
from vitrail.evaluate import fewshot, knn, linear
from vitrail.files import write_text
from vitrail.weights import open_run
from vitrail.weights import save as save_model

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "transfer.json"
FIGURE = HERE.parent / "docs" / "images" / "transfer.png"

# The two classes that k-NN on pixels confuses most, and two kinds of shoes: see `confused`.
PAIRS = {"tops": ("T-shirt/top", "Shirt"), "shoes": ("Sandal", "Ankle boot")}
MODEL = "vit_nano7"  # its patches divide both 28 and 42 pixels
IMAGES, EPOCHS = 50_000, 6  # of pre-training; the rest is the recipe's
PER_CLASS, SHOTS = 10, (1, 5, 10)
K = 5  # of 20 images; with the default, 20, all of them would vote
DRAWS = 5

# What the recipe `finetune` was when this was measured.
FORMER: dict[str, Any] = {"head_init": "zero", "body_lr": 0.1, "layer_decay": 0.85}
# Arguments of `vitrail.train` besides the data, with --weights and from scratch; all others are the recipe's.
TUNED: dict[str, dict[str, Any]] = {
    "fine-tuned": {"epochs": 50},
    "LoRA": {"epochs": 50, "lora_rank": 8},
    "head only": {"epochs": 50, "freeze": "all"},
    "fine-tuned, 200 epochs": {"epochs": 200},
}
SCRATCH: dict[str, dict[str, Any]] = {
    "scratch": {"model": MODEL},
    "scratch, 200 epochs": {"model": MODEL, "epochs": 200},
    "scratch, 200 epochs, lr 0.0005": {"model": MODEL, "epochs": 200, "lr": 5e-4},
}

# Ways to get position embeddings for a 6x6 grid, and the images and epochs of fine-tuning with them.
POSITIONS = ("bicubic", "linear", "repeated", "zero", "fresh")
LARGE, LARGE_IMAGES, LARGE_EPOCHS = 42, 3_200, 4

Record = dict[str, Any]
Array = NDArray[Any]


# Data


def everything() -> tuple[Array, Array, int]:
    """All images of Fashion-MNIST, their class names, and the number of training images."""
    data = open_data("fashion-mnist")
    train, test = data.splits["train"], data.splits["test"]
    names = np.array(data.classes)[np.concatenate([train.targets, test.targets])]
    return np.concatenate([train.pixels, test.pixels]), names, len(train)


def eight(pair: str, folder: Path, images: int) -> Path:
    """The data for pre-training: 56,000 images of the eight other classes, of which 6,000 are for validation."""
    pixels, names, _ = everything()
    rows = np.random.default_rng(0).permutation(np.flatnonzero(~np.isin(names, PAIRS[pair])))
    train, val = rows[:images], rows[IMAGES:]
    return write(folder / "eight.npz", train=(pixels[train], names[train]), val=(pixels[val], names[val]))


def two(pair: str, folder: Path, draw: int) -> Path:
    """The target data: 20 training images of the two unseen classes, and all their 2,000 test images."""
    pixels, names, count = everything()
    rng = np.random.default_rng([1, draw])
    few = np.concatenate([rng.permutation(np.flatnonzero(names[:count] == name))[:PER_CLASS] for name in PAIRS[pair]])
    test = count + np.flatnonzero(np.isin(names[count:], PAIRS[pair]))
    train = pixels[few], names[few]
    return write(folder / f"two-{draw}.npz", train=train, val=train, test=(pixels[test], names[test]))


def write(file: Path, **splits: tuple[Array, Array]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"x_{split}": x for split, (x, _) in splits.items()} | {
        f"y_{split}": y for split, (_, y) in splits.items()
    }
    np.savez(file, **arrays)
    return file


# Measurements


def pretrain(pair: str, folder: Path, images: int, epochs: int) -> Iterator[Record]:
    """The pre-training run; resumed if it was stopped."""
    run = folder / "pretrained"
    if (run / "config.yaml").exists():
        vitrail.train(resume=run)
    else:
        vitrail.train(eight(pair, folder, images), model=MODEL, epochs=epochs, out=folder, name=run.name)
    yield {"method": "pre-training", "images": images, "epochs": epochs, "top1": curve(run)}


def target(pair: str, folder: Path, draw: int, known: set[str]) -> Iterator[Record]:
    """All methods, with the same 20 images."""
    data = two(pair, folder, draw)
    if "k-NN" not in known:
        yield from ({"method": method, "top1": top1} for method, top1 in probes(folder / "pretrained", data))
    if "k-NN, pixels" not in known:
        yield from ({"method": method, "top1": top1} for method, top1 in controls(data, draw))
    for method, settings in (TUNED | SCRATCH).items():
        if method not in known:
            weights = {"weights": folder / "pretrained", **FORMER} if method in TUNED else {}
            run = vitrail.train(data, **weights, **settings, seed=draw, out=folder, name="target", overwrite=True)
            yield {"method": method, "top1": vitrail.evaluate(run, data, split="test").top1}


def probes(run: Path, data: Path) -> Iterator[tuple[str, float]]:
    """Simple classifiers on the features of the pre-trained model."""
    yield "linear", vitrail.evaluate(run, data, method="linear", split="test").top1
    yield "k-NN", vitrail.evaluate(run, data, method="knn", split="test", k=K).top1
    for result in vitrail.evaluate(run, data, method="fewshot", split="test", shots=SHOTS, draws=1).shots:
        yield f"few-shot {result.shots}", result.mean


def controls(data: Path, draw: int) -> Iterator[tuple[str, float]]:
    """The same classifiers on pixels, and on features of a randomly initialised model."""
    torch.manual_seed(draw)
    model = vitrail.create(MODEL, img_size=28, channels=1, classes=2).eval()
    with np.load(data) as arrays:
        x, test = (
            torch.from_numpy(arrays[name] / np.float32(127.5) - 1).movedim(-1, 1) for name in ("x_train", "x_test")
        )
        y, truth = (np.unique(arrays[name], return_inverse=True)[1] for name in ("y_train", "y_test"))
    with torch.inference_mode():
        features = {"pixels": (x.flatten(1), test.flatten(1)), "untrained": (model.embed(x), model.embed(test))}
    for name, (own, others) in features.items():
        yield f"linear, {name}", linear(own, y, others, truth).top1
        yield f"k-NN, {name}", knn(own, y, others, truth, k=K).top1
        for result in fewshot(own, y, others, truth, shots=SHOTS, draws=1).shots:
            yield f"few-shot {result.shots}, {name}", result.mean


def resize(folder: Path, positions: str) -> Record:
    """Accuracy of the pre-trained model at 42 pixels, before and after each epoch of fine-tuning on a few images."""
    with np.load(folder / "eight.npz") as arrays:
        splits = {split: (arrays[f"x_{split}"], arrays[f"y_{split}"]) for split in ("train", "val")}
    x, y = splits["train"]
    data = write(folder / "some.npz", train=(x[:LARGE_IMAGES], y[:LARGE_IMAGES]), val=splits["val"])
    model = enlarge(folder / "pretrained", folder / f"positions-{positions}", positions)
    before = vitrail.evaluate(model, data, split="val").top1
    how = {"weights": model, "epochs": LARGE_EPOCHS, **FORMER}
    run = vitrail.train(data, **how, out=folder, name="larger", overwrite=True)
    return {"method": f"positions {positions}", "top1": [before, *curve(run)]}


def enlarge(run: Path, out: Path, positions: str) -> Path:
    """The model of a run for larger images, with position embeddings made in one of the ways of POSITIONS."""
    resampled = positions in ("bicubic", "linear")
    model, card = open_run(run, img_size=LARGE, **({"resample": positions} if resampled else {}))
    if not resampled:
        old, side = vitrail.load(run), model.config.grid[0]
        grid = old.pos_embed.detach().reshape(*old.config.grid, -1)
        torch.manual_seed(0)
        made = {
            "repeated": grid.repeat(2, 2, 1)[:side, :side],
            "zero": torch.zeros(side, side, grid.shape[-1]),
            "fresh": 0.02 * torch.randn(side, side, grid.shape[-1]),  # as initialised
        }
        model.pos_embed.data = made[positions].reshape(model.pos_embed.shape)
    out.mkdir(exist_ok=True)
    save_model(out / "model.safetensors", model, card)
    return out


def curve(run: Path) -> list[float]:
    """The validation accuracy after every epoch of a run."""
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["val_top1"]) for row in csv.DictReader(file)]


def confused() -> None:
    """Prints the pairs of classes that k-NN on pixels confuses most: 10,000 training images by 50,000."""
    pixels, names, count = everything()
    classes, numbers = np.unique(names[:count], return_inverse=True)
    x = pixels[:count].reshape(count, -1) / np.float32(255)
    counts = knn(x[10_000:], numbers[10_000:], x[:10_000], numbers[:10_000], list(classes)).confusion
    share = (counts + counts.T) / (counts.sum(1)[:, None] + counts.sum(1))
    for i, j in sorted(zip(*np.triu_indices(len(classes), 1), strict=True), key=lambda at: -share[at])[:8]:
        print(f"{share[i, j]:.1%}  {classes[i]}, {classes[j]}")


# Results


def known() -> list[Record]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def keep(record: Record, dry: bool) -> None:
    print(record, flush=True)
    if dry:
        return
    lines = ",\n".join(json.dumps(one) for one in [*known(), record])
    write_text(RESULTS, f"[\n{lines}\n]\n")


# The rows of the figure, in groups: label, and method in the results.
GROUPS = {
    (BLUE, "pre-trained on the 8 other classes"): {
        "fine-tuned, 200 epochs": "fine-tuned, 200 epochs",
        "fine-tuned, 50 epochs": "fine-tuned",
        "LoRA, rank 8": "LoRA",
        "head only": "head only",
        "linear probe": "linear",
        f"k-NN, k = {K}": "k-NN",
        "few-shot, 10 images a class": "few-shot 10",
        "few-shot, 5 images a class": "few-shot 5",
        "few-shot, 1 image a class": "few-shot 1",
    },
    (ORANGE, "trained on these 20 images alone"): {"from scratch": "best scratch"},
    (GREY, "pixels, no network"): {
        "linear probe": "linear, pixels",
        f"k-NN, k = {K}": "k-NN, pixels",
        "few-shot, 10 images a class": "few-shot 10, pixels",
    },
    ("#999999", "untrained network"): {
        "linear probe": "linear, untrained",
        f"k-NN, k = {K}": "k-NN, untrained",
        "few-shot, 10 images a class": "few-shot 10, untrained",
    },
}

Accuracies = dict[str, list[float]]  # of every draw, by method


def draw() -> None:
    """Saves the figure and prints the tables as Markdown."""
    found: dict[str, Accuracies] = {}
    for record in known():
        if "draw" in record:
            found.setdefault(record["pair"], {}).setdefault(record["method"], []).append(record["top1"])
    table(found)
    with mpl.rc_context(STYLE | {"axes.titlepad": 10}):
        figure = Figure(figsize=(3.6 + 3.4 * len(found) + 1.4, 5.4), layout="constrained")
        *panels, last = figure.subplots(1, len(found) + 1, width_ratios=[1] * len(found) + [0.85])
        for axes, (pair, results) in zip(panels, found.items(), strict=True):
            dots(axes, results, named=axes is panels[0])
            axes.set_title(f"20 images: {' or '.join(PAIRS[pair])}?")
        larger(last)
        save(figure, FIGURE)


def table(found: dict[str, Accuracies]) -> None:
    print(f"| | {' | '.join(' or '.join(PAIRS[pair]) for pair in found)} |\n|---{'|---' * len(found)}|")
    for method in next(iter(found.values())):
        cells = [
            f"{100 * np.mean(top1):.1f} ± {100 * np.std(top1, ddof=1):.1f} % ({len(top1)})"
            for results in found.values()
            if len(top1 := results.get(method, [])) > 1
        ]
        print(f"| {method} | {' | '.join(cells)} |")
    for record in known():
        if "draw" not in record:
            values = " | ".join(f"{top1:.2%}" for top1 in record["top1"])
            print(f"| {record['pair']}: {record['method']} | {values} |")


def dots(axes: Axes, found: Accuracies, named: bool) -> None:
    """One row per method: a dot for each draw of 20 images, with mean and standard deviation."""
    best = max((name for name in SCRATCH if name in found), key=lambda name: np.mean(found[name]))
    row, names = 0.0, {}
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for (color, title), methods in GROUPS.items():
        axes.text(0.26, row, title, color=color, fontsize=8.5, fontweight="bold", va="center", bbox=background)
        for name, method in methods.items():
            row -= 1
            names[row] = name
            top1 = np.array(found.get(best if method == "best scratch" else method, [np.nan]))
            axes.scatter(top1, np.full(len(top1), row), s=16, color=color, alpha=0.4, linewidths=0)
            spread = top1.std(ddof=1) if len(top1) > 1 else 0
            axes.errorbar(top1.mean(), row, xerr=spread, color=color, marker="o", markersize=6, elinewidth=1.4)
            axes.text(1.08, row, f"{100 * top1.mean():.1f}", color=color, fontsize=8.5, va="center", ha="right")
            if method == "best scratch":
                axes.axvline(top1.mean(), color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        row -= 1.3
    axes.set_yticks(list(names), list(names.values()) if named else [""] * len(names), color=INK)
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0.25, 1.09), ylim=(row + 0.7, 0.6), xlabel="accuracy on 2,000 test images")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def larger(axes: Axes) -> None:
    """Accuracy at 42 pixels over the steps of fine-tuning, for each kind of position embeddings."""
    styles = {
        "bicubic": (BLUE, "-", "resampled, bicubic"),
        "linear": (SKY, "--", "resampled, linear"),
        "repeated": (GREY, "-", "tiled"),
        "zero": (INK, ":", "zero"),
        "fresh": (ORANGE, "-", "re-initialised"),
    }
    for record in known():
        if record["method"] == "pre-training" and record["pair"] == "tops":
            axes.axhline(
                record["top1"][-1], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="28 px, for comparison"
            )
        elif record["method"].startswith("positions"):
            color, line, name = styles[record["method"].split()[1]]
            steps = np.arange(len(record["top1"])) * (LARGE_IMAGES // 128)
            axes.plot(steps, record["top1"], line, color=color, marker="o", markersize=4, label=name)
    axes.set_title(f"Positions from 28 to {LARGE} pixels")
    axes.set_xlabel("steps of fine-tuning at the new size")
    axes.set_ylabel("accuracy on 6,000 images of 8 classes")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["confused", "pretrain", "target", "resize", "draw"])
    parser.add_argument("--pair", choices=PAIRS, default="tops")
    parser.add_argument("--work", type=Path, default=Path("transfer"))
    parser.add_argument("--images", type=int, default=IMAGES, help="images for pre-training")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of pre-training")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--dry", action="store_true", help="do not save the results")
    args = parser.parse_args()
    folder = args.work / args.pair
    mine = [record for record in known() if record["pair"] == args.pair]
    if args.what == "confused":
        confused()
    elif args.what == "pretrain":
        for record in pretrain(args.pair, folder, args.images, args.epochs):
            keep({"pair": args.pair} | record, args.dry)
    elif args.what == "target":
        for number in range(args.draws):
            done = {record["method"] for record in mine if record.get("draw") == number}
            for record in target(args.pair, folder, number, done):
                keep({"pair": args.pair, "draw": number} | record, args.dry)
    elif args.what == "resize":
        done = {record["method"] for record in mine}
        for positions in POSITIONS:
            if f"positions {positions}" not in done:
                keep({"pair": args.pair} | resize(folder, positions), args.dry)
    else:
        draw()


if __name__ == "__main__":
    main()
