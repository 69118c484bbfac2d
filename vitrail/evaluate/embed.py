"""Feature vectors of image files, streamed or written to a file: prefetched by threads, computed in batches.

Memory does not grow with the number of files: it holds the pixels of three batches, one block of vectors, and the file
names. A Parquet file is written in row groups, the arrays of an `.npz` file block by block.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from vitrail.data.image_like import ImageLike, given
from vitrail.data.images import UnreadableImage
from vitrail.errors import UserError
from vitrail.files import atomic_write
from vitrail.progress import track
from vitrail.runs.predictor import Predictor
from vitrail.world import world

Vectors = NDArray[np.float32]
Parts = Iterator[tuple[tuple[str, ...], Vectors]]  # file names, and their vectors (N, D)

_ROWS = 4096  # vectors or names per block


@dataclass(frozen=True, eq=False)
class Embedding:
    """The feature vector of a file, or the reason why it cannot be read."""

    file: str
    features: Vectors | None = None  # D
    error: str | None = None


@dataclass(frozen=True)
class Written:
    """The size of a file of vectors, and the files that could not be read, with the reasons."""

    images: int
    width: int
    unreadable: tuple[tuple[str, str], ...]


def embeddings(predictor: Predictor, images: Iterable[ImageLike], batch_size: int, workers: int) -> Iterator[Embedding]:
    """Yields the feature vectors of images, in order; `images` is consumed lazily."""
    with closing(
        predictor.run(
            given(images, predictor.card.preprocess.channels),
            predictor.features,
            batch_size=batch_size,
            workers=workers,
        )
    ) as answers:
        for image, vector, _ in answers:
            if isinstance(vector, UnreadableImage):
                yield Embedding(image.name, error=str(vector))
            else:
                yield Embedding(image.name, vector)


def write(embeddings: Iterable[Embedding], out: str | Path) -> Written:
    """Writes names and vectors to an `.npz` or `.parquet` file as they arrive; the complete file is renamed into place.

    Both hold `features`, float32, and the file names: `files`, an array, in an `.npz`; `file`, a column, in a table.
    Several processes each write a part of the images: to one file each in a folder, or for an `.npz`, which the first
    process merges.
    """
    path = Path(out)
    if path.suffix not in _WRITERS:
        raise UserError(f"--out must be a {' or '.join(_WRITERS)} file, but it is {path}.")
    if world().size == 1:
        return _checked([_write(embeddings, path)], path)
    folder = path if path.suffix == ".parquet" else path.with_name(f".{path.name}.parts")
    world().once(lambda: _emptied(folder))
    part = folder / f"part-{world().rank:05}-of-{world().size:05}{path.suffix}"
    written = world().every(_write(embeddings, part))
    if path.suffix == ".npz":
        world().once(lambda: _merge(sorted(folder.glob("part-*")), path))
    return _checked(written, path)


def _emptied(folder: Path) -> None:
    """Makes the folder of the parts, without those of an earlier command."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("part-*"):
            part.unlink()
    except OSError as error:
        raise UserError(f"Could not write {folder}: {error.strerror}. Choose another --out.") from error


def _checked(parts: Sequence[Written], path: Path) -> Written:
    """The sizes of parts as that of the whole; raises UserError if there is nothing in them."""
    images, width = sum(part.images for part in parts), max(part.width for part in parts)
    unreadable = tuple(each for part in parts for each in part.unreadable)
    if not images:
        first = "".join(f": {file} ({error})" for file, error in unreadable[:1])
        raise UserError(f"No image could be read, so {path} was not written{first}.")
    return Written(images, width, unreadable)


def _write(embeddings: Iterable[Embedding], path: Path) -> Written:
    """Writes one file; none if no image can be read."""
    unreadable: list[tuple[str, str]] = []

    def readable() -> Iterator[tuple[str, Vectors]]:
        for embedding in track(embeddings, "embedding", unit="img"):
            if embedding.features is None:
                unreadable.append((embedding.file, str(embedding.error)))
            else:
                yield embedding.file, embedding.features

    rows = readable()
    first = next(rows, None)
    if first is None:
        return Written(0, 0, tuple(unreadable))
    with atomic_write(path) as temporary:
        images, width = _WRITERS[path.suffix](_parts(chain([first], rows)), temporary)
    return Written(images, width, tuple(unreadable))


def _merge(parts: Sequence[Path], path: Path) -> None:
    """Writes one `.npz` file with the vectors of several, which are removed."""

    def blocks() -> Parts:
        for part in parts:
            with np.load(part, allow_pickle=False) as arrays:
                yield tuple(arrays["files"].tolist()), arrays["features"]

    with atomic_write(path) as temporary:
        _write_npz(blocks(), temporary)
    shutil.rmtree(parts[0].parent)


def _parts(rows: Iterator[tuple[str, Vectors]]) -> Parts:
    while part := list(islice(rows, _ROWS)):
        names, vectors = zip(*part, strict=True)
        yield names, np.stack(vectors)


def _write_npz(parts: Parts, path: Path) -> tuple[int, int]:
    """Buffers the vectors in a temporary file: an array's header holds its length, which is known only at the end."""
    names: list[str] = []
    width = 0
    with zipfile.ZipFile(path, "w") as archive, tempfile.TemporaryFile(dir=path.parent) as waiting:
        for files, vectors in parts:
            names += files
            width = vectors.shape[1]
            waiting.write(vectors.astype("<f4").data)
        waiting.seek(0)
        with _array(archive, "features", "<f4", (len(names), width)) as member:
            shutil.copyfileobj(waiting, member)
        text = f"<U{max(map(len, names), default=1)}"
        with _array(archive, "files", text, (len(names),)) as member:
            for at in range(0, len(names), _ROWS):
                member.write(np.array(names[at : at + _ROWS], text).tobytes())
    return len(names), width


@contextmanager
def _array(archive: zipfile.ZipFile, name: str, kind: str, shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    """Opens an array of an `.npz` file for writing."""
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)  # type: ignore[no-untyped-call]
        yield member


def _write_parquet(parts: Parts, path: Path) -> tuple[int, int]:
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UserError("Writing Parquet needs pyarrow: pip install 'vitrail[data]'. Or use an .npz file.") from error
    images, width = 0, 0
    with ExitStack() as stack:
        file = stack.enter_context(path.open("wb"))
        writer = None
        for files, vectors in parts:
            images, width = images + len(files), vectors.shape[1]
            names = [name.encode(errors="backslashreplace") for name in files]  # file names may be undecodable
            columns = {
                "file": pyarrow.array([name.decode() for name in names]),
                "features": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), width),
            }
            group = pyarrow.table(columns)
            writer = writer or stack.enter_context(pyarrow.parquet.ParquetWriter(file, group.schema))
            writer.write_table(group)
    return images, width


_WRITERS = {".npz": _write_npz, ".parquet": _write_parquet}
