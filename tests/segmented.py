"""Made images with masks: bright discs and squares on a dark ground."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("ground", "disc", "square")


def picture(rng: np.random.Generator, size: tuple[int, int] = (32, 40)) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A noisy picture (H, W, 3), and its mask: 0 ground, 1 disc, 2 square."""
    h, w = size
    mask = np.zeros(size, np.uint8)
    y, x = np.mgrid[:h, :w]
    for value in (1, 2):
        cy, cx, r = rng.integers(8, h - 8), rng.integers(8, w - 8), rng.integers(4, 8)
        inside = (y - cy) ** 2 + (x - cx) ** 2 <= r * r if value == 1 else np.maximum(abs(y - cy), abs(x - cx)) <= r
        mask[inside] = value
    colours = np.array([[30, 30, 40], [220, 90, 60], [70, 200, 230]])
    image = colours[mask] + rng.normal(0, 12, (h, w, 3))
    return image.clip(0, 255).astype(np.uint8), mask


def folder(root: Path, images: int = 24, val: int = 8, values: tuple[int, ...] = (0, 1, 2)) -> Path:
    """`images/{train,val}/N.png` and `masks/{train,val}/N.png`, with these values in place of 0, 1 and 2."""
    rng = np.random.default_rng(0)
    for split, count in (("train", images), ("val", val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image, mask = picture(rng, (32, 40) if i % 2 else (36, 30))
            Image.fromarray(image).save(root / "images" / split / f"{i}.png")
            stored = np.array(values, np.uint16 if max(values) > 255 else np.uint8)[mask]
            Image.fromarray(stored).save(root / "masks" / split / f"{i}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES))
    return root


def turned(orientation: int) -> Image.Exif:
    """EXIF data with an orientation."""
    exif = Image.Exif()
    exif[274] = orientation
    return exif


def save(path: Path, values: np.ndarray, palette: tuple[int, ...] = ()) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    if palette:
        image = Image.frombytes("P", values.shape[::-1], values.tobytes())
        image.putpalette(bytes(palette))
    image.save(path)
    return path


def pairs(root: Path, images: str, masks: str, count: int = 6, suffix: str = "", value=lambda m: m, end=".png") -> Path:
    """Images and masks in two folders, `value` applied to the masks 0, 1, 2."""
    rng = np.random.default_rng(1)
    for i in range(count):
        image, mask = picture(rng)
        save(root / images / f"{i}.jpg", image)
        save(root / masks / f"{i}{suffix}{end}", value(mask))
    return root


def labelme(root: Path, count: int = 6, **changes) -> Path:
    for i in range(count):
        save(root / f"{i}.jpg", np.zeros((20, 30, 3), np.uint8))
        shape = {"label": "tree", "points": [[5, 5], [15, 5], [15, 15], [5, 15]], "shape_type": "polygon"} | changes
        top = {"label": "bird", "points": [[12, 12], [25, 18]], "shape_type": "rectangle"}
        document = {"shapes": [shape, top], "imageHeight": 20, "imageWidth": 30, "imagePath": f"{i}.jpg"}
        (root / f"{i}.json").write_text(json.dumps(document))
    return root


def coco(root: Path, **changes) -> Path:
    for i in range(5):
        save(root / "images" / f"{i}.jpg", np.zeros((20, 30, 3), np.uint8))
    polygon = [[2, 2, 12, 2, 12, 12, 2, 12]]
    runs = {"size": [20, 30], "counts": [20 * 20, 5, 20 * 30 - 405]}
    objects = [
        {"id": i, "image_id": i // 2, "category_id": 3 + 4 * (i % 2), "segmentation": polygon if i % 2 else runs}
        | changes
        for i in range(10)
    ]
    images = [{"id": i, "file_name": f"{i}.jpg", "height": 20, "width": 30} for i in range(5)]
    document = {
        "images": images,
        "annotations": objects,
        "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
    }
    (root / "annotations.json").write_text(json.dumps(document))
    return root
