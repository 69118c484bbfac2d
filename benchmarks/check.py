"""Speed of `vitrail check`: JPEG files per second, and the time for 100,000 files.

    python benchmarks/check.py [FILES]

Checks FILES (default 2,000) JPEGs of 500 × 375, crops of scikit-learn's two photographs. Reading is linear in the
number of files and comparing quadratic, so they are timed separately.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from vitrail.data.audit import audit
from vitrail.data.audit.near_duplicates import near_pairs

GOAL = 100_000


def make(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    photos = [Image.fromarray(image) for image in load_sample_images().images]
    for i in range(count):
        photo = photos[i % 2]
        w = int(rng.integers(200, 500))
        x, y = int(rng.integers(photo.width - w)), int(rng.integers(photo.height - w * 3 // 4))
        crop = photo.crop((x, y, x + w, y + w * 3 // 4)).rotate(rng.uniform(-30, 30)).resize((500, 375))
        path = folder / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        crop.save(path, quality=90)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), count)
        start = time.perf_counter()
        audit(folder)
        reading = time.perf_counter() - start
    # Random signatures, as of distinct photographs.
    vectors = np.random.default_rng(0).standard_normal((GOAL, 63), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    start = time.perf_counter()
    for _ in near_pairs(vectors, ["train"] * (GOAL * 4 // 5) + ["val"] * (GOAL // 5)):
        pass
    comparing = time.perf_counter() - start
    print(f"{count / reading:,.0f} files per second")
    print(f"{GOAL:,} files: {reading / count * GOAL:.0f} s to read, {comparing:.0f} s to compare")


if __name__ == "__main__":
    main()
