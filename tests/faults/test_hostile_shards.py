"""Shards that claim more than they hold, or name what cannot be: one sentence, at once."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from vitrail.data import open_data
from vitrail.errors import UserError

DEEP = "[" * 100_000


def shard(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "png")
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i in range(4):
            for name, content in ((f"{i}.png", stream.getvalue()), (f"{i}.cls", str(i % 2).encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        for entry, content in members:
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return folder / "a.tar"


@pytest.mark.parametrize(
    ("name", "content"),
    [("0.json", DEEP), ("0.json", '{"label": "\\ud800"}'), ("0.cls", "9" * 2000)],
)
def test_hostile_labels_in_shards(tmp_path, name, content):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(8):
            stream = io.BytesIO()
            Image.new("RGB", (4, 4)).save(stream, "png")
            label = content if i == 0 else '{"label": "a"}' if name.endswith("json") else "1"
            for end, text in ((".png", stream.getvalue()), (Path(name).suffix, label.encode())):
                entry = tarfile.TarInfo(f"{i}{end}")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
    with pytest.raises(UserError):
        open_data(str(tmp_path / "a.tar"))


def test_a_label_of_thirty_digits_is_a_name(tmp_path):
    images = [(tarfile.TarInfo(f"{i}.cls"), b"9" * 30) for i in (7, 8)]
    with pytest.raises(UserError, match="a label without an image"):
        open_data(str(shard(tmp_path, *images)))


def test_folders_whose_names_are_not_text(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    folder.mkdir()
    assert open_data(str(shard(folder))).fingerprint()


def test_a_name_in_a_shard_has_a_limit(tmp_path):
    with pytest.raises(UserError, match=r"a\.tar has a file whose name is longer than 4,096 bytes: 'x.*Shorten it"):
        open_data(str(shard(tmp_path, (tarfile.TarInfo("x" * 4093 + ".png"), b""))))


@pytest.mark.parametrize("size", [2**40, 2**62, 2**80])
def test_sparse_members(tmp_path, size):
    path = shard(tmp_path)
    content = bytearray(path.read_bytes())
    sparse = bytearray(tarfile.TarInfo("9.png").tobuf(tarfile.GNU_FORMAT))
    sparse[156:157] = tarfile.GNUTYPE_SPARSE
    sparse[483:495] = b"\x80" + size.to_bytes(11, "big")  # the real size
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\x00 " % sum(sparse)
    end = content.rindex(b"3.cls") + 1024
    path.write_bytes(bytes(content[:end]) + bytes(sparse) + bytes(1024))
    with pytest.raises(UserError, match=r"sparse or truncated|no label"):
        open_data(str(path))


def test_negative_sizes(tmp_path):
    entry = tarfile.TarInfo("8.cls")
    entry.pax_headers = {"size": "-5"}
    with pytest.raises(UserError):
        open_data(str(shard(tmp_path, (entry, b"1"))))


def test_a_range_of_shards_has_a_limit(tmp_path):
    with pytest.raises(UserError, match=r"there is no shard|more than 100,000 shards"):
        open_data(str(tmp_path / "x{0..99999999999}.tar"))


@pytest.mark.parametrize("size", [2**62, 2**80])
@pytest.mark.parametrize("name", ["GNU.sparse.realsize", "GNU.sparse.size", "size"])
def test_sizes_that_no_file_has(tmp_path, name, size):
    entry = tarfile.TarInfo("9.png")
    entry.pax_headers = {name: str(size), "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "9.png"}
    with pytest.raises(UserError, match=r"a\.tar|9\.png"):
        open_data(str(shard(tmp_path, (entry, b"1\n0\n1\n" + bytes(506)), (tarfile.TarInfo("9.cls"), b"1"))))


def test_class_names_that_are_nested_too_deeply(tmp_path):
    (tmp_path / "classes.json").write_text(DEEP)
    with pytest.raises(UserError, match=r"classes\.json is not a file of class names: it is nested too deeply"):
        open_data(str(shard(tmp_path)))
