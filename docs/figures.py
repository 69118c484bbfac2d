"""Makes the README's picture from a run on Fashion-MNIST: `python docs/figures.py runs/fashion-mnist-vit_nano8`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitrail.data import open_data
from vitrail.evaluate.figures import BLUE, GREY, INK, ORANGE, STYLE, save
from vitrail.evaluate.verbs import predict_split
from vitrail.weights import open_run


def panes(axes: Axes, image: np.ndarray, patch: int, caption: str, right: bool) -> None:
    """An image as the model sees it: cut into patches, with the leading between them."""
    h, w = image.shape[0] // patch, image.shape[1] // patch
    gap = 1
    window = np.full((h * (patch + gap) - gap, w * (patch + gap) - gap), np.nan)
    for y in range(h):
        for x in range(w):
            pane = image[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
            window[y * (patch + gap) : y * (patch + gap) + patch, x * (patch + gap) : x * (patch + gap) + patch] = pane
    axes.imshow(window, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(caption, fontsize=9, fontweight="normal", loc="center", pad=5, color=INK if right else ORANGE)


def picture(run: Path) -> Figure:
    """One test image of each class with what the model says of it, and how it came to that."""
    model, card = open_run(run)
    test = open_data("fashion-mnist").splits["test"]
    logits, labels = predict_split(model, test, card.preprocess)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))

    figure = Figure(figsize=(12, 3.7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.55, 1])
    for number, axes in enumerate(left.subplots(2, 5).flat):
        i = int(np.flatnonzero(labels == number)[1])
        said = int(shares[i].argmax())
        caption = f"{card.classes[said]} {shares[i, said]:.0%}"
        panes(axes, card.preprocess.pixels(test.image(i))[0], model.config.patch, caption, said == number)
    axes = right.subplots()
    minutes = [float(row["seconds"]) / 60 for row in rows]
    axes.plot(minutes, [100 * float(row["val_top1"]) for row in rows], color=BLUE, marker="o", markersize=4)
    axes.set_title(f"{100 * float(rows[-1]['val_top1']):.2f} % of the test images", pad=10)
    axes.set_xlabel("minutes of training on two CPU cores")
    axes.set_ylabel("top-1 accuracy in %", color=GREY)
    axes.set_xlim(0)
    return figure


if __name__ == "__main__":
    with mpl.rc_context(STYLE):
        save(picture(Path(sys.argv[1])), Path(__file__).parent / "images" / "fashion-mnist.png")
