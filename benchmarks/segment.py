"""Segmentation of cell nuclei from scratch: the heads at an equal number of images, and the figure of docs/segment.md.

    python benchmarks/segment.py train NUCLEI --heads linear --images 2100
    python benchmarks/segment.py train NUCLEI --heads linear mask setr-naive setr-pup mlp --images 1200
    python benchmarks/segment.py draw NUCLEI --run RUN

NUCLEI is a folder of `images/{train,val}` and `masks/{train,val}` of the 2018 Data Science Bowl (stage 1, CC0), whose
masks number the nuclei from 1. A budget is a number of images, not a time: so the result does not depend on the load of
the machine, and runs can share it. `train` notes the CPU seconds of a run, of all its threads, beside its scores: half
of them is the time on two idle cores. Scores are those of the last epoch's model at the size of the original images:
Dice of all nucleus pixels, and its mean over the images.

Results are added to `benchmarks/results/segment.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import vitrail
from vitrail.runs.predictor import Predictor
from vitrail.tasks.mask_scores import confusion

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "segment.json"
FIGURE = HERE.parent / "docs" / "images" / "segment.jpg"
VALUES = ("0=ground", "*=nucleus")
SETTINGS: dict[str, Any] = {"img_size": 192, "batch_size": 8, "loss": "dice", "crop_scale": 0.5, "workers": 1}


def train(data: str, head: str, images: int, model: str, out: str, weights: str | None) -> dict[str, Any]:
    """Trains on this number of images; its scores, and the CPU seconds it took."""
    count = len(list(Path(data, "images", "train").iterdir()))
    settings = SETTINGS | ({"model": model} if weights is None else {"weights": weights})
    before = _cpu_seconds()
    run = vitrail.train(
        data, mask_values=VALUES, head=head, epochs=images / count, out=out, name=f"{model}-{head}", **settings
    )
    seconds = _cpu_seconds() - before
    scores = vitrail.evaluate(run)
    nucleus = scores.per_class[1]
    return {
        "model": model,
        "head": head,
        "weights": weights is not None,
        "images": images,
        "dice": round(nucleus.dice, 4),
        "image_dice": round(mean_dice(run, data), 4),
        "iou": round(nucleus.iou, 4),
        "miou": round(scores.miou, 4),
        "boundary": round(nucleus.boundary, 4),
        "cpu_seconds": round(seconds),
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


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
    parser.add_argument("job", choices=["train", "draw"])
    parser.add_argument("data", metavar="NUCLEI")
    parser.add_argument("--heads", nargs="+", default=["linear"])
    parser.add_argument("--images", type=int, default=3600)
    parser.add_argument("--model", default="vit_nano8")
    parser.add_argument("--weights", help="a pre-training run to start from")
    parser.add_argument("--run", help="the run to draw")
    parser.add_argument("--out", default=tempfile.gettempdir())
    args = parser.parse_args()
    if args.job == "draw":
        draw(args.data, args.run, FIGURE)
        return
    for head in args.heads:
        found = train(args.data, head, args.images, args.model, args.out, args.weights)
        print(json.dumps(found))
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        kept = {key: value for key, value in found.items() if key != "run"}
        RESULTS.write_text(json.dumps([*known, kept], indent=1) + "\n")


if __name__ == "__main__":
    main()
