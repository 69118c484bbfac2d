"""Files and folders: written atomically, locked by one process, and read only if they are regular files."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.errors import UserError, first_line

try:
    import fcntl
except ImportError:  # Windows, where runs are not locked
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
ANNOTATIONS = 2**31  # bytes of a file with the annotations of a data set: COCO's largest have 0.5 GB
_MOST = 2**26  # bytes of a text file of another kind
_held: set[Path] = set()  # folders locked by this process: the system's lock does not tell its threads apart


# Writing


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `path` on success; on failure `path` is unchanged."""
    temporary = _temporary(path)
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise UserError(
            f"Could not write {path}: {error.strerror or error}. An existing file is unchanged. "
            "Free some space or choose another folder."
        ) from error
    finally:
        with suppress(OSError):  # in a read-only folder the error above is the one to report
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary folder to fill, and renames it to `path` on success; on failure `path` is unchanged.

    An existing folder raises FileExistsError unless it is empty or to be replaced: then it is renamed before it is
    deleted, so that a kill leaves the old folder, the new one or none, and never a part.
    """
    old = _temporary(path, "old")
    with folder_beside(path) as temporary:
        try:
            yield temporary
            for file in temporary.iterdir():
                _flush(file)
            flush_folder(temporary)
            if replace and path.exists():
                path.rename(old)
            try:
                temporary.rename(path)
            except OSError:  # of many types, on different systems
                if path.exists():
                    raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
                raise
            flush_folder(path.parent)
        finally:
            if not path.exists() and old.exists():
                old.rename(path)
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Yields a temporary folder in the same folder as `path`, for files that are renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_together(files: Sequence[Path], main: Path) -> None:
    """Moves files that belong together to the folder of `main`, one of them, which is missing until all are there.

    A kill then leaves the old files, the new ones, or no `main`: never one of them beside parts of the other.
    """
    for file in files:
        _flush(file)
    main.unlink(missing_ok=True)
    flush_folder(main.parent)
    for file in sorted(files, key=lambda file: file.name == main.name):
        file.replace(main.with_name(file.name))
    flush_folder(main.parent)


def check_writable(folder: Path) -> None:
    """Raises UserError if files cannot be written to a folder, which need not exist, before they are computed."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"The folder {folder} cannot be created: {there} is a file. Choose another.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there} cannot be written to: it is read-only, or of another user. Choose another folder.")


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power failure, where the system can."""
    with suppress(OSError):  # Windows and some network file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _temporary(path: Path, end: str = "tmp") -> Path:
    """A name in the same folder that only this process uses, once what killed processes left there is removed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.{end}"):
        owner = left.name.split(".")[-2]
        if left.is_symlink() or (owner.isdecimal() and not _is_running(int(owner))):  # a link is nobody's
            _remove(left)
    return path.with_name(f".{path.name}.{os.getpid()}.{end}")


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # it cannot be asked
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # another user's
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def free_name(folder: Path, name: str) -> str:
    """A name that is free in a folder, with a number appended if it is taken."""
    free, number = name, 1
    while (folder / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def open_to_append(path: Path) -> TextIOWrapper:
    """Opens a regular UTF-8 file, which need not exist, for reading and appending.

    A link in a folder that came from elsewhere may lead to any file of the user: it raises UserError.
    """
    try:
        return open(path, "a+", encoding="utf-8", errors="backslashreplace", opener=_not_followed)
    except OSError as error:
        if not os.path.lexists(path) or (path.is_file() and not path.is_symlink()):
            raise
        what = "a symbolic link" if path.is_symlink() else "a folder" if path.is_dir() else "a FIFO or a device"
        raise UserError(f"{path} must be a regular file, but it is {what}. Delete it.") from error


def _not_followed(path: str, flags: int) -> int:
    return _regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


# Locking


@contextmanager
def locked(folder: Path, what: str = "training", way_out: str = "choose another --name") -> Iterator[None]:
    """Holds the lock of a folder, for `what`; raises UserError if another process has it.

    The system frees the lock when the process ends, however it ends. Child processes do not inherit it.
    """
    place = folder.resolve()
    if place in _held:
        raise UserError(f"This process is already {what} {folder}.")
    try:
        file = open_to_append(folder / LOCK_FILE)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error.strerror}. Copy it to a folder of yours.") from error
    with file:
        if fcntl is not None:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    file.seek(0)
                    owner = file.read(20).strip() or "unknown"
                    raise UserError(
                        f"Another process, pid {owner}, is {what} {folder}. Wait for it, stop it, or {way_out}."
                    ) from None  # other errors: a file system without locks
        with suppress(OSError):  # a full disk
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        _held.add(place)
        try:
            yield
        finally:
            _held.discard(place)


# Reading


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading. A FIFO would wait for a writer for ever, and a device may have no end."""
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a folder", path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_bytes(path: str | Path, most: int = _MOST) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def read_text(path: str | Path, most: int = _MOST) -> str:
    """The content of a regular UTF-8 file of at most `most` bytes."""
    return read_bytes(path, most).decode("utf-8")


def read_lines(path: Path, what: str) -> list[str]:
    """The lines of a UTF-8 file, stripped; raises UserError if it is none."""
    with reading(path, what):
        return [line.strip() for line in read_text(path).splitlines()]


def read_json(path: Path, what: str = "a JSON file", most: int = _MOST) -> Any:
    """The content of a JSON file of at most `most` bytes; raises UserError if it is none."""
    with reading(path, what):
        return json.loads(read_text(path, most))


@contextmanager
def reading(path: object, what: str, advice: str = "") -> Iterator[None]:
    """Turns whatever a parser raises into a UserError that names the file: damaged files raise nearly anything."""
    end = f". {advice}" if advice else "."
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror or error}{end}") from error
    except MemoryError as error:
        raise UserError(f"{path} cannot be read: it needs more memory than there is{end}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not {what}: it is nested too deeply{end}") from error
    except Exception as error:
        raise UserError(f"{path} is not {what}: {first_line(error)}{end}") from error
