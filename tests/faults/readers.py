"""The formats that vitrail reads: honest files of each, and the code that reads them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp  # noqa: F401  # here, and not in every process that reads
import datasets  # noqa: F401
import fsspec  # noqa: F401
from faults.honest import EXPORTS, FORM, PICTURES, WEIGHTS, read_with_cache
from starlette.datastructures import Headers

import vitrail
from vitrail.data import open_data
from vitrail.data.images import inspect_image, read_image, survey_image
from vitrail.data.preprocess import Preprocess
from vitrail.data.shards import fetch
from vitrail.errors import UserError
from vitrail.evaluate.real import _right as read_real
from vitrail.runs.exported import exported_card
from vitrail.runs.run import Run
from vitrail.serve.uploads import parse
from vitrail.studies.execute import Folder
from vitrail.train import folds
from vitrail.train.checkpoint import load_checkpoint
from vitrail.train.config_file import read_settings
from vitrail.weights import open_run
from vitrail.weights.added import find_added


@dataclass(frozen=True)
class Reader:
    """A format: its honest files, those that may be damaged, and the code that reads them."""

    source: Path  # a file or a folder
    read: Callable[[Path], object]
    damaged: tuple[str, ...] = ()  # in a folder: patterns of files; none for a single file


def pictures(file: Path) -> None:
    for read in (read_image, inspect_image, survey_image):
        read(file)


def data(source: str | Path, task: str | None = None, **how: Any) -> None:
    opened = open_data(str(source), task=task, **how)
    prepare = Preprocess((8, 8), opened.channels, bits=opened.bits)
    for split in opened.splits.values():
        prepare.pixels(split.image(0))
        if opened.task.name == "masks":
            split.targets[0].labels()


def built_in(folder: Path, files: int) -> None:
    if sum(path.exists() for path in folder.iterdir()) == files:  # a missing one would be downloaded
        open_data(folder.name, data_dir=str(folder.parent))


def below(folder: Path, name: str, task: str | None = None) -> None:
    data(folder / name, task)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def at_address(folder: Path) -> None:
    """Reads shards from a server, which is asked once and waited for a second."""
    fetch.TRIES = fetch._FIRST_TRIES = fetch.SECONDS = 1
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            data(f"http://127.0.0.1:{server.server_address[1]}/")
        finally:
            server.shutdown()


def caches(folder: Path, home: Path) -> None:
    """A damaged cache must not matter."""
    os.environ["VITRAIL_CACHE"] = str(folder)
    try:
        read_with_cache(home)
    except UserError as error:
        raise AssertionError("honest data is refused") from error


def each(*reads: Callable[[], object]) -> None:
    """Reads all, whatever is refused; then raises the first refusal."""
    errors = []
    for read in reads:
        try:
            read()
        except UserError as error:  # noqa: PERF203  # the other files are read all the same
            errors.append(error)
    if errors:
        raise errors[0]


def run(folder: Path) -> None:
    opened = Run.open(folder)
    each(
        lambda: opened.config,
        lambda: opened.finished,
        lambda: opened.card,
        lambda: opened.evaluations,
        lambda: _words(folder),
        lambda: find_added(folder),
        lambda: load_checkpoint(folder, "cpu"),
    )


def _words(folder: Path) -> None:
    """Opens the model; one that reads words also reads some."""
    _, card = open_run(folder, headless=True)
    if card.task.several:
        card.task.tokenizer.encode(["a red circle, drawn twice"], 16)  # type: ignore[attr-defined]


def weights(folder: Path, name: str) -> None:
    open_run(folder / name, headless=True)


def exported(folder: Path, name: str) -> None:
    exported_card(folder / name)


def index(folder: Path, home: Path) -> None:
    picture = home / "picture.png"
    vitrail.search(home / "trained", [home / "images"], picture, index=folder / "index.npz", engine="torch")


def study(folder: Path) -> None:
    job: Any = SimpleNamespace(name="job")
    each(
        lambda: Folder(folder).plan,
        lambda: Folder(folder).scores(job),
        lambda: Folder(folder.parent / "merged").merge([folder]),
    )


def body(file: Path, kind: str) -> None:
    content = file.read_bytes() if file.is_file() else b""
    uploads = asyncio.run(parse(Headers({"content-type": kind}), content, 8))
    for upload in uploads:
        read_image(upload.content)


def formats(home: Path) -> dict[str, Reader]:
    """Every format that `build` has written to `home`, by name."""
    images, own = home / "images", home / "trained"
    files = ("config.yaml", "model.json", "model.safetensors", "metrics.csv", "last/state.pt", "evaluation/*/*.json")
    table = {end: f"table.{end}" for end in ("csv", "tsv", "parquet")}
    masks, boxes = partial(data, task="masks"), partial(data, task="boxes")
    known = {
        **{end: Reader(home / f"picture.{end}", pictures) for end in PICTURES},
        "16-bit png": Reader(home / "deep.png", pictures),
        "npy image": Reader(home / "bands.npy", pictures),
        "multi-band tiff": Reader(home / "bands.tif", pictures),
        "folder": Reader(images, data, ("*/*.png",)),
        "npz": Reader(home / "plain.npz", data),
        "compressed npz": Reader(home / "packed.npz", data),
        "npy": Reader(home / "arrays", data, ("*.npy",)),
        **{end: Reader(images, partial(below, name=name), (name,)) for end, name in table.items()},
        "regression": Reader(images, partial(below, name="values.csv", task="regression"), ("values.csv",)),
        "mnist": Reader(home / "mnist", partial(built_in, files=4), ("*",)),
        "cifar10": Reader(home / "cifar10", partial(built_in, files=1), ("*",)),
        "shards": Reader(home / "shards", data, ("*",)),
        "masks": Reader(home / "masks", masks, ("*/train/*", "classes.txt")),
        "16-bit masks": Reader(home / "deep-masks", masks, ("masks/*",)),
        "masks in npy": Reader(home / "mask-arrays", masks, ("masks/*",)),
        "instances": Reader(home / "deep-masks", boxes, ("masks/*",)),
        "cvat": Reader(home / "cvat", masks, ("SegmentationClass/*", "labelmap.txt", "ImageSets/*/*")),
        "labelme": Reader(home / "labelme", masks, ("*.json",)),
        "coco masks": Reader(home / "coco-masks", masks, ("*.json",)),
        "voc": Reader(home / "voc", boxes, ("Annotations/*",)),
        "coco": Reader(home / "coco", boxes, ("annotations/*",)),
        "yolo": Reader(home / "yolo", boxes, ("data.yaml", "labels/*/*")),
        "table of boxes": Reader(home / "box-table", partial(below, name="boxes.csv", task="boxes"), ("boxes.csv",)),
        "captions": Reader(home / "captions", partial(data, task="pairs", tokenizer="bpe"), ("*.txt",)),
        "coco captions": Reader(home / "captions", partial(below, name="captions.json"), ("captions.json",)),
        "shards with a manifest": Reader(home / "written", data, ("*",)),
        "shards at an address": Reader(home / "written", at_address, ("*",)),
        "embedded parquet": Reader(home / "embedded", data, ("*",)),
        "saved data set": Reader(home / "saved", data, ("*",)),
        "caches": Reader(home / "caches", partial(caches, home=home), ("*.sqlite", "*/*.*", "*/*/*")),
        "shards of masks": Reader(home / "written-masks", masks, ("*",)),
        "shards of boxes": Reader(home / "written-boxes", boxes, ("*",)),
        "run": Reader(own, run, files),
        "config.yaml": Reader(own / "config.yaml", read_settings),
        "model.json": Reader(own, run, ("model.json",)),
        **{
            f"run of {name}": Reader(home / f"run-{name}", run, ("model.json", "*.safetensors", "last/state.pt"))
            for name in ("pretrained", "masks", "boxes", "pairs")
        },
        **{
            f"weights {end}": Reader(home / f"weights-{end}", partial(weights, name=f"model.{end}"), ("model*",))
            for end in WEIGHTS
        },
        "weights sharded": Reader(
            home / "weights-sharded", partial(weights, name="model.safetensors.index.json"), ("*",)
        ),
        "weights hf": Reader(home / "weights-hf", partial(weights, name="model.safetensors"), ("*",)),
        **{
            name: Reader(home / name, partial(exported, name=f"model.{end}"), ("model.*",))
            for name, end in EXPORTS.items()
        },
        "onnx with words": Reader(home / "onnx-pairs", partial(exported, name="model.onnx"), ("model.*",)),
        "index": Reader(home / "search", partial(index, home=home), ("index.npz",)),
        "real.json": Reader(home / "real.json", read_real),
        "study": Reader(home / "study", study, ("*.json", "records/*.json")),
        "folds": Reader(home / "folds", folds._read, ("folds.json",)),
        "request of json": Reader(home / "body.json", partial(body, kind="application/json")),
        "request of files": Reader(home / "body.form", partial(body, kind=FORM)),
    }
    return {name: reader for name, reader in known.items() if reader.source.exists()}
