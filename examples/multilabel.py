"""Multi-label classification: which shapes are in an image?

Draws images with up to four kinds of shapes, lists them in a CSV with labels such as `circle|cross`, then trains,
evaluates and predicts:

    python examples/multilabel.py --images 2000 --epochs 30
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

from PIL import Image, ImageDraw

import vitrail

SHAPES = ("bar", "circle", "cross", "square")


def draw(shapes: list[str], rng: random.Random) -> Image.Image:
    """The shapes on a dark background, each in its own quarter and colour."""
    image = Image.new("RGB", (32, 32), tuple(rng.randrange(60) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    quarters = rng.sample([(0, 0), (16, 0), (0, 16), (16, 16)], len(shapes))
    for shape, (x, y) in zip(shapes, quarters, strict=True):
        size = rng.randrange(9, 13)
        left, top = x + rng.randrange(15 - size), y + rng.randrange(15 - size)
        right, bottom, middle = left + size, top + size, size // 2
        colour = tuple(rng.randrange(120, 256) for _ in range(3))
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), outline=colour, width=2)
        elif shape == "square":
            pen.rectangle((left, top, right, bottom), fill=colour)
        else:
            pen.line((left, top + middle, right, top + middle), fill=colour, width=3)
            if shape == "cross":
                pen.line((left + middle, top, left + middle, bottom), fill=colour, width=3)
    return image


def make(folder: Path, images: int) -> Path:
    """Draws images into a folder and lists them with their labels in a CSV."""
    rng = random.Random(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    table = folder / "shapes.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "labels"])
        for i in range(images):
            shapes = sorted(rng.sample(SHAPES, rng.randrange(len(SHAPES) + 1)))
            draw(shapes, rng).save(folder / "images" / f"{i}.png")
            writer.writerow([f"images/{i}.png", "|".join(shapes)])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("shapes"))
    args = parser.parse_args()

    table = make(args.out, args.images)
    run = vitrail.train(table, out=args.out / "runs", name="shapes", epochs=args.epochs, overwrite=True)

    metrics = vitrail.evaluate(run)
    print(f"mAP {metrics.map:.1%}, macro F1 {metrics.macro_f1:.1%}")
    for score in metrics.per_label:
        print(f"{score.name:<8} average precision {score.ap:.1%}, threshold {score.threshold:.2f}")
    for p in vitrail.predict(run, [args.out / "images" / f"{i}.png" for i in range(5)]):
        print(p.file, ", ".join(p.labels) or "no label")


if __name__ == "__main__":
    main()
