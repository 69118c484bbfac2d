"""Downloads, each complete and verified before it gets its name; and whether a server answers at all."""

from __future__ import annotations

import hashlib
import http.client
import math
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.files import atomic_write
from vitrail.progress import log, track

_TIMEOUT = 30  # seconds
_PROBE = 5  # seconds
_CHUNK = 1 << 18  # bytes


def cache_folder() -> Path:
    """The folder for downloads and cached results: $VITRAIL_CACHE, or `vitrail` in the user's cache folder."""
    given = os.environ.get("VITRAIL_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vitrail").expanduser()


def download(address: str, path: Path, md5: str) -> None:
    """Downloads a file and verifies its MD5 checksum before giving it its name."""
    log.info("Downloading %s to %s.", address, path)
    with _naming(address, path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, _naming(address, path):
        found = _receive(address, temporary, path.name)
        if found != md5:
            raise UserError(
                f"{address} has the wrong checksum: its MD5 sum must be {md5}, but it is {found}. Try again, or get "
                f"the file elsewhere and save it as {path}."
            )


@contextmanager
def _naming(address: str, path: Path) -> Iterator[None]:
    """Turns errors of the network and of the disk into a UserError."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(f"{address} could not be downloaded to {path}: {_reason(error)}.") from error


def _receive(address: str, path: Path, title: str) -> str:
    """Stores what a server sends; returns its MD5 checksum, the kind that authors publish."""
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(address, timeout=_TIMEOUT) as reply, path.open("wb") as file:
        size = int(reply.headers.get("Content-Length") or 0) or None
        chunks = iter(lambda: reply.read(_CHUNK), b"")
        for chunk in track(chunks, title, total=size and math.ceil(size / _CHUNK), unit="chunk"):
            file.write(chunk)
            digest.update(chunk)
        if size is not None and file.tell() < size:
            raise UserError(f"{address} was cut off after {file.tell():,} of {size:,} bytes. Try again.")
    return digest.hexdigest()


def answers(address: str) -> bool:
    """Whether a server answers at once, whatever it says. Clients that retry take half a minute to give up."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PROBE).close()
    except urllib.error.HTTPError as error:
        error.close()
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # its certificate is for the client to judge
    except (OSError, http.client.HTTPException):
        return False
    return True


@contextmanager
def offline_if_unreachable(datasets: Any) -> Iterator[None]:
    """Sets the offline mode of `datasets` if the hub does not answer: it would retry for half a minute."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not any(before) and not answers(constants.ENDPOINT):
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()  # it keeps the connection open
        return f"the server returned {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return _reason(error.reason) if isinstance(error.reason, Exception) else str(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error) or type(error).__name__
