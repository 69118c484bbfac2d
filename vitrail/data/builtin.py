"""Data sets that have a name: part of a library, found on this machine, or downloaded from their authors."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.arrays import from_arrays
from vitrail.data.dataset import Found
from vitrail.data.download import cache_folder, download
from vitrail.data.images import Pixels
from vitrail.errors import UserError


def _digits(_data_dir: str | None) -> Found:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, with values 0 to 16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return from_arrays("digits", {"train": (pixels, labels)}, None, "digits")


# Where the files of a set lie, or come from


class _Release(NamedTuple):
    """Files as their authors publish them, with the MD5 sums that are published for them."""

    address: str
    files: dict[str, str]


_RELEASES = {
    "mnist": _Release(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",  # PyTorch's mirror: the authors' own server is closed
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": _Release(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": _Release(
        "https://www.cs.toronto.edu/~kriz/", {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
    ),
    "cifar100": _Release(
        "https://www.cs.toronto.edu/~kriz/", {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}
    ),
}


def _places(name: str, data_dir: str | None) -> list[Path]:
    """Folders to look into. One of the set's own name comes first: MNIST and Fashion-MNIST call their files alike."""
    given = [Path(folder).expanduser() for folder in (data_dir, os.environ.get("VITRAIL_DATA")) if folder]
    return [place for folder in [*given, cache_folder() / "datasets"] for place in (folder / name, folder)]


def _pick(places: Sequence[Path], needs: Sequence[Sequence[str]]) -> list[Path]:
    """Every file that is needed, in the first of its spellings, from the first place that has them all; or none."""
    for place in places:
        files = [[place / name for name in spellings if (place / name).exists()] for spellings in needs]
        if all(files):
            return [found[0] for found in files]
    return []


def _fetch(name: str, needs: str, places: Sequence[Path], source: str = "") -> list[Path]:
    """The files of a set's release, downloaded to the first place; a UserError with the way out if that fails."""
    release, folder = _RELEASES[name], places[0]
    try:
        for file, md5 in release.files.items():
            if not (folder / file).exists():
                download(release.address + file, folder / file, md5)
    except UserError as error:
        searched = ", ".join(str(place) for place in places)
        raise UserError(
            f"{name} needs {needs} (not found in {searched}). {error} Give its folder as data_dir or "
            f"$VITRAIL_DATA.{source}"
        ) from error
    return [folder / file for file in release.files]


# MNIST and Fashion-MNIST: four idx files

_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
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
_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")  # of its package dataset-fashion-mnist


def _mnist(data_dir: str | None) -> Found:
    """LeCun, Cortes and Burges' 70,000 handwritten digits, 28 × 28."""
    return _from_idx("mnist", tuple("0123456789"), _places("mnist", data_dir))


def _fashion_mnist(data_dir: str | None) -> Found:
    """Zalando's 70,000 grey images of clothes, 28 × 28."""
    places = [*_places("fashion-mnist", data_dir), _DEBIAN_FASHION]
    return _from_idx("fashion-mnist", _FASHION_CLASSES, places, " `apt install dataset-fashion-mnist` brings it.")


def _from_idx(name: str, classes: tuple[str, ...], places: Sequence[Path], source: str = "") -> Found:
    spellings = [(file, file.replace("-idx", ".idx")) for file in _IDX_FILES]  # some mirrors write a dot
    files = _pick(places, [[spelling + end for end in (".gz", "") for spelling in both] for both in spellings])
    if not files:
        files = _fetch(name, f"the four files {', '.join(_IDX_FILES)} (or with .gz)", places, source)
    x, y, x_test, y_test = (_read_idx(file) for file in files)
    return from_arrays(name, {"train": (x, y), "test": (x_test, y_test)}, classes, str(files[0].parent))


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


# CIFAR: the binary version of its authors' archives


class _Cifar(NamedTuple):
    """What the release of a CIFAR set holds."""

    name: str
    binary: tuple[str, str]  # the archive, and the folder in it
    pickled: tuple[str, str]
    names: str
    train: tuple[str, ...]
    test: str
    labels: int  # bytes before the pixels of an image; the last is its class


_CIFAR10 = _Cifar(
    name="cifar10",
    binary=("cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
    pickled=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
    names="batches.meta.txt",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test="test_batch.bin",
    labels=1,
)
_CIFAR100 = _Cifar(
    name="cifar100",
    binary=("cifar-100-binary.tar.gz", "cifar-100-binary"),
    pickled=("cifar-100-python.tar.gz", "cifar-100-python"),
    names="fine_label_names.txt",
    train=("train.bin",),
    test="test.bin",
    labels=2,
)
_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


def _cifar(kind: _Cifar, data_dir: str | None) -> Found:
    """Krizhevsky's 60,000 photographs, 32 × 32, of 10 classes or 100."""
    places, (archive, folder) = _places(kind.name, data_dir), kind.binary
    found = _pick(places, [kind.binary])
    if not found:
        if pickled := _pick(places, [kind.pickled]):
            raise UserError(
                f"{pickled[0]} is the pickled version of {kind.name}, which is never loaded because it could run code. "
                f"Take the binary version, {archive}, from {_CIFAR_PAGE}."
            )
        found = _fetch(kind.name, f"{archive} or the folder {folder}", places, f" {_CIFAR_PAGE} has the archive.")
    path = found[0]
    try:
        content = _read_folder(path, {kind.names, *kind.train, kind.test})
        parts = {
            "train": _read_records(b"".join(content[name] for name in kind.train), kind.labels),
            "test": _read_records(content[kind.test], kind.labels),
        }
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise UserError(f"{path} is not whole: {error}. Fetch it again.") from error
    return from_arrays(kind.name, parts, tuple(content[kind.names].decode("ascii", "replace").split()), str(path))


def _read_folder(path: Path, names: set[str]) -> dict[str, bytes]:
    """The content of files in a folder, or in an archive of one."""
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in names}
    content = {}
    with tarfile.open(path) as archive:
        for member in archive:  # in their order: to go back is to unpack it all again
            name = Path(member.name).name
            if name in names and (file := archive.extractfile(member)):
                content[name] = file.read()
    if absent := sorted(names - set(content)):
        raise ValueError(f"it has no {', '.join(absent)}")
    return content


def _read_records(raw: bytes, labels: int) -> tuple[Pixels, Pixels]:
    """Images and labels from records of `labels` bytes and the red, the green and the blue plane."""
    records = np.frombuffer(raw, np.uint8).reshape(-1, labels + 3 * 32 * 32)
    planes = records[:, labels:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, labels - 1]


BUILT_IN: dict[str, Callable[[str | None], Found]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion-mnist": _fashion_mnist,
    "cifar10": partial(_cifar, _CIFAR10),
    "cifar100": partial(_cifar, _CIFAR100),
}
