"""Made data sets, for tasks that no photograph is needed for: how many, which way, where.

They stand for VTAB's structured tasks (counting, orientation, location), are drawn from a seed, and take a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.files import atomic_write

Image = NDArray[np.float64]
TRAIN, TEST = 1000, 1000  # images


def made(folder: Path, side: int) -> dict[str, Path]:
    """The files of the made data sets with images of `side` pixels, by name; written if they are missing."""
    files = {}
    for name, (classes, draw) in _SETS.items():
        path = folder / f"made-{name}-{side}.npz"
        files[f"made-{name}"] = path
        if path.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([side, len(name)])
        labels = np.arange(TRAIN + TEST) % len(classes)
        pixels = np.stack([_noisy(draw(rng, side, int(label)), rng) for label in labels])
        arrays = {"classes": np.array(classes)}
        arrays |= {
            "x_train": pixels[:TRAIN],
            "y_train": labels[:TRAIN],
            "x_test": pixels[TRAIN:],
            "y_test": labels[TRAIN:],
        }
        with atomic_write(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
    return files


def _noisy(image: Image, rng: np.random.Generator) -> NDArray[np.uint8]:
    return np.clip(255 * image + rng.normal(0, 12, image.shape), 0, 255).astype(np.uint8)


def _blob(side: int, y: float, x: float, radius: float) -> Image:
    rows, columns = np.mgrid[:side, :side]
    return np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / (2 * radius**2))


def _count(rng: np.random.Generator, side: int, label: int) -> Image:
    """One to four blobs that do not overlap, whose brightness together does not tell how many they are."""
    places: list[tuple[float, float]] = []
    while len(places) <= label:
        y, x = rng.uniform(0.12 * side, 0.88 * side, 2)
        if all((y - b) ** 2 + (x - a) ** 2 > (0.25 * side) ** 2 for b, a in places):
            places.append((y, x))
    light, shares = rng.uniform(0.5, 1, (2, len(places)))  # a blob's brightness, and its share of that of all
    areas = rng.uniform(0.5, 1) * (0.15 * side) ** 2 * shares / shares.sum() / light
    blobs = [_blob(side, y, x, max(float(area) ** 0.5, 0.5)) for (y, x), area in zip(places, areas, strict=True)]
    return np.max(light[:, None, None] * np.stack(blobs), axis=0)


def _orientation(rng: np.random.Generator, side: int, label: int) -> Image:
    """A bar in one of eight directions."""
    angle = np.pi * (label + rng.uniform(-0.2, 0.2)) / 8
    y, x = rng.uniform(0.4 * side, 0.6 * side, 2)
    rows, columns = np.mgrid[:side, :side]
    along = (rows - y) * np.sin(angle) + (columns - x) * np.cos(angle)
    across = (rows - y) * np.cos(angle) - (columns - x) * np.sin(angle)
    bar = np.exp(-(across**2) / (2 * max(0.05 * side, 0.5) ** 2)) * (np.abs(along) < 0.35 * side)
    return bar * rng.uniform(0.6, 1)


def _location(rng: np.random.Generator, side: int, label: int) -> Image:
    """A blob in one of nine cells."""
    row, column = divmod(label, 3)
    y, x = (side * (each + rng.uniform(0.2, 0.8)) / 3 for each in (row, column))
    return _blob(side, y, x, max(rng.uniform(0.05, 0.12) * side, 0.5)) * rng.uniform(0.6, 1)


_SETS: dict[str, tuple[tuple[str, ...], Callable[[np.random.Generator, int, int], Image]]] = {
    "count": (tuple("1234"), _count),
    "orientation": (tuple(f"{22.5 * i:g}" for i in range(8)), _orientation),
    "location": (tuple(f"{row}, {column}" for row in (1, 2, 3) for column in (1, 2, 3)), _location),
}
