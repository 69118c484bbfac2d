"""Pictures of coloured shapes with captions, and settings with which colours are learnt in seconds."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 230), "yellow": (235, 215, 40)}
SHAPES = ("circle", "square", "bar")


def drawn(colour: str, shape: str, rng: np.random.Generator, side: int = 16) -> Image.Image:
    """A shape on a grey ground, at a random place."""
    image = Image.new("RGB", (side, side), (int(rng.integers(90, 160)),) * 3)
    x, y = (int(v) for v in rng.integers(1, side // 3, 2))
    box = (x, y, x + side // 2, y + side // 2)
    draw = ImageDraw.Draw(image)
    if shape == "circle":  # a small one
        draw.ellipse((x, y, x + side // 4, y + side // 4), COLOURS[colour])
    elif shape == "square":
        draw.rectangle(box, COLOURS[colour])
    else:
        draw.rectangle((0, y, side, y + side // 5), COLOURS[colour])
    return image


def captioned(folder: Path, each: int = 8) -> Path:
    """A table of images and captions, `each` of every colour and shape; the last two are for validation."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows = [["image", "caption", "split"]]
    for colour in COLOURS:
        for shape in SHAPES:
            for i in range(each):
                name = f"{colour}-{shape}-{i}.png"
                drawn(colour, shape, rng).save(folder / name)
                rows.append([name, f"a {colour} {shape}", "val" if i >= each - 2 else "train"])
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder / "pairs.csv"


SETTINGS = {
    "model": "vit_w128d2h4m256p4",
    "amp": "off",  # the default depends on the CPU
    "img_size": 16,
    "stem": "patch",
    "opt": "adamw",
    "epochs": 20,
    "batch_size": 24,
    "crop_scale": 1.0,
    "lr": 2e-3,
    "drop_path": 0.0,
    "randaug": 0,
    "warmup_epochs": 1,
}
