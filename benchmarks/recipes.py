"""Accuracy of the recipe `small` in a given time, against a ViT of the same size trained with timm.

    python benchmarks/recipes.py speed                                        # on an otherwise idle machine
    python benchmarks/recipes.py vitrail 3m 10m --seeds 0 1 2
    python benchmarks/recipes.py timm-light 10m --lr 2e-3
    python benchmarks/recipes.py speed --data PHOTOS --img-size 128
    python benchmarks/recipes.py vitrail 30m --data PHOTOS --img-size 128
    python benchmarks/recipes.py vitrail 3m --data EMOJI --seeds 0 1 2
    python benchmarks/recipes.py draw

`speed` trains each contestant for a minute on two cores, three times in turn. A budget is then the number of images
that a contestant sees in that time at the speed of its best turn: other programs only ever make a turn slower. So
accuracy does not depend on the load of the machine, and several runs can share it, each on one thread. The result is
the accuracy on the validation images at the end of the budget, not the best one on the way. For Fashion-MNIST these are
the 10,000 test images. `--epochs` repeats a run with a time budget on a quiet machine, with other seeds.

timm trains a ViT of the same width, depth, heads and tokens with its own components: AdamW, weight decay 0.05, warm-up,
cosine decay, label smoothing 0.1. `timm-heavy` adds what its documentation gives for ViTs: RandAugment
`rand-m9-mstd0.5-inc1`, random resized crops, flips, mixup 0.8; learning rate 1e-3 at batch size 128, as for small ViTs
in https://arxiv.org/abs/2112.13492. `timm-light` suits short runs: crops of at least 64 % of the area, flips, no mixup,
and the best learning rate of a sweep. Their loaders run in parallel with training, their threads do not spin
(GOMP_SPINCOUNT), as vitrail's, and their schedules end with the budget.

EMOJI is a folder with `pairs.csv` (image, style, name, group, keywords). The nine groups are the classes; two styles of
drawing are trained and the third is the validation split.

Results are added to `benchmarks/results/recipes.json`; `draw` makes the figure and the table of docs/recipes.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the vitrail command, before torch is imported

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recipes.json"
FIGURE = HERE.parent / "docs" / "images" / "recipes.png"
FASHION, FASHION_IMAGES = "fashion-mnist", 60_000
TIMM = {"timm-heavy": True, "timm-light": False}
BATCH = 128

Record = dict[str, Any]


def train_vitrail(data: str, settings: dict[str, str]) -> list[tuple[float, float, float]]:
    """Runs `vitrail train`; the epochs, seconds and validation accuracy so far at the end of every epoch."""
    import yaml

    from vitrail.data import open_data

    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, "-m", "vitrail", "train", data, *flags, "--out", out, "--name", "run"], check=True
        )
        run = Path(out) / "run"
        batch = yaml.safe_load((run / "config.yaml").read_text())["optim"]["batch_size"]
        with (run / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    steps = len(open_data(data).splits["train"]) // batch  # per epoch
    return [(int(row["step"]) / steps, float(row["seconds"]), float(row["val_top1"])) for row in rows]


def train_timm(heavy: bool, lr: float, seed: int, images: int | None) -> list[tuple[int, float]]:
    """timm's model, transforms, mixup and optimiser in a minimal loop over Fashion-MNIST.

    Ends after `images`; without it, after a minute. Returns the images seen and the test accuracy of every epoch.
    """
    sys.path.insert(0, str(HERE.parent / "tests"))
    import numpy as np
    import torch
    from peers import timm
    from PIL import Image

    from vitrail.data import open_data

    splits = open_data(FASHION).splits
    torch.manual_seed(seed)
    np.random.seed(seed)  # for timm's mixup  # noqa: NPY002
    model = timm("timm.models.vision_transformer").VisionTransformer(
        img_size=32, patch_size=8, in_chans=1, num_classes=10, embed_dim=128, depth=6, num_heads=4, mlp_ratio=2
    )
    create, norm = timm("timm.data").create_transform, {"mean": (0.5,), "std": (0.5,)}
    augment: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-inc1"} if heavy else {"scale": (0.64, 1.0)}
    training = create((1, 32, 32), is_training=True, hflip=0.5, color_jitter=None, **augment, **norm)
    testing = create((1, 32, 32), crop_pct=1.0, **norm)

    class Images(torch.utils.data.Dataset):
        def __init__(self, split, transform):
            self.split, self.transform = split, transform

        def __len__(self):
            return len(self.split)

        def __getitem__(self, i):
            return self.transform(Image.fromarray(self.split.pixels[i, :, :, 0])), int(self.split.targets[i])

    loader = torch.utils.data.DataLoader(
        Images(splits["train"], training),
        BATCH,
        shuffle=True,
        num_workers=2,
        drop_last=True,
        persistent_workers=True,
    )
    tests = torch.stack([testing(Image.fromarray(image[:, :, 0])) for image in splits["val"].pixels])
    truth = torch.from_numpy(splits["val"].targets)
    mixup = timm("timm.data.mixup").Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=10)
    soft = timm("timm.loss").SoftTargetCrossEntropy()
    hard = timm("timm.loss").LabelSmoothingCrossEntropy(0.1)
    optimizer = timm("timm.optim").create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=0.05)

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not heavy:
            return hard(model(inputs), labels)
        inputs, targets = mixup(inputs, labels)
        return soft(model(inputs), targets)

    def test() -> float:
        model.eval()
        with torch.inference_mode():
            right = sum(
                int((model(x).argmax(1) == y).sum()) for x, y in zip(tests.split(256), truth.split(256), strict=True)
            )
        model.train()
        return right / len(truth)

    curve, seen, begun, done = [], 0, time.monotonic(), 0.0
    while done < 1:
        for inputs, labels in loader:
            done = seen / images if images else (time.monotonic() - begun) / 60
            if done >= 1:
                break
            height = done / 0.05 if done < 0.05 else 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))
            for group in optimizer.param_groups:
                group["lr"] = lr * height
            loss(inputs, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen += BATCH
        curve.append((seen, test() if images else math.nan))
        print(f"timm, learning rate {lr:g}, seed {seed}: {seen} images, top-1 {curve[-1][1]:.2%}", flush=True)
    return curve


def measure_speed(data: str, settings: dict[str, str]) -> dict[str, float]:
    """Training epochs per minute of each contestant on two cores: the best of three turns of a minute."""
    turns: dict[str, list[float]] = {"vitrail": []} | ({name: [] for name in TIMM} if data == FASHION else {})
    for _ in range(3):
        epochs, seconds, _ = train_vitrail(data, settings | {"time-budget": "1m"})[-1]
        turns["vitrail"].append(epochs * 60 / seconds)
        for name in turns.keys() - {"vitrail"}:
            turns[name].append(train_timm(TIMM[name], 1e-3, 0, None)[-1][0] / FASHION_IMAGES)
    print(turns)
    return {name: round(max(rates), 4) for name, rates in turns.items()}


def measure(who: str, data: str, budget: str, epochs: float, seed: int, settings: dict[str, str]) -> Record:
    """Trains one contestant for a number of epochs."""
    from vitrail.device import hardware

    record: Record = {"who": who, "data": Path(data).name, "budget": budget, "seed": seed, "epochs": round(epochs, 2)}
    record["cpu"] = hardware("cpu")
    if who == "vitrail":
        length = {"epochs": f"{epochs:.2f}", "seed": str(seed)}
        curve = [(done, top1) for done, _, top1 in train_vitrail(data, settings | length)]
        return record | {"settings": settings, "curve": curve}
    lr, images = float(settings.get("lr", "1e-3")), round(epochs * FASHION_IMAGES)
    curve = [(seen / FASHION_IMAGES, top1) for seen, top1 in train_timm(TIMM[who], lr, seed, images)]
    return record | {"settings": {"lr": f"{lr:g}"}, "curve": curve}


def draw() -> None:
    """Saves the figure and prints the table as Markdown."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    from vitrail.charts.style import BLUE, GREY, ORANGE, STYLE, save

    results = json.loads(RESULTS.read_text())
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in results["runs"]:
        settings = " ".join(f"{name} {value}" for name, value in record.get("settings", {}).items())
        cpu = record["cpu"].rpartition(",")[0]  # without the number of threads, on which accuracy does not depend
        group = record["data"], record["who"], record["budget"], settings, cpu
        groups.setdefault(group, []).append(record)
    print("| data | | CPU | time | epochs | seeds | top-1 | from | to |\n|---|---|---|---|---|---|---|---|---|")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.4), layout="constrained")
        axes = figure.subplots()
        labelled, newest = set(), results["runs"][-1]["cpu"].rpartition(",")[0]
        for (data, who, budget, settings, cpu), records in sorted(
            groups.items(), key=lambda group: _minutes(group[0][2])
        ):
            ends = np.array([100 * record["curve"][-1][1] for record in records])
            name = f"{who}, {settings}" if settings else who
            print(
                f"| {data} | {name} | {cpu} | {budget} | {records[0]['epochs']:.1f} | {len(ends)} "
                f"| {ends.mean():.2f} % | {ends.min():.2f} | {ends.max():.2f} |"
            )
            if data != FASHION or cpu != newest:
                continue
            color = {"vitrail": BLUE, "timm-light": ORANGE}.get(who, GREY)
            for record in records:
                epochs, top1 = np.array(record["curve"]).T
                axes.plot(epochs / epochs[-1] * _minutes(budget), 100 * top1, color=color, alpha=0.35, linewidth=1)
            axes.plot(
                _minutes(budget), ends.mean(), "o", color=color, label=None if who in labelled else who, clip_on=False
            )
            labelled.add(who)
            axes.annotate(
                f"{ends.mean():.1f}", (_minutes(budget), ends.mean()), (8, 0), textcoords="offset points", va="center"
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 3, 10, 40], ["1", "3", "10", "40"])
        axes.set_ylim(60, 95)
        axes.set_xlabel("minutes of training on two CPU cores")
        axes.set_ylabel("test top-1 in %", color=GREY)
        axes.set_title("Fashion-MNIST: accuracy against time, ends of the budgets marked")
        axes.legend(loc="lower right")
        save(figure, FIGURE)


def _minutes(budget: str) -> float:
    from vitrail.config import TrainConfig, coerce

    return float(coerce(TrainConfig, "time_budget", budget)) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "vitrail", *TIMM, "draw"])
    parser.add_argument("budgets", nargs="*", help="such as 3m 10m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data", default=FASHION, help="for vitrail: any data set")
    parser.add_argument("--img-size", help="for vitrail")
    parser.add_argument("--lr", help="learning rate; without it, 1e-3 for timm and the recipe's for vitrail")
    parser.add_argument("--epochs", type=float, help="of the budget on a quiet machine, instead of the measured speed")
    args = parser.parse_args()
    given = {"img-size": args.img_size, "lr": args.lr}
    settings = {name: value for name, value in given.items() if value is not None}
    if (Path(args.data) / "pairs.csv").exists():
        from words import tables

        args.data = str(tables(Path(args.data))[1])
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"speed": {}, "runs": []}
    name = Path(args.data).name
    if args.what == "draw":
        draw()
    elif args.what == "speed":
        known["speed"][name] = measure_speed(args.data, settings)
        write(known)
    for budget in args.budgets if args.what not in ("draw", "speed") else []:
        for seed in args.seeds:
            epochs = args.epochs or known["speed"][name][args.what] * _minutes(budget)
            record = measure(args.what, args.data, budget, epochs, seed, settings)
            known = json.loads(RESULTS.read_text())  # others may have written meanwhile
            known["runs"].append(record)
            write(known)


def write(results: Record) -> None:
    RESULTS.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
