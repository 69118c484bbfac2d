"""Data sets that have a name: found on this machine, or part of a library."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vitrail.data.arrays import from_arrays
from vitrail.data.dataset import Found
from vitrail.data.images import Pixels
from vitrail.errors import UserError


def _digits(_data_dir: str | None) -> Found:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, with values 0 to 16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return from_arrays("digits", {"train": (pixels, labels)}, None, "digits")


_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_FASHION_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")  # of its package dataset-fashion-mnist


def _fashion_mnist(data_dir: str | None) -> Found:
    """Zalando's 70,000 grey images of clothes, 28 × 28, from the four files of their release."""
    given = [Path(folder).expanduser() for folder in (data_dir, os.environ.get("VITRAIL_DATA")) if folder]
    places = [place for folder in given for place in (folder, folder / "fashion-mnist")]
    places.append(_DEBIAN_FASHION)
    for place in places:
        files = [_first_file(place / f"{name}.gz", place / name) for name in _FASHION_FILES]
        if None not in files:
            x, y, x_test, y_test = (_read_idx(file) for file in files if file)
            return from_arrays(
                "fashion-mnist", {"train": (x, y), "test": (x_test, y_test)}, _FASHION_CLASSES, str(place)
            )
    raise UserError(
        f"fashion-mnist needs the four files {', '.join(_FASHION_FILES)} (or with .gz), which are not in "
        f"{', '.join(str(place) for place in places)}. `apt install dataset-fashion-mnist` brings them, or "
        "give their folder as data_dir or $VITRAIL_DATA."
    )


def _first_file(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _read_idx(path: Path) -> Pixels:
    """An array of bytes in MNIST's idx format: two zeros, the type, the number of dimensions, each length."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if raw[:3] != b"\0\0\x08":
            raise ValueError("it does not begin as one")
        dimensions = raw[3]
        shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()  # writable
    except (gzip.BadGzipFile, zlib.error, EOFError, IndexError, ValueError) as error:
        raise UserError(f"{path} is not a whole idx file: {error}. Fetch it again.") from error


BUILT_IN: dict[str, Callable[[str | None], Found]] = {"digits": _digits, "fashion-mnist": _fashion_mnist}
