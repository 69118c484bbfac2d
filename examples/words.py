"""Pictures with words: train on drawings with captions, find pictures by a sentence, classify by words.

The pictures are drawn here: "a red circle left of a blue square". Use your own instead: a table with the columns image
and caption, or a folder with a text file beside each picture.

    python examples/words.py --data captions.csv --epochs 30
"""

from __future__ import annotations

import argparse
import csv
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw

import vitrail

COLOURS = {"red": (215, 40, 40), "green": (40, 170, 70), "blue": (50, 80, 225), "yellow": (240, 205, 40)}
SHAPES = ("circle", "square", "triangle", "bar")
SIDES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@dataclass(frozen=True)
class Scene:
    """Two shapes and where the first is, seen from the second."""

    first: tuple[str, str]  # colour, shape
    second: tuple[str, str]
    side: str

    def caption(self) -> str:
        return f"a {' '.join(self.first)} {self.side} a {' '.join(self.second)}"

    def swapped(self, kind: Literal["colours", "shapes", "sides"]) -> Scene:
        """The scene with colours or shapes exchanged, or with the first shape on the other side."""
        (a, one), (b, other) = self.first, self.second
        if kind == "colours":
            return replace(self, first=(b, one), second=(a, other))
        if kind == "shapes":
            return replace(self, first=(a, other), second=(b, one))
        return replace(self, side=SIDES[self.side])

    def draw(self, rng: random.Random, size: int = 48) -> Image.Image:
        image = Image.new("RGB", (size, size), (rng.randrange(180, 255),) * 3)
        near, far = size // 4 + rng.randrange(-2, 3), 3 * size // 4 + rng.randrange(-2, 3)
        middle = size // 2 + rng.randrange(-6, 7)
        places = {"left of": ((near, middle), (far, middle)), "above": ((middle, near), (middle, far))}
        places |= {"right of": places["left of"][::-1], "below": places["above"][::-1]}
        pen = ImageDraw.Draw(image)
        for (colour, shape), (x, y) in zip((self.first, self.second), places[self.side], strict=True):
            r, fill = size // 6 + rng.randrange(-1, 2), COLOURS[colour]
            if shape == "circle":
                pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
            elif shape == "square":
                pen.rectangle((x - r, y - r, x + r, y + r), fill=fill)
            elif shape == "triangle":
                pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=fill)
            else:
                pen.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill=fill)
        return image


def scenes(folder: Path, train: int, val: int, seed: int = 0) -> tuple[Path, list[tuple[str, Scene]]]:
    """A table of drawings with captions, and the scenes of its val split, which train never shows together."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    objects = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    pairs = [(a, b) for a in objects for b in objects if a[0] != b[0] and a[1] != b[1]]
    rng.shuffle(pairs)
    held = {frozenset(pair) for pair in pairs[: len(pairs) // 5]}  # whichever comes first
    parts = {
        "train": [pair for pair in pairs if frozenset(pair) not in held],
        "val": [pair for pair in pairs if frozenset(pair) in held],
    }
    kept, rows = [], [["image", "caption", "split"]]
    for split, count in (("train", train), ("val", val)):
        for i in range(count):
            scene = Scene(*rng.choice(parts[split]), rng.choice(list(SIDES)))
            name = f"{split}-{i}.png"
            scene.draw(rng).save(folder / name)
            rows.append([name, scene.caption(), split])
            if split == "val":
                kept.append((name, scene))
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return folder / "captions.csv", kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="your own pictures with captions")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path("words"))
    given = parser.parse_args()
    data = given.data or scenes(given.out / "scenes", given.images, max(given.images // 5, 20))[0]

    run = vitrail.train(data, out=given.out, name="run", overwrite=True, epochs=given.epochs, batch_size=64)
    scores = vitrail.evaluate(run.path).row()
    print(f"captions found: {scores['text_r5']:.1%} among the first 5")

    folder = data.parent
    query = "a red circle left of a blue square"
    for hit in vitrail.search(run.path, folder, query, top=3, index=given.out / "index.npz"):
        print(f"{query}: {Path(hit.file).name} {hit.similarity:.2f}")
    picture = Path(vitrail.search(run.path, folder, query, top=1, index=given.out / "index.npz")[0].file)
    labels = ["a red circle", "a green bar", "a yellow triangle"]
    (answer,) = vitrail.predict(run.path, picture, labels=labels)
    print(f"{picture.name} shows {answer.labels[0]} ({answer.probabilities[0]:.0%})")


if __name__ == "__main__":
    main()
