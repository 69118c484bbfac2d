"""Images of many bands, and how to write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tifffile

DEEP = np.random.default_rng(0).integers(0, 65536, (12, 16, 5), dtype=np.uint16)
BANDS = {"photometric": "minisblack", "planarconfig": "contig"}


def npy(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)
    return path


def tiff(path: Path, values: np.ndarray, **options: Any) -> Path:
    tifffile.imwrite(path, values, **options)
    return path


def folder_of(root: Path, channels: int = 5, dtype: Any = np.uint16, count: int = 12) -> Path:
    """Bright and dark images of 8x8, with values that sensors give: a small part of the range."""
    rng = np.random.default_rng(1)
    for number in range(count):
        for label, least in (("dark", 100), ("bright", 2000)):
            values = rng.integers(least, least + 1500, (8, 8, channels))
            npy(root / label / f"{number}.npy", values.astype(dtype))
    return root
