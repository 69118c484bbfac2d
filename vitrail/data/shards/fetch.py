"""Files at `https://`, `http://`, `s3://` and `gs://` addresses, through fsspec.

A request that fails, is cut off or stalls is repeated. What the server says about a file is not believed: at most the
expected number of bytes is stored, and the checksum of a manifest is compared.
"""

from __future__ import annotations

import hashlib
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vitrail.errors import UserError, first_line
from vitrail.files import open_regular, read_text, reading
from vitrail.progress import log

T = TypeVar("T")

SECONDS = 30  # without a byte, after which a request is repeated
TRIES = 10  # of a shard: with the pauses, it takes two minutes to give up
_FIRST_TRIES = 4  # when a data set is opened: a wrong address is reported within seconds
_LONGEST_PAUSE = 30  # seconds
_NEEDS = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}
_TEMPORARY = (408, 425, 429)  # answers below 500 that may change
_CHUNK = 2**20


def is_address(source: object) -> bool:
    """Whether a source is the address of a file or folder; a `Path` never is."""
    return isinstance(source, str) and re.match(r"(https?|s3|gs)://", source) is not None


def fetch(address: str, path: Path, size: int, sha256: str | None = None) -> None:
    """Downloads a file of `size` bytes to `path`, which only the caller knows."""

    def once() -> None:
        system, name = _file_system(address)
        system.get_file(name, str(path), callback=_limit(size))
        if (got := path.stat().st_size) != size:
            raise OSError(f"it has {got:,} bytes instead of {size:,}")
        if sha256 is not None and (found := file_sha256(path)) != sha256:
            raise OSError(f"its SHA-256 checksum is {found[:12]}… instead of {sha256[:12]}…")

    _repeated(address, once, TRIES)


def fetch_text(address: str, most: int) -> str:
    """The content of a UTF-8 file of at most `most` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"

        def once() -> None:
            system, name = _file_system(address)
            system.get_file(name, str(path), callback=_limit(most))

        _repeated(address, once, _FIRST_TRIES)
        with reading(address, "a text file"):
            return read_text(path, most)


def file_facts(address: str) -> tuple[int, str]:
    """The size of a file, and a text that changes with its content, if the server gives one."""

    def once() -> Any:
        system, name = _file_system(address)
        return system.info(name)

    facts = _repeated(address, once, _FIRST_TRIES)
    if not isinstance(facts.get("size"), int) or facts["size"] < 1:
        raise UserError(f"{address} has no known size. Write a manifest of the shards with `vitrail shard`.")
    return facts["size"], str(facts.get("ETag") or facts.get("etag") or facts.get("md5Hash") or "")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _file_system(address: str) -> tuple[Any, str]:
    """The file system of an address, and the name of the file there; fsspec keeps one for each kind."""
    scheme = address.partition("://")[0]
    try:
        import aiohttp
        import fsspec

        waits = aiohttp.ClientTimeout(total=None, sock_connect=SECONDS, sock_read=SECONDS)
        options: dict[str, dict[str, Any]] = {
            "s3": {"config_kwargs": {"connect_timeout": SECONDS, "read_timeout": SECONDS}},
            "gs": {"requests_timeout": waits},
        }
        system, name = fsspec.url_to_fs(address, **options.get(scheme, {"client_kwargs": {"timeout": waits}}))
    except ImportError as error:
        raise UserError(
            f"{address}: data at {scheme}:// needs fsspec and {_NEEDS[scheme]}: pip install 'vitrail[cloud]'"
        ) from error
    return system, name


class _TooLong(Exception):
    """The server sends more than it should."""


def _limit(most: int) -> Any:
    """A callback of fsspec that stops a download beyond `most` bytes."""
    from fsspec.callbacks import Callback

    class Limit(Callback):  # type: ignore[misc,unused-ignore]
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > most:
                raise _TooLong(f"it has more than {most:,} bytes")

    return Limit()


def _repeated(address: str, act: Callable[[], T], tries: int) -> T:
    """Calls a function until it succeeds, with growing pauses."""
    for attempt in range(1, tries + 1):
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # aiohttp, botocore and Google's client each have their own
            if _is_final(error):
                raise UserError(f"{address} cannot be read: {_reason(error)}.") from error
            if attempt == tries:
                raise UserError(
                    f"{address} could not be read in {tries} tries: {_reason(error)}. Try again once the "
                    "server answers; a training run goes on with --resume."
                ) from error
            if attempt == tries // 2:
                log.warning("%s: %s. Trying again, %d of %d.", address, _reason(error), attempt + 1, tries)
        time.sleep(min(2.0 ** (attempt - 2), _LONGEST_PAUSE) * random.uniform(0.5, 1))
    raise AssertionError("the last try returns or raises")


def _is_final(error: Exception) -> bool:
    """Whether to repeat the request is pointless."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status not in _TEMPORARY
    final = FileNotFoundError, PermissionError, IsADirectoryError, ValueError, _TooLong
    return isinstance(error, final) or "Credential" in type(error).__name__


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"the server was silent for {SECONDS} seconds"
    status = getattr(error, "status", None)
    return f"the server answered {status} {getattr(error, 'message', '')}".rstrip() if status else first_line(error)
