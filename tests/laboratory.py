"""Laboratories of studies on small data."""

from __future__ import annotations

import numpy as np

from vitrail.studies import find
from vitrail.studies.execute import Folder, prepare


def lab_of(name, folder, source="digits", seeds=2, images=640):
    return prepare(
        find(name), [source], Folder(folder / "none"), folder, budget=60, images=images, seeds=seeds, device="cpu"
    )[0]


def blank(folder, side):
    """A data set of 800 black images with `side` pixels a side."""
    path = folder / f"blank{side}.npz"
    np.savez(path, images=np.zeros((800, side, side), np.uint8), labels=np.arange(800) % 2)
    return str(path)
