"""Files that claim more than they hold, are nested too deeply or have the wrong types: one sentence, at once."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import struct
import threading
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from segmented import folder
from tensorboardX.record_writer import RecordWriter

import vitrail
from vitrail.config import TrainConfig, load_yaml
from vitrail.data import open_data
from vitrail.data.images import UnreadableImage, inspect_image, read_image
from vitrail.data.masks.raw import read_values
from vitrail.errors import UserError
from vitrail.runs.run import Run
from vitrail.train.checkpoint import Checkpoints, load_checkpoint
from vitrail.train.config_file import read_settings
from vitrail.weights import open_run
from vitrail.weights.card import read_card

pytestmark = pytest.mark.usefixtures("plain_runs")

DEEP = "[" * 100_000


def header(shape: object, kind: str = "|u1") -> bytes:
    """The header of a .npy file."""
    text = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def saved(array: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array))
    return stream.getvalue()


IMAGES = saved(np.zeros((6, 4, 4), np.uint8))
LABELS = saved(np.arange(6) % 2)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"images.npy": header((10**15,)), "labels.npy": LABELS}, "claims 1,000,000,000,000,000 values"),
        ({"images.npy": header((-3, 4)), "labels.npy": LABELS}, "its shape is"),
        ({"images.npy": IMAGES, "labels.npy": saved(3)}, "one label per image"),
        ({"images": b"no array", "labels.npy": LABELS}, "is not a readable .npz file"),
        ({"images.npy": b"\x93NUMPY\x01\x00\x10\x00{'descr': '|u1\xff", "labels.npy": LABELS}, "is not a readable"),
    ],
)
def test_archives_of_arrays(tmp_path, members, message):
    with pytest.raises(UserError, match=message):
        open_data(str(archive(tmp_path / "a.npz", members)))


def test_a_bomb_of_zeros_is_not_decompressed(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("images.npy", "w") as member:
        member.write(header((1100, 2**20, 1)))
        for _ in range(1100):
            member.write(bytes(2**20))
    with pytest.raises(UserError, match="which no arrays of images do"):
        open_data(str(path))


def test_a_damaged_compression(tmp_path):
    path = archive(tmp_path / "a.npz", {"images.npy": IMAGES * 9, "labels.npy": LABELS}, zipfile.ZIP_LZMA)
    content = bytearray(path.read_bytes())
    content[60:90] = b"\xff" * 30
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a readable"):
        open_data(str(path))


def test_a_compression_that_python_has_not(tmp_path):
    path = archive(tmp_path / "a.npz", {"images.npy": IMAGES, "labels.npy": LABELS})
    content = path.read_bytes()
    for start, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):  # the method, in headers and in the directory
        parts = content.split(start)
        content = start.join([parts[0], *(part[: at - 4] + b"\x63\x00" + part[at - 2 :] for part in parts[1:])])
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npz is not a readable .*compression"):
        open_data(str(path))


def test_labels_that_are_one_number(tmp_path):
    (tmp_path / "x.npy").write_bytes(IMAGES)
    (tmp_path / "y.npy").write_bytes(saved(3))
    with pytest.raises(UserError, match="one label per image"):
        open_data(str(tmp_path / "x.npy"))


@pytest.mark.parametrize("shape", [(10**27, 4, 4), (-5, 4, 4), (10**9, 4, 4)])
def test_arrays_that_claim_more_than_they_hold(tmp_path, shape):
    (tmp_path / "x.npy").write_bytes(header(shape) + bytes(64))
    (tmp_path / "y.npy").write_bytes(LABELS)
    with pytest.raises(UserError, match=r"is not a complete \.npy file"):
        open_data(str(tmp_path / "x.npy"))


def test_a_mapped_file_that_becomes_shorter(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((600, 32, 32), np.uint8))
    np.save(tmp_path / "y.npy", np.arange(600) % 2)
    split = open_data(str(tmp_path / "x.npy")).splits["train"]
    os.truncate(tmp_path / "x.npy", 4096)
    for read in (lambda: split.image(400), lambda: split.take(np.arange(300, 400))):
        with pytest.raises(UserError, match=r"x\.npy has become shorter while it was in use"):
            read()
    (tmp_path / "x.npy").unlink()


def test_pictures_that_claim_more_than_fits(tmp_path):
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 35_000, 16, 2, 0, 0, 0))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(1000))))
    with pytest.raises(UnreadableImage, match=r"1,400,000,000 pixels, above the limit"):
        read_image(tmp_path / "a.png")
    (tmp_path / "a.npy").write_bytes(header((10**6, 10**6, 3)) + bytes(100))
    with pytest.raises(UnreadableImage, match="more than it stores"):
        read_image(tmp_path / "a.npy")


def sparse(path: Path, start: bytes, size: int = 2**30) -> Path:
    """A file that takes no space on the disk, however large it is."""
    path.write_bytes(start)
    os.truncate(path, size)
    return path


@pytest.mark.parametrize("start", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"])
def test_sparse_files_named_like_pictures(tmp_path, start):
    path = sparse(tmp_path / "a.png", start)
    for read in (read_image, inspect_image, read_values):
        with pytest.raises(UnreadableImage, match=r"1,073,741,824 bytes, more than a picture has: .* --max-pixels \d+"):
            read(path)


@pytest.mark.parametrize("start", [b"", b"image,label\n"])
def test_sparse_files_named_like_tables(tmp_path, start):
    with pytest.raises(UserError, match=r"a\.csv has a line of more than 1,048,576 characters"):
        open_data(str(sparse(tmp_path / "a.csv", start)))


def test_fifos_named_like_images_and_data(tmp_path):
    for name in ("a.png", "a.jpg", "a.npy"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UnreadableImage, match="not a regular file"):
            read_image(tmp_path / name)
    for name in ("a.tar", "x.npy", "a.npz", "a.csv"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError):
            open_data(str(tmp_path / name))


def test_fifos_among_files_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [Image.new("RGB", (4, 4))] * 4, "label": ["a", "b"] * 2}
    made = datasets.Dataset.from_dict(
        rows, datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    )
    (tmp_path / "files").mkdir()
    made.to_parquet(tmp_path / "files" / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    os.mkfifo(tmp_path / "files" / "b.parquet")
    os.mkfifo(tmp_path / "saved" / "data-1.arrow")
    for name in ("files", "saved"):
        with pytest.raises(UserError, match="is not a regular file"):
            open_data(str(tmp_path / name))


def test_class_names_that_are_not_text(tmp_path):
    for name in (b"good", b"bad\xff"):
        folder = os.fsencode(tmp_path) + b"/" + name
        os.mkdir(folder)  # noqa: PTH102  # the name is bytes
        for i in range(4):
            Image.new("RGB", (4, 4)).save(os.fsdecode(folder) + f"/{i}.png")
    with pytest.raises(UserError, match=r"is not valid UTF-8 text\. Rename it"):
        open_data(str(tmp_path))


def test_file_names_that_are_not_text(tmp_path):
    masks = folder(tmp_path / "masks", 4, 2)
    for kind in ("images", "masks"):
        (masks / kind / "train" / "0.png").rename(masks / kind / "train" / os.fsdecode(b"bad\xff.png"))
    assert open_data(str(masks)).fingerprint()


# Settings and cards


@pytest.mark.parametrize(
    "line",
    [
        "data: " + DEEP,
        "data: " + "{a: " * 10_000,
        "7: x",
        "date: 2020-99-99",
        "seed: " + "9" * 5000,
        "seed: 1" + "0" * 30,
        "seed: 0x" + "f" * 5000,
        "epochs: !!int abc",
        "lr: 1" + "0" * 400,
        "img_size: [1000000, 1000000]",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\ndata: [*c, *c]",
        "x" * 200_000,
    ],
    ids=lambda line: line[:12],
)
def test_hostile_settings(tmp_path, line):
    file = tmp_path / "config.yaml"
    file.write_text(line)
    for read in (read_settings, lambda path: load_yaml(TrainConfig, path)):
        with pytest.raises(UserError, match=r"config\.yaml") as caught:
            read(file)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"width": 10**9}},
        {"config": {"width": 10**18}},
        {"config": {"depth": 10**6}},
        {"config": {"depth": 1000}},
        {"config": {"img_size": [10**9, 10**9]}},
        {"config": {"drop": 10**400}},
        {"preprocess": {"std": [10**400]}},
        {"preprocess": {"crop": 1e-300}},
        {"preprocess": {"crop": 10**20}},
        {"preprocess": {"img_size": [8000, 8000]}},
        {"versions": [1]},
        {"teacher": [1]},
        {"teacher": {"model": 1}},
        {"metrics": {"loss": []}},
    ],
    ids=str,
)
def test_hostile_cards(trained, tmp_path, change):
    run = shutil.copytree(trained, tmp_path / "run")
    document = json.loads((run / "model.json").read_text())
    for name, value in change.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) and name != "teacher" else value
    (run / "model.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"model\.(json|safetensors)"):
        open_run(run)


def test_a_card_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "model.json").write_text(DEEP)
    with pytest.raises(UserError, match="nested too deeply"):
        read_card(tmp_path / "model.json")


# Runs


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("data"),
        lambda state: state.pop("progress"),
        lambda state: state.update(progress=[1]),
        lambda state: state["progress"].update(step=-1),
        lambda state: state["progress"].update(step="3"),
        lambda state: state["progress"].update(x=1),
        lambda state: state["progress"].update(rows=[1]),
        lambda state: state["progress"].update(rows={"epoch": 1}),
        lambda state: state["progress"]["rows"][0].update(step="3"),
        lambda state: state["progress"]["rows"][0].pop("epoch"),
        lambda state: state["progress"]["rows"].clear(),
        lambda state: state["optimizer 0"]["state"][0].update(exp_avg=torch.zeros(3)),
        lambda state: state["optimizer 0"]["state"][0].pop("exp_avg"),
        lambda state: state["optimizer 0"].update(state=[1]),
    ],
)
def test_checkpoints_without_their_parts(trained, tmp_path, damage):
    run = shutil.copytree(trained, tmp_path / "run")
    state = load_checkpoint(run, "cpu")
    damage(state)
    with Checkpoints(run) as checkpoints:
        checkpoints.save(state)
    with pytest.raises(UserError, match="Delete it to restart the run"):
        vitrail.train(resume=run)


def test_files_in_the_place_of_folders(trained, tmp_path, caplog):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "last")
    (run / "last").touch()
    with pytest.raises(UserError, match="must be a folder, for checkpoints"):
        vitrail.train(resume=run)
    (run / "last").unlink()
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").touch()
    vitrail.train(resume=run)
    assert any("TensorBoard's events cannot be written" in message for message in caplog.messages)


@pytest.mark.parametrize("name", [".lock", "train.log"])
def test_links_and_fifos_in_the_place_of_files_that_are_written(trained, tmp_path, name):
    run, victim = shutil.copytree(trained, tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=rf"{name} must be a regular file, but it is a symbolic link\. Delete it"):
        vitrail.train(resume=run)
    assert victim.read_text() == "mine"
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=rf"{name} must be a regular file, but it is a FIFO or a device\. Delete it"):
        vitrail.train(resume=run)
    (run / name).unlink()
    vitrail.train(resume=run)
    assert (run / name).stat().st_mode & 0o111 == 0  # as of any other file


def test_a_disk_that_is_full_for_the_events_of_tensorboard(tmp_path, tiny, monkeypatch, caplog):
    real = RecordWriter.write

    def full(writer, data):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(writer, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    vitrail.train("digits", out=tmp_path, name="run", **tiny)
    assert any("TensorBoard's events cannot be written" in message for message in caplog.messages)


def test_damaged_histories(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "metrics.csv").write_text("epoch,step\n1,x\n")
    with pytest.raises(UserError, match=r"metrics\.csv is not a table of epochs"):
        _ = Run(run).history


def test_weights_are_not_pickles(tmp_path):
    torch.save({"weight": torch.zeros(1), "code": print}, tmp_path / "a.pth")
    with pytest.raises(UserError, match="never loaded because they could run code"):
        open_run(tmp_path / "a.pth")
