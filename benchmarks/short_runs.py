"""What helps in short runs: changes of the recipe `small` on Fashion-MNIST, at equal CPU time.

    python benchmarks/short_runs.py                                  # every change, seed 0
    python benchmarks/short_runs.py "no smoothing" --seeds 1 2
    python benchmarks/short_runs.py "the recipe" "the recipe before" --data EMOJI --minutes 0.5 --seeds 0 1 2
    python benchmarks/short_runs.py table                            # the tables of docs/recipes.md

Minutes are those of two cores: a run has one thread and twice that CPU time, for training and validation, so that runs
can share a machine; `cpu_clock.py` says how much its load matters. The result is the accuracy on the 10,000 test
images, or the validation images, at the end of the budget.

- "half of the tokens" leaves out a random half of the tokens in every step, until three fifths of the time are over.
- "16 pixels first" trains at half the resolution for two fifths of the time, without decay, and goes on with these
  weights at the full one.
- "shifted patches" adds four copies of the image to its channels, shifted diagonally by half a patch
  (https://arxiv.org/abs/2112.13492), instead of the convolutional stem.
- "the recipe before" has the learning rate and shifts from before it was tuned for short runs, on Fashion-MNIST. EMOJI
  is a folder with `pairs.csv`, which it was not tuned on: nine groups of emoji at 32 pixels; two styles of drawing are
  trained, the third is the validation split.
- "mirrored images" averages the probabilities of the recipe's model for every test image and its mirror image.

Results are added to `benchmarks/results/short_runs.json`; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_clock import budget
from torch import Tensor, nn
from torch.nn.functional import pad
from words import tables

import vitrail
from vitrail.device import hardware
from vitrail.models.vit import ViT, ViTConfig

RESULTS = Path(__file__).parent / "results" / "short_runs.json"
FASHION, MODEL, SIZE, PATCH = "fashion-mnist", "vit_nano8", 32, 8
RECIPE, MIRRORED, SMALLER = "the recipe", "mirrored images", "16 pixels first"
SMALLER_SHARE, DROPPING_SHARE = 0.4, 0.6  # of the time

CHANGES: dict[str, dict[str, Any]] = {
    RECIPE: {},
    "the recipe before": {"lr": 2e-3, "shift": 2},
    "no smoothing": {"smoothing": 0},
    "average of the weights, 0.99": {"model_ema": 0.99},
    "patches of 4": {"model": "vit_nano4"},
    "width 192": {"model": "vit_w192d6h6m384p8", "stem": "conv", "pool": "gap"},
    "depth 9": {"model": "vit_w128d9h4m256p8", "stem": "conv", "pool": "gap"},
    "linear patches": {"stem": "patch"},
    "shifted patches": {"img_size": SIZE},
    "half of the tokens": {"model": "vit_dropping8"},
    SMALLER: {},
}


@dataclass(frozen=True)
class DroppingConfig(ViTConfig):
    pass


class DroppingViT(ViT):
    """A ViT that encodes a random half of its tokens while it trains, until a moment of CPU time."""

    until = 0.0

    def forward(self, images: Tensor) -> Tensor:
        if not self.training or time.process_time() > self.until:
            return super().forward(images)
        tokens = self.tokens(images)
        keep = torch.rand(tokens.shape[:2]).argsort(dim=1)[:, : tokens.shape[1] // 2]
        logits: Tensor = self.head(self.encode(tokens, keep).mean(dim=1))
        return logits


class ShiftedViT(nn.Module):
    """A ViT that sees the image and its four diagonal shifts by half a patch."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vitrail.create(MODEL, img_size=SIZE, channels=5, classes=10, stem="patch")

    def forward(self, images: Tensor) -> Tensor:
        half = PATCH // 2
        wide = pad(images, (half, half, half, half))
        shifts = [wide[:, :, y:, x:][:, :, :SIZE, :SIZE] for y in (0, PATCH) for x in (0, PATCH)]
        logits: Tensor = self.vit(torch.cat([images, *shifts], dim=1))
        return logits


def train(change: str, data: str, minutes: float, seed: int, out: str) -> vitrail.Run:
    """Trains with a change for the CPU time of the budget."""
    settings = {"seed": seed, "out": out, "workers": 1} | CHANGES[change]
    if data != FASHION:
        settings["img_size"] = SIZE
    if change == SMALLER:
        first = vitrail.train(
            data,
            model=MODEL,
            img_size=SIZE // 2,
            time_budget=budget(SMALLER_SHARE * minutes),
            sched="constant",
            cooldown=0,
            name="first",
            **settings,
        )
        later = {"weights": first, "img_size": SIZE, "recipe": "small", "body_lr": 1, "warmup_epochs": 0}
        return vitrail.train(data, time_budget=budget((1 - SMALLER_SHARE) * minutes), name="run", **settings, **later)
    if change == "shifted patches":
        torch.manual_seed(seed)
        settings["model"] = ShiftedViT()
    DroppingViT.until = time.process_time() + DROPPING_SHARE * minutes * 120
    return vitrail.train(data, time_budget=budget(minutes), name="run", **settings)


def mirrored(run: vitrail.Run) -> float:
    """The accuracy of the mean of the probabilities for test images and their mirror images."""
    split = vitrail.data.open_data(FASHION).splits["val"]
    both = [probabilities(run, split.pixels[:, :, ::step]) for step in (1, -1)]
    return float((sum(both).argmax(dim=1) == torch.as_tensor(split.targets)).float().mean())


def probabilities(run: vitrail.Run, pixels: Any) -> Tensor:
    answers = list(run.predict(list(pixels.squeeze(-1)), top=10))
    classes = {name: i for i, name in enumerate(vitrail.data.open_data(FASHION).classes)}
    found = torch.zeros(len(answers), len(classes))
    for row, answer in zip(found, answers, strict=True):
        for label, probability in zip(answer.labels, answer.probabilities, strict=True):
            row[classes[label]] = probability
    return found


def table() -> None:
    """Prints the results as Markdown, best first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in json.loads(RESULTS.read_text()):
        found.setdefault((record["data"], record["change"]), []).append(record)
    print("| data | change | epochs | seeds | top-1 |\n|---|---|---|---|---|")
    best = sorted(found.items(), key=lambda item: (item[0][0], -statistics.mean(r["top1"] for r in item[1])))
    for (data, change), records in best:
        scores = [100 * record["top1"] for record in records]
        spread = f" ({min(scores):.2f} to {max(scores):.2f})" if len(scores) > 1 else ""
        epochs, mean = records[0]["epochs"], statistics.mean(scores)
        print(f"| {data} | {change} | {epochs:.1f} | {len(scores)} | {mean:.2f} %{spread} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", default=list(CHANGES), help="names of changes, or table")
    parser.add_argument("--data", default=FASHION)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    if args.changes == ["table"]:
        table()
        return
    own = asdict(vitrail.create(MODEL, img_size=SIZE, channels=1, classes=10).config)
    vitrail.models.register("dropping", DroppingConfig, DroppingViT, {"vit_dropping8": DroppingConfig(**own)})
    name, data = Path(args.data).name, str(tables(Path(args.data))[1]) if args.data != FASHION else FASHION
    for seed in args.seeds:
        for change in args.changes:
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            about = {"data": name, "change": change, "minutes": args.minutes, "seed": seed}
            if any(about.items() <= record.items() for record in known):
                continue
            with tempfile.TemporaryDirectory() as out:
                run = train(change, data, args.minutes, seed, out)
                last, steps = run.history[-1], len(vitrail.data.open_data(data).splits["train"]) // 128
                about |= {"epochs": round(last["step"] / steps, 2), "cpu": hardware("cpu")}
                added = [about | {"top1": last["val_top1"]}]
                if change == RECIPE and data == FASHION:
                    added.append(about | {"change": MIRRORED, "top1": mirrored(run)})
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []  # others may have written meanwhile
            RESULTS.write_text(json.dumps([*known, *added], indent=1) + "\n")


if __name__ == "__main__":
    main()
