"""Accuracy of the recipe `small` on Fashion-MNIST in a given time, against a ViT of the same size trained with timm.

    python benchmarks/recipes.py vitrail 3m --seeds 0 1 2
    python benchmarks/recipes.py timm 3m
    python benchmarks/recipes.py draw

Run each measurement on an otherwise idle machine. Results are added to `benchmarks/results/recipes.json`, from which
`draw` makes the figure and the table of docs/recipes.md. The result is the test accuracy at the end of the time, not
the best one on the way.

The timm side uses timm's own components with the settings that its documentation gives for a ViT: AdamW, weight decay
0.05, warm-up, cosine decay, RandAugment `rand-m9-mstd0.5-inc1`, random resized crops, horizontal flips, mixup 0.8,
label smoothing 0.1; learning rate 1e-3 at batch size 128, as for small ViTs in https://arxiv.org/abs/2112.13492. To be
fair within the time budget, its loader runs in parallel with training, its threads do not spin (GOMP_SPINCOUNT), as
vitrail's, and its schedule ends with the budget.
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

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recipes.json"
FIGURE = HERE.parent / "docs" / "images" / "recipes.png"

Record = dict[str, Any]


def measure_vitrail(budget: str, seed: int) -> Record:
    """Runs `vitrail train`."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            "train",
            "fashion-mnist",
            "--time-budget",
            budget,
            "--seed",
            str(seed),
            "--out",
            out,
            "--name",
            "run",
        ]
        subprocess.run([sys.executable, "-m", "vitrail", *command], check=True)
        with (Path(out) / "run" / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    return {"curve": [(float(row["seconds"]), float(row["val_top1"])) for row in rows]}


def measure_timm(budget: str, seed: int, lr: float, batch_size: int = 128) -> Record:
    """timm's model, transforms, mixup and optimiser in a minimal loop."""
    os.environ["GOMP_SPINCOUNT"] = "10000"  # before torch is imported
    sys.path.insert(0, str(HERE.parent / "tests"))
    import numpy as np
    import torch
    from peers import timm
    from PIL import Image

    from vitrail.config import TrainConfig, coerce
    from vitrail.data import open_data

    create = timm("timm.data").create_transform
    seconds = coerce(TrainConfig, "time_budget", budget)
    splits = open_data("fashion-mnist").splits
    torch.manual_seed(seed)
    np.random.seed(seed)  # for timm's mixup  # noqa: NPY002
    model = timm("timm.models.vision_transformer").VisionTransformer(
        img_size=32, patch_size=8, in_chans=1, num_classes=10, embed_dim=128, depth=6, num_heads=4, mlp_ratio=2
    )
    norm = {"mean": (0.5,), "std": (0.5,)}
    training = create((1, 32, 32), is_training=True, auto_augment="rand-m9-mstd0.5-inc1", hflip=0.5, **norm)
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
        batch_size,
        shuffle=True,
        num_workers=2,
        drop_last=True,
        persistent_workers=True,
    )
    tests = torch.stack([testing(Image.fromarray(image[:, :, 0])) for image in splits["val"].pixels])
    truth = torch.from_numpy(splits["val"].targets)
    mixup = timm("timm.data.mixup").Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=10)
    loss = timm("timm.loss").SoftTargetCrossEntropy()
    optimizer = timm("timm.optim").create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=0.05)
    curve, steps = [], 0

    def test() -> float:
        model.eval()
        with torch.inference_mode():
            right = sum(
                int((model(x).argmax(1) == y).sum()) for x, y in zip(tests.split(256), truth.split(256), strict=True)
            )
        model.train()
        return right / len(truth)

    begun = time.monotonic()
    done = 0.0
    while done < 1:
        for images, labels in loader:
            done = (time.monotonic() - begun) / seconds
            if done >= 1:
                break
            height = done / 0.05 if done < 0.05 else 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))
            for group in optimizer.param_groups:
                group["lr"] = lr * height
            images, targets = mixup(images, labels)
            loss(model(images), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        curve.append((time.monotonic() - begun, test()))
    print(f"timm {budget} lr {lr:g} seed {seed}: {steps} steps, {curve[-1][1]:.2%}", flush=True)
    return {"curve": curve, "lr": lr}


def draw() -> None:
    """Saves the figure and prints the table as Markdown."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    from vitrail.charts.style import BLUE, GREY, ORANGE, STYLE, save
    from vitrail.config import TrainConfig, coerce

    groups: dict[tuple[str, str], list[Record]] = {}
    for record in json.loads(RESULTS.read_text()):
        groups.setdefault((record["who"], record["budget"]), []).append(record)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.4), layout="constrained")
        axes = figure.subplots()
        print("| | time | seeds | test top-1 | from | to |\n|---|---|---|---|---|---|")
        for (who, budget), records in groups.items():
            color = BLUE if who == "vitrail" else ORANGE
            ends = np.array([100 * record["curve"][-1][1] for record in records])
            print(f"| {who} | {budget} | {len(ends)} | {ends.mean():.2f} % | {ends.min():.2f} | {ends.max():.2f} |")
            for record in records:
                minutes, top1 = np.array(record["curve"]).T
                axes.plot(minutes / 60, 100 * top1, color=color, alpha=0.35, linewidth=1)
            minute = coerce(TrainConfig, "time_budget", budget) / 60
            axes.plot(minute, ends.mean(), "o", color=color, label=who if budget == "3m" else None)
            axes.annotate(f"{ends.mean():.1f}", (minute, ends.mean()), (0, 7), textcoords="offset points", ha="center")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 3, 10, 40], ["1", "3", "10", "40"])
        axes.set_ylim(60, 95)
        axes.set_xlabel("minutes of training on two CPU cores")
        axes.set_ylabel("test top-1 in %", color=GREY)
        axes.set_title("Fashion-MNIST: accuracy against time, ends of the budgets marked")
        axes.legend(loc="lower right")
        save(figure, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["vitrail", "timm", "draw"])
    parser.add_argument("budget", nargs="?", default="3m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, default=1e-3, help="timm's learning rate")
    parser.add_argument("--dry", action="store_true", help="do not save the result")
    args = parser.parse_args()
    if args.what == "draw":
        draw()
        return
    for seed in args.seeds:
        record: Record = {"who": args.what, "budget": args.budget, "seed": seed}
        if args.what == "vitrail":
            record |= measure_vitrail(args.budget, seed)
        else:
            record |= measure_timm(args.budget, seed, args.lr)
        if not args.dry:
            RESULTS.parent.mkdir(exist_ok=True)
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            RESULTS.write_text(json.dumps([*known, record]) + "\n")


if __name__ == "__main__":
    main()
