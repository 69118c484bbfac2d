"""Draws the pictures of docs/detect.md from a run of `benchmarks/detect.py fcos 60 --keep RUNS --data CELLS`.

    python docs/detect.py RUNS/run

The pictures of blood cells are from BCCD (https://github.com/Shenggan/BCCD_Dataset), MIT licence.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.pixels import to_pil
from vitrail.evaluate.features import measured_targets
from vitrail.evaluate.measure import own_data
from vitrail.runs.predictor import Predictor

IMAGES = Path(__file__).parent / "images"
SIDE = 480  # pixels of a picture's width


def main(run: Path) -> None:
    predictor = Predictor(run)
    task = predictor.card.task
    split = own_data(run, predictor.card).splits["test"]
    targets = measured_targets(predictor, split)
    outputs = np.stack([row for _, row, _ in predictor.run(split.image(i) for i in range(len(split)))])
    losses = task.losses(outputs, targets)
    order = np.argsort(losses, kind="stable")
    chosen = [int(order[len(order) // 4]), int(order[-4])]  # a good one and one of the worst
    pictures = []
    for i in chosen:
        whole = to_pil(split.image(i)).convert("RGBA")
        whole.alpha_composite(task.layers(outputs[i], targets[i])[0])
        whole.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        pictures.append(whole.convert("RGB"))
    sheet = Image.new("RGB", (2 * SIDE + 8, max(picture.height for picture in pictures)), "white")
    for k, picture in enumerate(pictures):
        sheet.paste(picture, (k * (SIDE + 8), 0))
    sheet.save(IMAGES / "detect-cells.jpg", quality=85, optimize=True)
    evaluation = next((run / "evaluation").glob("*-val"))
    shutil.copy(evaluation / "precision_recall.png", IMAGES / "detect-precision-recall.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
