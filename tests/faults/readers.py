"""The formats that vitrail reads: honest files of each, and the code that reads them."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import tifffile
import torch
from PIL import Image

import vitrail
from vitrail.data import open_data
from vitrail.data.images import inspect_image, read_image, survey_image
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.evaluate.real import _right as read_real
from vitrail.runs.exported import exported_card
from vitrail.runs.run import Run
from vitrail.train.checkpoint import load_checkpoint
from vitrail.train.config_file import read_settings
from vitrail.weights import open_run
from vitrail.weights.card import write_card
from vitrail.weights.writing import write_weights

PICTURES = ("png", "jpg", "webp", "gif", "bmp", "tiff", "ppm", "jp2", "avif")
WEIGHTS = ("safetensors", "npz", "pth")
EXPORTS = {"onnx": "onnx", "openvino": "xml"}
TINY: dict[str, Any] = {
    "model": "vit_nano4",
    "img_size": 8,
    "stem": "patch",
    "opt": "adamw",
    "batch_size": 16,
}


@dataclass(frozen=True)
class Reader:
    """A format: its honest files, those that may be damaged, and the code that reads them."""

    source: Path  # a file or a folder
    read: Callable[[Path], object]
    damaged: tuple[str, ...] = ()  # in a folder: patterns of files; none for a single file


def pictures(file: Path) -> None:
    for read in (read_image, inspect_image, survey_image):
        read(file)


def data(source: Path, task: str | None = None) -> None:
    opened = open_data(str(source), task=task)
    prepare = Preprocess((8, 8), opened.channels, bits=opened.bits)
    for split in opened.splits.values():
        prepare.pixels(split.image(0))


def below(folder: Path, name: str, task: str | None = None) -> None:
    data(folder / name, task)


def run(folder: Path) -> None:
    opened = Run.open(folder)
    errors = []
    for read in (
        lambda: opened.config,
        lambda: opened.finished,
        lambda: opened.card,
        lambda: opened.evaluations,
        lambda: open_run(folder, headless=True),
        lambda: load_checkpoint(folder, "cpu"),
    ):
        try:
            read()
        except UserError as error:  # noqa: PERF203  # the other files are read all the same
            errors.append(error)
    if errors:
        raise errors[0]


def weights(file: Path) -> None:
    open_run(next(path for path in file.iterdir() if path.suffix != ".json"), headless=True)


def exported(folder: Path) -> None:
    exported_card(next(path for path in folder.iterdir() if path.suffix in (".onnx", ".xml")))


def formats(home: Path) -> dict[str, Reader]:
    """Every format that `build` has written to `home`, by name."""
    images, own = home / "images", home / "trained"
    files = ("config.yaml", "model.json", "model.safetensors", "metrics.csv", "last/state.pt", "evaluation/*/*.json")
    table = {end: f"table.{end}" for end in ("csv", "tsv", "parquet")}
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
        "shards": Reader(home / "shards", data, ("*",)),
        "shards with a manifest": Reader(home / "written", data, ("*",)),
        "run": Reader(own, run, files),
        "config.yaml": Reader(own / "config.yaml", read_settings),
        "model.json": Reader(own, run, ("model.json",)),
        **{f"weights {end}": Reader(home / f"weights-{end}", weights, ("model*",)) for end in WEIGHTS},
        **{name: Reader(home / name, exported, ("model.*",)) for name in EXPORTS},
        "real.json": Reader(home / "real.json", read_real),
    }
    return {name: reader for name, reader in known.items() if reader.source.exists()}


def build(home: Path, exports: bool) -> None:
    """Writes honest files of every format, so small that thousands of copies are read in a minute.

    `exports` adds exported models, which take a minute.
    """
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 9, 10, 3), np.uint8)
    labels = np.arange(24) % 3
    images = home / "images"
    for i, image in enumerate(pixels):
        (images / "abc"[i % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(images / "abc"[i % 3] / f"{i}.png")
    for end in PICTURES:
        Image.fromarray(pixels[0]).resize((32, 24)).save(home / f"picture.{end}")
    Image.fromarray(pixels[0, :, :, 0].astype(np.uint16) * 257).save(home / "deep.png")
    np.save(home / "bands.npy", rng.integers(0, 256, (8, 8, 5), np.uint8))
    tifffile.imwrite(home / "bands.tif", rng.integers(0, 60000, (8, 8, 5), np.uint16), photometric="minisblack")
    np.savez(home / "plain.npz", x_train=pixels, y_train=labels, classes=np.array(["a", "b", "c"]))
    np.savez_compressed(home / "packed.npz", images=pixels, labels=labels)
    (home / "arrays").mkdir()
    np.save(home / "arrays/x_train.npy", pixels)
    np.save(home / "arrays/y_train.npy", labels)
    np.save(home / "arrays/classes.npy", np.array(["a", "b", "c"]))
    _tables(images)
    _shards(home / "shards", pixels, labels)
    vitrail.shard(str(images), home / "written", shard_size="10")
    _models(home, exports)
    (home / "real.json").write_text(json.dumps([[1, 2], [], [999]]))


def _models(home: Path, exports: bool) -> None:
    """A run, its weights in other formats, and its exported files."""
    trained = vitrail.train(str(home / "images"), out=home, name="trained", epochs=1, **TINY)
    vitrail.evaluate(trained)
    model, card = open_run(trained.path)
    for end in WEIGHTS:
        (home / f"weights-{end}").mkdir()
    write_weights(home / "weights-safetensors" / "model.safetensors", model, card, "timm")
    write_weights(home / "weights-npz" / "model.npz", model, card, "npz")
    torch.save(model.state_dict(), home / "weights-pth" / "model.pth")
    write_card(home / "weights-pth" / "model.json", card)  # the tensors do not show the number of heads
    for name, end in EXPORTS.items() if exports else ():
        vitrail.export(trained.path, out=home / name / f"model.{end}", format=name)  # type: ignore[arg-type]


def _tables(folder: Path) -> None:
    files = [f"{'abc'[i % 3]}/{i}.png" for i in range(24)]
    for end, mark in (("csv", ","), ("tsv", "\t")):
        lines = [mark.join(cells) for cells in [("image", "label", "split"), *((a, a[0], "train") for a in files)]]
        (folder / f"table.{end}").write_text("\n".join(lines) + "\n")
    values = [f"{file},{i / 7:.3f}" for i, file in enumerate(files)]
    (folder / "values.csv").write_text("\n".join(["image,value", *values]))
    table = pyarrow.table({"image": files, "label": [file[0] for file in files]})
    pyarrow.parquet.write_table(table, folder / "table.parquet")


def _shards(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    folder.mkdir()
    for kind in ("cls", "json"):
        with tarfile.open(folder / f"{kind}-train.tar", "w") as tar:
            for i, image in enumerate(pixels):
                stream = io.BytesIO()
                Image.fromarray(image).save(stream, "png")
                label = str(labels[i]) if kind == "cls" else json.dumps({"label": int(labels[i])})
                for name, content in ((f"{i}.png", stream.getvalue()), (f"{i}.{kind}", label.encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    (folder / "classes.json").write_text('["a", "b", "c"]')


if __name__ == "__main__":
    build(Path(sys.argv[1]), exports=sys.argv[2] == "exports")
