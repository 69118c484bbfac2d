"""Images from the web and from standard input."""

from __future__ import annotations

import sys
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from vitrail.data.pixels import UnreadableImage
from vitrail.version import VERSION

STDIN = "-"

_SECONDS = 30  # without an answer
_MOST = 2**28  # bytes of a file


def is_remote(source: object) -> bool:
    """Whether a source is a web address or `-`, standard input; a `Path` never is."""
    return isinstance(source, str) and (source == STDIN or source.lower().startswith(("http://", "https://")))


def fetched(source: str | Path | bytes) -> str | Path | bytes:
    """The content of a web address or of standard input; any other source as it is."""
    if not isinstance(source, str) or not is_remote(source):
        return source
    try:
        if source == STDIN:
            content = sys.stdin.buffer.read(_MOST + 1)
        else:
            with urlopen(Request(source, headers={"User-Agent": f"vitrail/{VERSION}"}), timeout=_SECONDS) as answer:
                content = answer.read(_MOST + 1)
    except HTTPError as error:
        error.close()
        raise UnreadableImage(f"the server answered {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnreadableImage(f"cannot be downloaded: {reason}") from error
    if len(content) > _MOST:
        raise UnreadableImage(f"more than {_MOST // 2**20} MiB")
    return content
