"""Someone with photos: check the folder, train, look at the mistakes, sort new photos.

The photographs are drawn here: fields of sunflowers and of poppies, 96 pixels wide. Use your own folder instead, with
one folder per class:

    python examples/photos.py --photos my-photos/ --epochs 30

Photographs learn faster and better from pre-trained weights; add `weights="vit_tiny_patch16_224"` where a machine can
download them.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw

import vitrail

FLOWERS = {"poppy": (200, 30, 30), "sunflower": (250, 200, 20)}


def photograph(kind: str, rng: random.Random) -> Image.Image:
    """A meadow with flowers of one kind."""
    image = Image.new("RGB", (96, 72), (60 + rng.randrange(40), 120 + rng.randrange(60), 50))
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randrange(3, 8)):
        x, y, size = rng.randrange(96), rng.randrange(72), rng.randrange(6, 16)
        red, green, blue = (min(255, max(0, part + rng.randrange(-40, 40))) for part in FLOWERS[kind])
        pen.ellipse((x - size, y - size, x + size, y + size), fill=(red, green, blue))
        if kind == "sunflower":
            pen.ellipse((x - size // 2, y - size // 2, x + size // 2, y + size // 2), fill=(60, 40, 10))
    return image


def take(folder: Path, images: int) -> Path:
    """A folder of photographs, one folder per class, of which one was saved twice and one is damaged."""
    rng = random.Random(0)
    for kind in FLOWERS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for i in range(images // len(FLOWERS)):
            photograph(kind, rng).save(folder / kind / f"{i}.jpg", quality=90)
    first = (folder / "poppy" / "0.jpg").read_bytes()
    (folder / "poppy" / "copy of 0.jpg").write_bytes(first)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="your own folder, with one folder per class")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path("photos"))
    args = parser.parse_args()
    photos = args.photos or take(args.out / "photos", args.images)

    # 1. Is anything wrong with the photographs?
    print(vitrail.check(photos, out=args.out / "check").table())

    # 2. Train, and stop when it no longer helps.
    run = vitrail.train(photos, out=args.out / "runs", name="photos", epochs=args.epochs, patience=5, overwrite=True)
    print(vitrail.evaluate(run).table())

    # 3. What does the model look at, and where is it wrong?
    for file in vitrail.explain(run, out=args.out / "explain").files[:3]:
        print(file)

    # 4. Sort new photos, and leave out those that the model is not sure of.
    new = args.out / "new.jpg"
    photograph("poppy", random.Random(1)).save(new)
    for p in vitrail.predict(run, [new, args.out / "lost.jpg"], threshold=0.6):
        print(p.file, p.error or (f"{p.labels[0]} {p.probabilities[0]:.0%}" if p.labels else "not sure"))


if __name__ == "__main__":
    main()
