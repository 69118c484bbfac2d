"""Object detection: where are the discs and squares, and which is which?

Draws images with shapes and writes their boxes in YOLO's form, then trains, evaluates and predicts:

    python examples/detect.py --images 400 --epochs 60
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw

import vitrail

SIZE = 64
SHAPES = ("disc", "square")


def draw(rng: random.Random) -> tuple[Image.Image, list[str]]:
    """An image with one to three shapes that do not overlap, and a line for each: class, centre and size as shares."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.randrange(60) for _ in range(3)))
    pen, lines = ImageDraw.Draw(image), []
    quarters = rng.sample([(0, 0), (32, 0), (0, 32), (32, 32)], rng.randrange(1, 4))
    for x, y in quarters:
        kind, w, h = rng.randrange(2), rng.randrange(14, 28), rng.randrange(14, 28)
        left, top = x + rng.randrange(32 - w), y + rng.randrange(32 - h)
        shape = pen.ellipse if SHAPES[kind] == "disc" else pen.rectangle
        shape((left, top, left + w - 1, top + h - 1), fill=tuple(rng.randrange(120, 256) for _ in range(3)))
        centre = (left + w / 2) / SIZE, (top + h / 2) / SIZE
        lines.append(" ".join(map(str, (kind, *centre, w / SIZE, h / SIZE))))
    return image, lines


def make(folder: Path, images: int) -> Path:
    """Draws images for training and validation, with a text file of boxes for each."""
    rng = random.Random(0)
    for split, count in (("train", images), ("val", max(images // 4, 8))):
        for part in ("images", "labels"):
            (folder / part / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image, lines = draw(rng)
            image.save(folder / "images" / split / f"{i}.png")
            (folder / "labels" / split / f"{i}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(SHAPES)}]\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("shapes"))
    args = parser.parse_args()

    data = make(args.out / "data", args.images)
    settings = {"model": "vit_nano8", "stem": "conv", "batch_size": 16, "epochs": args.epochs, "overwrite": True}
    run = vitrail.train(data, out=args.out / "runs", name="shapes", **settings)

    metrics = vitrail.evaluate(run)
    print(f"AP50 {metrics.ap50:.1%}, AP {metrics.ap:.1%}")
    for score in metrics.per_class:
        print(f"{score.name:<6} AP50 {score.ap50:.1%}, threshold {score.threshold:.2f}")
    for p in vitrail.predict(run, [data / "images" / "val" / f"{i}.png" for i in range(3)]):
        print(p.file, p.answer.text())


if __name__ == "__main__":
    main()
