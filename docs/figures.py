"""Makes the README's picture from a run: `python docs/figures.py runs/fashion-mnist-vit_nano8`."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

HEIGHT = 720


def side_by_side(files: list[Path]) -> Image.Image:
    """The pictures at one height, next to each other on white."""
    pictures = [Image.open(file).convert("RGB") for file in files]
    pictures = [p.resize((round(p.width * HEIGHT / p.height), HEIGHT), Image.Resampling.LANCZOS) for p in pictures]
    joined = Image.new("RGB", (sum(p.width for p in pictures), HEIGHT), "white")
    left = 0
    for picture in pictures:
        joined.paste(picture, (left, 0))
        left += picture.width
    return joined


if __name__ == "__main__":
    run = Path(sys.argv[1])
    confusion = next(run.glob("evaluation/*-val/confusion.png"))
    picture = side_by_side([run / "curves.png", confusion])
    picture.quantize(128).save(Path(__file__).parent / "images" / "fashion-mnist.png", optimize=True)
