"""Atomic files and folders, locks, and what is refused before it is read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from vitrail.errors import UserError
from vitrail.files import atomic_folder, folder_beside, locked, move_together, open_regular, reading, write_text

DEAD = 2**22 + 1  # above the largest process number


def test_a_write_leaves_the_old_file_or_the_new_one(tmp_path):
    file = tmp_path / "a.txt"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path):
    (tmp_path / f".a.txt.{DEAD}.tmp").write_text("half")
    other = tmp_path / f".a.txt.{os.getppid()}.tmp"  # of a process that is running
    other.write_text("half")
    write_text(tmp_path / "a.txt", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.txt", other.name])


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".a.txt.{os.getpid()}.tmp").symlink_to(victim)
    write_text(tmp_path / "a.txt", "new")
    assert ((tmp_path / "a.txt").read_text(), victim.read_text()) == ("new", "mine")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "runs" / "one"
    with pytest.raises(UnicodeEncodeError), atomic_folder(place) as folder:
        (folder / "file").write_text("\ud800", encoding="utf-8")
    assert list(place.parent.iterdir()) == []
    with atomic_folder(place) as folder:
        (folder / "file").write_text("1")
    with pytest.raises(FileExistsError), atomic_folder(place) as folder:
        (folder / "file").write_text("2")
    assert (place / "file").read_text() == "1"
    with atomic_folder(place, replace=True) as folder:
        (folder / "other").touch()
    assert [path.name for path in place.iterdir()] == ["other"]
    assert list(place.parent.iterdir()) == [place]


def test_files_that_belong_together_are_never_mixed(tmp_path, monkeypatch):
    """A kill at any moment, as an exception instead of each rename."""
    main, names, replace, left = tmp_path / "a.xml", ("a.bin", "a.xml", "a.xml.json"), Path.replace, 0

    def killed(source: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", killed)
    for count in range(4):
        for name in names:
            (tmp_path / name).write_text("old")
        left = count
        with suppress(KeyboardInterrupt), folder_beside(main) as folder:
            for name in names:
                (folder / name).write_text("new")
            move_together(list(folder.iterdir()), main)
        texts = {path.read_text() for path in tmp_path.iterdir()}
        assert texts == {"new"} if count == 3 else not main.exists()
        assert not list(tmp_path.glob(".*"))


def test_renames_survive_a_power_failure(tmp_path, monkeypatch):
    """What is renamed is on the disk before, and its folder afterwards."""
    flushed: list[int] = []  # inodes
    moved: list[tuple[int, int, int]] = []  # inodes of a file and its folder; how many were flushed before
    replace = Path.replace

    def move(source: Path, target: Path) -> Path:
        moved.append((source.stat().st_ino, target.parent.stat().st_ino, len(flushed)))
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "replace", move)
    monkeypatch.setattr(Path, "rename", move)
    for folder in ("texts", "runs", "graphs"):
        (tmp_path / folder).mkdir()
    write_text(tmp_path / "texts/a.txt", "1")
    with atomic_folder(tmp_path / "runs/run") as folder:
        (folder / "file").write_text("1")
    with folder_beside(tmp_path / "graphs/a.onnx") as folder:
        for name in ("a.onnx", "a.onnx.data"):
            (folder / name).write_text("1")
        move_together(list(folder.iterdir()), tmp_path / "graphs/a.onnx")
    assert len(moved) == 4
    for inode, parent, number in moved:
        assert inode in flushed[:number]
        assert parent in flushed[number:]


def test_another_process_cannot_take_a_lock_and_a_killed_one_leaves_none(tmp_path):
    code = f"""
import sys
from contextlib import suppress
from pathlib import Path
from vitrail.files import locked
with locked(Path({str(tmp_path)!r})):
    print("locked", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match=f"Another process, pid {other.pid}, is training"), locked(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(UserError, match="This process is already training"), locked(tmp_path):
            pass


def test_only_regular_files_are_opened(tmp_path):
    fifo, link, regular = tmp_path / "fifo", tmp_path / "link", tmp_path / "file"
    os.mkfifo(fifo)
    link.symlink_to("/dev/zero")
    regular.write_bytes(b"content")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path in (fifo, link, tmp_path / "socket", tmp_path):
            with pytest.raises(OSError):  # noqa: PT011  # of several types, but at once
                open_regular(path)
    with open_regular(regular) as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), OverflowError("large"), KeyError("x")])
def test_whatever_a_parser_raises_names_the_file(error):
    with pytest.raises(UserError, match=r"^a\.bin "), reading(Path("a.bin"), "a file"):
        raise error
