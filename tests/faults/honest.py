"""Honest files of every format that vitrail reads, so small that thousands of copies are read in minutes."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import tifffile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import boxes_made
import captioned
import segmented

import vitrail
from vitrail.data import open_data
from vitrail.data.cache import once
from vitrail.data.loader import DecodedSplit, batches
from vitrail.data.preprocess import Preprocess
from vitrail.weights import open_run
from vitrail.weights.card import write_card
from vitrail.weights.writing import write_weights

PICTURES = ("png", "jpg", "webp", "gif", "bmp", "tiff", "ppm", "jp2", "avif", "heic", "jxl")
WEIGHTS = ("safetensors", "npz", "pth")
EXPORTS = {"onnx": "onnx", "openvino": "xml"}
TINY: dict[str, Any] = {
    **{"model": "vit_w32d2h2m64p4", "img_size": 8, "stem": "patch", "opt": "adamw", "batch_size": 8, "epochs": 1},
    **{"workers": 1, "device": "cpu"},
}
FORM = "multipart/form-data; boundary=xxx"


def build(home: Path, whole: bool) -> None:
    """Writes honest files of every format; the `whole` set adds models of every task, which take two minutes."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 9, 10, 3), np.uint8)
    labels = np.arange(12) % 3
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
    _built_in(home, pixels[:, :8, :8, 0], labels)
    _annotated(home)
    _documents(home)
    _embedded(home, pixels, labels)
    _models(home, whole)
    os.environ["VITRAIL_CACHE"] = str(home / "caches")
    read_with_cache(home)


def read_with_cache(home: Path) -> None:
    """Reads data of each kind that is cached."""
    for name, task in (("images", None), ("masks", "masks"), ("shards", None)):
        opened = open_data(str(home / name), task=task)
        prepare = Preprocess((8, 8), opened.channels, bits=opened.bits)
        for crops in (False, True):
            kept = once(opened.splits["train"], prepare, crops, gigabytes=1.0)
            kept.image(0) if isinstance(kept, DecodedSplit) else next(iter(batches(kept, prepare, 2, 1)))


def _tables(folder: Path) -> None:
    files = [f"{'abc'[i % 3]}/{i}.png" for i in range(12)]
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


def _embedded(home: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Images inside Parquet files and inside a data set that Hugging Face's library has saved."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    rows = {"image": [Image.fromarray(image) for image in pixels], "label": labels.tolist()}
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(home / "saved")
    (home / "embedded").mkdir()
    made.to_parquet(home / "embedded/train.parquet")


def _built_in(home: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """The files of MNIST and CIFAR-10, with few images."""
    (home / "mnist").mkdir()
    for part in ("train", "t10k"):
        for name, array in (("images-idx3", pixels), ("labels-idx1", labels.astype(np.uint8))):
            sides = b"".join(side.to_bytes(4, "big") for side in array.shape)
            content = b"\0\0\x08" + bytes([array.ndim]) + sides + array.tobytes()
            (home / "mnist" / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    (home / "cifar10").mkdir()
    records = np.concatenate([labels[:, None].astype(np.uint8), np.zeros((12, 3072), np.uint8)], axis=1).tobytes()
    files = {f"data_batch_{i}.bin": records for i in range(1, 6)} | {"test_batch.bin": records}
    with tarfile.open(home / "cifar10/cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, content in {**files, "batches.meta.txt": b"a\nb\nc\n"}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _annotated(home: Path) -> None:
    """Images with masks, boxes and captions, in every layout."""
    segmented.folder(home / "masks", images=6, val=2)
    segmented.pairs(home / "deep-masks", "images", "masks", value=lambda mask: mask.astype(np.uint16))
    segmented.pairs(home / "mask-arrays", "images", "masks", count=0)
    for i in range(6):
        image, mask = segmented.picture(np.random.default_rng(i))
        segmented.save(home / "mask-arrays/images" / f"{i}.png", image)
        (home / "mask-arrays/masks").mkdir(exist_ok=True)
        np.save(home / "mask-arrays/masks" / f"{i}.npy", mask)
        segmented.save(home / "cvat/JPEGImages" / f"{i}.png", image)
        segmented.save(home / "cvat/SegmentationClass" / f"{i}.png", mask, (0, 0, 0, 255, 0, 0, 0, 255, 0))
    (home / "cvat/labelmap.txt").write_text("# label:color\nground:0,0,0::\ndisc:255,0,0::\nsquare:0,255,0::\n")
    (home / "cvat/ImageSets/Segmentation").mkdir(parents=True)
    (home / "cvat/ImageSets/Segmentation/default.txt").write_text("\n".join(map(str, range(6))))
    segmented.labelme(home / "labelme")
    segmented.coco(home / "coco-masks")
    boxes_made.voc(home / "voc")
    vitrail.shard(home / "masks", home / "written-masks")
    vitrail.shard(home / "voc", home / "written-boxes")
    boxes_made.coco(home / "coco")
    boxes_made.yolo(home / "yolo")
    boxes_made.table(home / "box-table")
    captioned.captioned(home / "captions", each=1)
    pictures = sorted((home / "captions").glob("*.png"))
    for picture in pictures:
        picture.with_suffix(".txt").write_text(f"a {picture.stem.replace('-', ' ')}\n")
    document = {
        "images": [{"id": i, "file_name": picture.name} for i, picture in enumerate(pictures)],
        "annotations": [{"image_id": i, "caption": picture.stem} for i, picture in enumerate(pictures)],
    }
    (home / "captions/captions.json").write_text(json.dumps(document))


def _documents(home: Path) -> None:
    """Files of scores, and the bodies of requests to the service."""
    (home / "real.json").write_text(json.dumps([[1, 2], [], [999]]))
    study = home / "study"
    (study / "records").mkdir(parents=True)
    plan = {"study": "positions", "data": "digits", "targets": [], "images": 64, "batch": 32, "unit": 1.5}
    (study / "plan.json").write_text(json.dumps({**plan, "fair": "images"}))
    scores = {"labels": {"seed": 0}, "scores": {"accuracy": 0.5, "map_0": [[0.5, 0.5], [0.1, 0.2]]}}
    (study / "records/job.json").write_text(json.dumps(scores))
    (home / "folds").mkdir()
    (home / "folds/folds.json").write_text(json.dumps({"folds": {"1": {"val_top1": 0.5}}, "mean": {"val_top1": 0.5}}))
    content = (home / "picture.png").read_bytes()
    (home / "body.json").write_text(json.dumps({"images": [base64.b64encode(content).decode()] * 2}))
    part = b'--xxx\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + content + b"\r\n"
    (home / "body.form").write_bytes(part + part + b"--xxx--\r\n")


def _models(home: Path, whole: bool) -> None:
    """A run, its weights in other formats, runs of other tasks, and exported files."""
    trained = vitrail.train(str(home / "images"), out=home, name="trained", **TINY)
    vitrail.evaluate(trained)
    model, card = open_run(trained.path)
    for end in (*WEIGHTS, "hf"):
        (home / f"weights-{end}").mkdir()
    write_weights(home / "weights-safetensors/model.safetensors", model, card, "timm")
    write_weights(home / "weights-npz/model.npz", model, card, "npz")
    plain = vitrail.create("vit_w32d2h2m64p4", img_size=8, classes=3, pool="cls")
    write_weights(home / "weights-hf/model.safetensors", plain, replace(card, config=plain.config), "hf")
    (home / "weights-hf/model.json").unlink()  # so that the files of Hugging Face are read
    torch.save(model.state_dict(), home / "weights-pth/model.pth")
    write_card(home / "weights-pth/model.json", card)  # the tensors do not show the number of heads
    _sharded(home / "weights-hf", home / "weights-sharded")
    if not whole:
        return
    (home / "search").mkdir()
    vitrail.search(trained, [home / "images"], home / "picture.png", index=home / "search/index.npz", engine="torch")
    vitrail.pretrain(str(home / "images"), out=home, name="run-pretrained", val_fraction=0.25, **TINY)
    for name, data in {"masks": "masks", "boxes": "coco", "pairs": "captions/captions.json"}.items():
        settings = TINY | ({"img_size": 32} if name != "pairs" else {"tokenizer": "bpe"})
        vitrail.train(str(home / data), out=home, name=f"run-{name}", **settings)
    for name, end in EXPORTS.items():
        vitrail.export(trained.path, out=home / name / f"model.{end}", format=name)  # type: ignore[arg-type]
    vitrail.export(home / "run-pairs", out=home / "onnx-pairs/model.onnx")


def _sharded(source: Path, target: Path) -> None:
    """The weights of a folder of Hugging Face in two files with an index."""
    shutil.copytree(source, target)
    whole = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    files = {name: f"model-{number % 2 + 1:05}-of-00002.safetensors" for number, name in enumerate(whole)}
    for file in {*files.values()}:
        save_file({name: value for name, value in whole.items() if files[name] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


if __name__ == "__main__":
    build(Path(sys.argv[1]), whole=sys.argv[2] == "whole")
