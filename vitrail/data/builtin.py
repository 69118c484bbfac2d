"""Built-in data sets by name: digits, MNIST, Fashion-MNIST and CIFAR, found locally or downloaded."""

from __future__ import annotations

import gzip
import os
import tarfile
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
from vitrail.files import open_regular, read_bytes, reading

_LARGEST = 2**28  # bytes of a file; CIFAR-100's largest has 154 million


def _digits(_data_dir: str | None) -> Found:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, with values 0 to 16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return from_arrays("digits", {"train": (pixels, labels)}, None, "digits")


# Finding and downloading files


class _Release(NamedTuple):
    """The published files of a data set and their MD5 checksums."""

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


def _search_path(name: str, data_dir: str | None) -> list[Path]:
    """Folders to search. The data set's own come first: MNIST and Fashion-MNIST share their file names."""
    given = [Path(folder).expanduser() for folder in (data_dir, os.environ.get("VITRAIL_DATA")) if folder]
    return [place for folder in [*given, cache_folder() / "datasets"] for place in (folder / name, folder)]


def _locate(places: Sequence[Path], needed: Sequence[Sequence[str]]) -> list[Path]:
    """The needed files, each under its first existing spelling, from the first folder that has them all, or none."""
    for place in places:
        files = [[place / name for name in spellings if (place / name).exists()] for spellings in needed]
        if all(files):
            return [found[0] for found in files]
    return []


def _fetch(name: str, needed: str, places: Sequence[Path], hint: str = "") -> list[Path]:
    """Downloads the files of a release to the first folder of the search path."""
    release, folder = _RELEASES[name], places[0]
    try:
        for file, md5 in release.files.items():
            if not (folder / file).exists():
                download(release.address + file, folder / file, md5)
    except UserError as error:
        searched = ", ".join(str(place) for place in places)
        raise UserError(
            f"{name} needs {needed} (not found in {searched}). {error} Set --data-dir or $VITRAIL_DATA to its "
            f"folder.{hint}"
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
_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")  # from the package dataset-fashion-mnist


def _mnist(data_dir: str | None) -> Found:
    """LeCun, Cortes and Burges' 70,000 handwritten digits, 28 × 28."""
    return _from_idx("mnist", tuple("0123456789"), _search_path("mnist", data_dir))


def _fashion_mnist(data_dir: str | None) -> Found:
    """Zalando's 70,000 grayscale images of clothes, 28 × 28."""
    places = [*_search_path("fashion-mnist", data_dir), _DEBIAN_FASHION]
    return _from_idx("fashion-mnist", _FASHION_CLASSES, places, " `apt install dataset-fashion-mnist` installs it.")


def _from_idx(name: str, classes: tuple[str, ...], places: Sequence[Path], hint: str = "") -> Found:
    spellings = [(file, file.replace("-idx", ".idx")) for file in _IDX_FILES]  # some mirrors use a dot
    files = _locate(places, [[spelling + end for end in (".gz", "") for spelling in both] for both in spellings])
    if not files:
        files = _fetch(name, f"the four files {', '.join(_IDX_FILES)} (or with .gz)", places, hint)
    x, y, x_test, y_test = (_read_idx(file) for file in files)
    return from_arrays(name, {"train": (x, y), "test": (x_test, y_test)}, classes, str(files[0].parent))


def _read_idx(path: Path) -> Pixels:
    """The uint8 array of a file in MNIST's idx format: magic number, type, dimensions, lengths, values."""
    with reading(path, "a complete idx file", "Download it again."), open_regular(path) as file:
        raw = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(_LARGEST)
        if raw[:3] != b"\0\0\x08":
            raise ValueError("wrong magic number")
        dimensions = raw[3]
        shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()  # writable


# CIFAR: the binary version of the authors' archives


class _Cifar(NamedTuple):
    """The files of a CIFAR release."""

    name: str
    binary: tuple[str, str]  # the archive, and its top-level folder
    pickled: tuple[str, str]
    names: str
    train: tuple[str, ...]
    test: str
    labels: int  # label bytes before the pixels; the last one is the class


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
    places, (archive, folder) = _search_path(kind.name, data_dir), kind.binary
    found = _locate(places, [kind.binary])
    if not found:
        if pickled := _locate(places, [kind.pickled]):
            raise UserError(
                f"{pickled[0]} is the pickled version of {kind.name}, which is never loaded because it could run code. "
                f"Download the binary version, {archive}, from {_CIFAR_PAGE}."
            )
        found = _fetch(kind.name, f"{archive} or the folder {folder}", places, f" {_CIFAR_PAGE} has the archive.")
    path = found[0]
    with reading(path, f"complete {kind.name}", "Download it again."):
        content = _read_folder(path, {kind.names, *kind.train, kind.test})
        parts = {
            "train": _read_records(b"".join(content[name] for name in kind.train), kind.labels),
            "test": _read_records(content[kind.test], kind.labels),
        }
    return from_arrays(kind.name, parts, tuple(content[kind.names].decode("ascii", "replace").split()), str(path))


def _read_folder(path: Path, names: set[str]) -> dict[str, bytes]:
    """The content of the named files in a folder or a tar archive."""
    if path.is_dir():
        return {name: read_bytes(path / name, _LARGEST) for name in names}
    content = {}
    with open_regular(path) as stream, tarfile.open(fileobj=stream) as archive:
        for member in archive:  # in order: seeking back would decompress the archive again
            name = Path(member.name).name
            if not 0 <= member.size <= _LARGEST or member.issparse():
                raise ValueError(f"{name} claims {member.size} bytes")
            if name in names and (file := archive.extractfile(member)):
                content[name] = file.read()
    if absent := sorted(names - set(content)):
        raise ValueError(f"{', '.join(absent)} missing")
    return content


def _read_records(raw: bytes, labels: int) -> tuple[Pixels, Pixels]:
    """Images and labels from records of `labels` label bytes and the red, green and blue planes."""
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
