"""Segmentation: which pixels are a leaf, which are a hole in it?

Draws leaves with holes and their masks, then trains, evaluates, and writes the masks of new images:

    python examples/segment.py --images 400 --epochs 30
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

import vitrail

CLASSES = ("ground", "leaf", "hole")


def draw(rng: random.Random, side: int) -> tuple[Image.Image, Image.Image]:
    """An image of a leaf with holes, and its mask: the number of the class of each pixel."""
    mask = Image.new("L", (side, side))
    pen = ImageDraw.Draw(mask)
    x, y, r = rng.uniform(0.4, 0.6) * side, rng.uniform(0.4, 0.6) * side, rng.uniform(0.25, 0.38) * side
    pen.ellipse((x - r, y - 0.7 * r, x + r, y + 0.7 * r), fill=1)
    for _ in range(rng.randrange(1, 4)):
        u, v, hole = x + rng.uniform(-0.5, 0.5) * r, y + rng.uniform(-0.35, 0.35) * r, rng.uniform(0.1, 0.25) * r
        pen.ellipse((u - hole, v - hole, u + hole, v + hole), fill=2)
    mask = mask.rotate(rng.uniform(0, 180))
    ground = tuple(rng.randrange(140, 200) for _ in range(3))
    leaf = (rng.randrange(30, 90), rng.randrange(90, 160), rng.randrange(20, 70))
    image = Image.new("RGB", (side, side), ground)
    image.paste(leaf, mask=mask.point(lambda value: 255 * (value == 1)))
    noise = Image.effect_noise((side, side), 40).convert("RGB")
    return Image.blend(image.filter(ImageFilter.GaussianBlur(0.7)), noise, 0.12), mask


def make(folder: Path, images: int) -> Path:
    """`images/{train,val}/N.png`, `masks/{train,val}/N.png`, and the names of the classes in `classes.txt`."""
    rng = random.Random(0)
    for split, count in (("train", images), ("val", max(images // 5, 4))):
        for kind in ("images", "masks"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image, mask = draw(rng, 48)
            image.save(folder / "images" / split / f"{i}.png")
            mask.save(folder / "masks" / split / f"{i}.png")
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("leaves"))
    args = parser.parse_args()

    data = make(args.out / "data", args.images)
    run = vitrail.train(data, out=args.out / "runs", name="leaves", epochs=args.epochs, overwrite=True)

    scores = vitrail.evaluate(run)
    print(f"mIoU {scores.miou:.1%}")
    for score in scores.per_class:
        print(f"{score.name:<7} IoU {score.iou:.1%}, Dice {score.dice:.1%}, {score.share:.1%} of the pixels")
    image, _ = draw(random.Random(1), 96)
    image.save(args.out / "new.png")
    for p in vitrail.predict(run, [args.out / "new.png"]):
        print(p.file, p.answer.text())
        layer = p.answer.layer()
        assert layer is not None
        Image.alpha_composite(image.convert("RGBA"), layer).save(args.out / "new_overlay.png")


if __name__ == "__main__":
    main()
