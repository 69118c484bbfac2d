"""Files from the network, whole and as their authors published them, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import math
import os
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from vitrail.errors import UserError
from vitrail.progress import log, track

_SECONDS = 30  # without a byte, after which a connection is given up
_PIECE = 1 << 18  # bytes


def cache_folder() -> Path:
    """Where vitrail keeps what it can fetch or compute again: $VITRAIL_CACHE, or a folder in the user's cache."""
    given = os.environ.get("VITRAIL_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vitrail").expanduser()


def download(address: str, path: Path, md5: str) -> None:
    """Fetches a file; it gets its name when it is whole and has the published checksum."""
    log.info("Downloading %s to %s.", address, path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    digest = hashlib.md5(usedforsecurity=False)  # what the authors publish
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(address, timeout=_SECONDS) as reply, temporary.open("wb") as file:
            size = int(reply.headers.get("Content-Length") or 0) or None
            pieces = iter(lambda: reply.read(_PIECE), b"")
            for piece in track(pieces, path.name, total=size and math.ceil(size / _PIECE), unit="piece"):
                file.write(piece)
                digest.update(piece)
            if size is not None and file.tell() < size:
                raise UserError(f"{address} broke off after {file.tell():,} of {size:,} bytes. Try again.")
        if digest.hexdigest() != md5:
            raise UserError(
                f"{address} is not the file that its authors published: its MD5 sum must be {md5}, but it is "
                f"{digest.hexdigest()}. Try again, or fetch it from elsewhere and put it at {path}."
            )
        temporary.replace(path)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(f"{address} could not be downloaded to {path}: {_reason(error)}.") from error
    finally:
        with suppress(OSError):  # there may be no such folder
            temporary.unlink()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()  # it holds the connection
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return _reason(error.reason) if isinstance(error.reason, Exception) else str(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error) or type(error).__name__
