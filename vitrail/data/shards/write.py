"""Writing shards: any data as tar files of about equal size, each with its index, and the manifest of all.

What is in which shard is decided before anything is written, from the data and the settings alone. So the shards that
are finished when a process is killed are kept, and the next one writes the others; the result is the same.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vitrail.data.dataset import Array, Data, Numbers, Split
from vitrail.data.identity import identity
from vitrail.data.images import EXTENSIONS, image_format
from vitrail.data.npy import read_array
from vitrail.data.pixels import Pixels
from vitrail.data.shards.fetch import file_sha256
from vitrail.data.shards.manifest import MANIFEST, MOST_SHARDS, Manifest, Part, SplitParts, read_manifest, row_type
from vitrail.data.shards.targets import column, stored
from vitrail.errors import UserError
from vitrail.files import atomic_write, locked, open_regular, read_json, read_text, write_text
from vitrail.progress import track
from vitrail.tasks import Task
from vitrail.version import VERSION

_UNFINISHED = ".unfinished"  # folder of what is known of finished shards, until all are
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SAMPLE = 256  # images whose mean size gives the number of images of a shard
_BLOCK = 512  # bytes of a tar file's unit
_LONGEST_NAME = 200  # bytes
_EXTENSIONS = {"JPEG": ".jpg", "TIFF": ".tif", "JPEG2000": ".jp2", "HEIF": ".heic"}  # of others, the format's name


@dataclass(frozen=True)
class _Job:
    """A shard to write: image numbers of a split, from key `first` on."""

    split: Split
    task: Task
    file: str
    numbers: Numbers
    first: int
    rows: np.dtype[Any]
    root: int  # length of what the names of all images begin with


def write_shards(data: Data, folder: Path, shard_size: str, seed: int, workers: int) -> Manifest:
    """Writes the splits of a data set as shards to a folder, or those that an earlier call has not finished."""
    splits = {name: split for name, split in data.splits.items() if not _is_repeated(data, name)}
    plan = json.loads(json.dumps({"version": VERSION, "shard_size": shard_size, "seed": seed, "data": identity(data)}))
    jobs = {name: _jobs(name, split, data.task, shard_size, seed) for name, split in splits.items()}
    begun = folder / _UNFINISHED / "plan.json"
    if (folder / MANIFEST).exists():
        ours = begun.exists() and read_json(begun) == plan
        if begun.parent.exists():  # killed when everything was written
            with locked(begun.parent, "writing", "choose another folder"):
                shutil.rmtree(begun.parent)
        if ours:
            return read_manifest(read_text(folder / MANIFEST), folder / MANIFEST)
        raise UserError(f"{folder} already has shards. Choose another folder, or delete it.")
    if folder.exists() and not begun.exists() and any(child.name != _UNFINISHED for child in folder.iterdir()):
        raise UserError(f"{folder} has other files. Choose a new or an empty folder for the shards.")
    begun.parent.mkdir(parents=True, exist_ok=True)
    with locked(begun.parent, "writing", "choose another folder"):
        if not begun.exists():
            write_text(begun, json.dumps(plan))
        elif read_json(begun) != plan:
            raise UserError(
                f"{folder} has unfinished shards of other data, another --shard-size or another --seed. Repeat that "
                "command, or delete the folder."
            )
        every = [job for some in jobs.values() for job in some]
        with ThreadPoolExecutor(workers, thread_name_prefix="vitrail-shard") as pool:
            try:
                written = pool.map(lambda job: _finished(folder, job) or _write(folder, job), every)
                parts = iter(list(track(written, "writing shards", total=len(every), unit="shard")))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        found = {name: tuple(next(parts) for _ in some) for name, some in jobs.items()}
        manifest = Manifest(
            data.task.name if data.task.labelled else None,
            tuple(data.classes),
            data.size,
            data.channels,
            data.bits,
            {name: SplitParts(_write_index(folder, name, jobs[name]), shards) for name, shards in found.items()},
        )
        if data.task.single:  # for other programs, and for vitrail without the manifest
            write_text(folder / "classes.txt", "".join(f"{' '.join(name.split())}\n" for name in data.classes))
        write_text(folder / MANIFEST, manifest.to_json())
        shutil.rmtree(folder / _UNFINISHED)
    return manifest


def _is_repeated(data: Data, name: str) -> bool:
    """Whether a split is only another name of one: data without a val split is validated on its test split."""
    return name == "val" and data.splits["val"] is data.splits.get("test")


# Which image goes where


def _jobs(name: str, split: Split, task: Task, shard_size: str, seed: int) -> list[_Job]:
    """The shards of a split. Training images are shuffled, so that shards that are read together mix all classes."""
    rng = np.random.Generator(np.random.PCG64(seed))
    order: Numbers = rng.permutation(len(split)) if name == "train" else np.arange(len(split))
    count = -(-len(split) // images_per_shard(split, shard_size))
    if count > MOST_SHARDS:
        raise UserError(f"{name} would have {count:,} shards, and there may be {MOST_SHARDS:,}. Raise --shard-size.")
    names = [split.name(i) for i in range(len(split))]
    root = len(commonprefix([min(names), max(names)]).rpartition("/")[0])  # noqa: RUF071  # names of arrays are no paths
    root += root > 0  # the slash
    longest = max(len(_encoded_name(text, root)) for text in names)
    rows = row_type(longest, column(task, split.targets) if task.labelled else None)
    chunks = np.array_split(order, count)  # of nearly equal size
    firsts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    return [
        _Job(split, task, f"{name}-{k:05}.tar", chunk, int(firsts[k]), rows, root) for k, chunk in enumerate(chunks)
    ]


def _encoded_name(text: str, root: int) -> bytes:
    """The name of an image without what all begin with; of a long one the end."""
    return text[root:].encode(errors="surrogateescape")[-_LONGEST_NAME:]


def images_per_shard(split: Split, shard_size: str) -> int:
    """The number of images in a shard of this size, such as "256MB" or "1000", images."""
    text = shard_size.strip().upper()
    if found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([KMG]B)", text):
        some = np.unique(np.linspace(0, len(split) - 1, _SAMPLE).astype(int)).tolist()
        mean = sum(_padded(len(_content(split, i)[0])) + 3 * _BLOCK for i in some) / len(some)
        count = int(float(found[1]) * _UNITS[found[2]] / mean)
    elif re.fullmatch(r"\d{1,12}", text):
        count = int(text)
    else:
        raise UserError(f"'shard_size' must be a size such as 256MB, or a number of images, but it is '{shard_size}'.")
    if count < 1 and text.isdecimal():
        raise UserError(f"'shard_size' must be at least 1 image, but it is '{shard_size}'.")
    return max(count, 1)


# One shard


def _content(split: Split, i: int) -> tuple[bytes, str]:
    """The encoded image, as it is stored, and its extension; arrays are encoded without loss."""
    source = split.source(i)
    if isinstance(source, Path):
        with open_regular(source) as file:
            return file.read(), source.suffix.lower()
    content = source()
    if isinstance(content, bytes):
        end = os.path.splitext(split.name(i))[1].lower()  # noqa: PTH122  # it may be no path
        return content, end if end in EXTENSIONS else _extension(content)
    return _encoded(content)


def _extension(content: bytes) -> str:
    """The extension of an encoded image that has no name of its own."""
    kind = image_format(content) or "PNG"
    return _EXTENSIONS.get(kind, f".{kind.lower()}")


def _encoded(pixels: Pixels) -> tuple[bytes, str]:
    """PNG; what it cannot hold, such as floats and many bands, as NumPy's format."""
    stream, (_, _, channels) = io.BytesIO(), pixels.shape
    if (pixels.dtype == np.uint8 and channels in (1, 3)) or (pixels.dtype == np.uint16 and channels == 1):
        Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if channels == 1 else pixels)).save(stream, "PNG")
        return stream.getvalue(), ".png"
    np.save(stream, np.ascontiguousarray(pixels), allow_pickle=False)
    return stream.getvalue(), ".npy"


def _write(folder: Path, job: _Job) -> Part:
    """Writes a shard and what is known of it; the latter last, because it marks the shard as finished."""
    rows = np.zeros(len(job.numbers), job.rows)
    with atomic_write(folder / job.file) as temporary:
        with temporary.open("wb") as file:
            for k, number in enumerate(job.numbers.tolist()):
                content, end = _content(job.split, number)
                key = f"{job.first + k:09}"
                rows[k]["offset"] = _add(file, f"{key}{end}", content)
                rows[k]["size"] = len(content)
                rows[k]["name"] = _encoded_name(job.split.name(number), job.root)
                if job.task.labelled:
                    label, end, row = stored(job.task, job.split.targets[number], rows.dtype["target"].shape)
                    rows[k]["target"] = row(_add(file, f"{key}{end}", label))
            file.write(bytes(2 * _BLOCK))  # the end of a tar file
        part = Part(job.file, len(rows), temporary.stat().st_size, file_sha256(temporary))
    place = folder / _UNFINISHED / job.file
    with atomic_write(place.with_suffix(".npy")) as temporary, temporary.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    write_text(place.with_suffix(".json"), json.dumps(asdict(part)))
    return part


def _add(file: BinaryIO, name: str, content: bytes) -> int:
    """Appends a file to a tar file and returns its offset. Times and owners are left out, for equal bytes each time."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    file.write(member.tobuf(tarfile.USTAR_FORMAT))
    offset = file.tell()
    file.write(content + bytes(_padded(len(content)) - len(content)))
    return offset


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _finished(folder: Path, job: _Job) -> Part | None:
    """What is known of a shard that was finished earlier; None to write it."""
    place = folder / _UNFINISHED / job.file
    try:
        part = Part(**read_json(place.with_suffix(".json")))
        complete = len(_rows(place)) == part.images == len(job.numbers)
        if complete and file_sha256(folder / job.file) == part.sha256:
            return part
    except (OSError, UserError, ValueError, TypeError):  # missing or damaged
        pass
    return None


def _rows(place: Path) -> Array:
    with place.with_suffix(".npy").open("rb") as file:
        return read_array(file)


def _write_index(folder: Path, name: str, jobs: Sequence[_Job]) -> Part:
    path, count = folder / f"{name}.index.npy", sum(len(job.numbers) for job in jobs)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        known: Any = np.lib.format  # partly untyped
        header = {"descr": known.dtype_to_descr(jobs[0].rows), "fortran_order": False, "shape": (count,)}
        known.write_array_header_1_0(file, header)
        for job in jobs:
            file.write(_rows(folder / _UNFINISHED / job.file).tobytes())
    return Part(path.name, count, path.stat().st_size, file_sha256(path))
