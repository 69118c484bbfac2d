"""Regression: where is the disc in an image, and how large is it?

Draws a disc in every image, lists its position and size in a CSV, then trains, evaluates and predicts:

    python examples/regression.py --images 2000 --epochs 30
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

from PIL import Image, ImageDraw

import vitrail

SIDE = 32


def make(folder: Path, images: int) -> Path:
    """Draws images into a folder and lists them with their target values in a CSV."""
    rng = random.Random(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    table = folder / "discs.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "x", "y", "diameter"])
        for i in range(images):
            radius = rng.uniform(3, 9)
            x, y = (rng.uniform(radius, SIDE - radius) for _ in range(2))
            image = Image.new("L", (SIDE, SIDE), rng.randrange(60))
            ImageDraw.Draw(image).ellipse(
                (x - radius, y - radius, x + radius, y + radius), fill=rng.randrange(120, 256)
            )
            image.save(folder / "images" / f"{i}.png")
            writer.writerow([f"images/{i}.png", f"{x:.2f}", f"{y:.2f}", f"{2 * radius:.2f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("discs"))
    args = parser.parse_args()

    table = make(args.out, args.images)
    run = vitrail.train(
        table,
        label_column=["x", "y", "diameter"],
        out=args.out / "runs",
        name="discs",
        epochs=args.epochs,
        overwrite=True,
    )

    metrics = vitrail.evaluate(run)
    print(f"mean R2 {metrics.r2:.3f}")
    for score in metrics.per_value:
        print(f"{score.name:<9} MAE {score.mae:.2f} pixels, R2 {score.r2:.3f}")
    for p in vitrail.predict(run, [args.out / "images" / f"{i}.png" for i in range(5)]):
        print(p.file, ", ".join(f"{name} {value:.1f}" for name, value in zip(p.labels, p.values, strict=True)))


if __name__ == "__main__":
    main()
