"""Segmentation of cell nuclei from scratch: the heads at equal time, and the figure of docs/segment.md.

    python benchmarks/segment.py train NUCLEI --heads linear --minutes 15
    python benchmarks/segment.py train NUCLEI --heads linear mlp setr-naive setr-mla setr-pup --minutes 3 --size 128
    python benchmarks/segment.py train NUCLEI --heads linear --minutes 3 --size 128 --pretrain mae --pretrain-minutes 9
    python benchmarks/segment.py table
    python benchmarks/segment.py draw NUCLEI --run RUN

NUCLEI is a folder of `images/{train,val}` and `masks/{train,val}` of the 2018 Data Science Bowl (stage 1, CC0), whose
masks number the nuclei from 1. Minutes are those of two cores: a run has one thread and twice that CPU time for
training and validation, so that the load of the machine hardly matters, and runs can share it. With `--pretrain` the
backbone first learns from the training images without their masks, for `--pretrain-minutes`. Scores are those of the
kept epoch at the size of the original images: Dice of all nucleus pixels, and its mean over the images.

Results are added to `benchmarks/results/segment.json`; `table` prints them as Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from cpu_clock import CORES, budget

import vitrail
from vitrail.runs.predictor import Predictor
from vitrail.tasks.mask_scores import confusion

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "segment.json"
FIGURE = HERE.parent / "docs" / "images" / "segment.jpg"
VALUES = ("0=ground", "*=nucleus")
SETTINGS: dict[str, Any] = {"batch_size": 8, "loss": "dice", "crop_scale": 0.5, "workers": 1}


def train(
    data: str, head: str, minutes: float, model: str, size: int, out: str, method: str | None, before: float
) -> dict[str, Any]:
    """Trains for some minutes, after `before` minutes of pre-training; the scores, and the images seen."""
    name = f"{model}-{head}-{method or 'scratch'}"
    settings = SETTINGS | {"time_budget": budget(minutes), "img_size": size, "out": out, "overwrite": True}
    start: dict[str, Any] = {"model": model}
    if method is not None:
        own = {key: value for key, value in settings.items() if key not in ("loss", "crop_scale", "batch_size")}
        own["time_budget"] = budget(before)
        start = {
            "weights": vitrail.pretrain(f"{data}/images/train", method=method, model=model, name=name + "-0", **own)
        }
    run = vitrail.train(data, mask_values=VALUES, head=head, name=name, **settings, **start)
    scores = vitrail.evaluate(run)
    nucleus = scores.per_class[1]
    return {
        "model": model,
        "head": head,
        "size": size,
        "pretrained": method,
        "pretrain_minutes": before if method else 0,
        "minutes": round(run.history[-1]["seconds"] / 60 / CORES, 2),
        "images": int(run.history[-1]["step"]) * SETTINGS["batch_size"],
        "dice": round(nucleus.dice, 4),
        "image_dice": round(mean_dice(run, data), 4),
        "iou": round(nucleus.iou, 4),
        "miou": round(scores.miou, 4),
        "boundary": round(nucleus.boundary, 4),
        "run": str(run),
    }


def mean_dice(run: Any, data: str) -> float:
    """The mean over the validation images of the Dice of nucleus against ground, at their original sizes."""
    split = vitrail.data.open_data(data, mask_values=VALUES).splits["val"]
    files = [split.name(i) for i in range(len(split))]
    dice = []
    for prediction, target in zip(Predictor(run)(files), split.targets, strict=True):
        counts = confusion(target.labels(), np.asarray(prediction.answer.mask), 2)  # type: ignore[attr-defined]  # of masks
        dice.append(2 * counts[1, 1] / max(counts[1].sum() + counts[:, 1].sum(), 1))
    return float(np.mean(dice))


def table() -> None:
    """Prints the results as Markdown."""
    print("| head | start | pixels | minutes | images seen | Dice | mean Dice of images | IoU | boundary F |")
    print("|---|---|---|---|---|---|---|---|---|")
    for found in json.loads(RESULTS.read_text()):
        start = f"{found['pretrain_minutes']:g} min of {found['pretrained']}" if found["pretrained"] else "scratch"
        shares = " | ".join(f"{found[name]:.1%}" for name in ("dice", "image_dice", "iou", "boundary"))
        spent = f"{found['size']} | {found['minutes']:.1f} | {found['images']:,}"
        print(f"| `{found['head']}` | {start} | {spent} | {shares} |")


def draw(data: str, run: str, path: Path, count: int = 4) -> None:
    """Validation images, their true masks and the predicted ones, below each other."""
    from PIL import Image

    from vitrail.data.pixels import to_pil
    from vitrail.tasks.mask_answer import mask_layer

    split = vitrail.data.open_data(data, mask_values=VALUES).splits["val"]
    chosen = np.linspace(0, len(split) - 1, count).astype(int).tolist()
    side, gap = 220, 6
    sheet = Image.new("RGB", (count * (side + gap) - gap, 3 * (side + gap) - gap), "white")
    predictions = Predictor(run)([split.name(i) for i in chosen])
    for column, (i, prediction) in enumerate(zip(chosen, predictions, strict=True)):
        image = to_pil(split.image(i)).convert("RGBA")
        layer = prediction.answer.layer()
        assert layer is not None
        layers = [None, mask_layer(split.targets[i].labels(), ("ground", "nucleus")), layer]
        for row, over in enumerate(layers):
            view = image if over is None else Image.alpha_composite(image, over)
            sheet.paste(view.convert("RGB").resize((side, side)), (column * (side + gap), row * (side + gap)))
    sheet.save(path, quality=88)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["train", "table", "draw"])
    parser.add_argument("data", metavar="NUCLEI", nargs="?")
    parser.add_argument("--heads", nargs="+", default=["linear"])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--model", default="vit_nano8")
    parser.add_argument("--pretrain", help="the self-supervised method to start from")
    parser.add_argument("--pretrain-minutes", type=float, default=15)
    parser.add_argument("--run", help="the run to draw")
    parser.add_argument("--out", default=tempfile.gettempdir())
    args = parser.parse_args()
    if args.job == "draw":
        draw(args.data, args.run, FIGURE)
    if args.job == "table":
        table()
    for head in args.heads if args.job == "train" else []:
        found = train(
            args.data, head, args.minutes, args.model, args.size, args.out, args.pretrain, args.pretrain_minutes
        )
        print(json.dumps(found))
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        kept = {key: value for key, value in found.items() if key != "run"}
        RESULTS.write_text(json.dumps([*known, kept], indent=1) + "\n")


if __name__ == "__main__":
    main()
