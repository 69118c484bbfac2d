"""The body of a request to the bytes of its images, in memory.

Three kinds of bodies: `multipart/form-data` with files, JSON with base64, or the bytes of one image.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitrail.serve.errors import ApiError, busy
from vitrail.tasks.placement import Placement

_RAW = re.compile(r"image/.+|application/octet-stream|binary/octet-stream|")
_DATA_URL = re.compile(r"data:[\w.+/-]*(;[\w=.-]+)*;base64,")
_SPACE = str.maketrans("", "", " \t\r\n")


@dataclass(eq=False)
class Upload:
    """An image as it was sent."""

    content: bytes
    name: str | None = None  # as given by the client, only to return it
    placement: Placement | None = None  # into the model's input, once it is decoded


class Memory:
    """The bytes of bodies that may be in memory at a time. Used by the event loop only."""

    def __init__(self, size: int):
        self._left = size

    def take(self, size: int) -> None:
        """Raises a 503 if there are not so many."""
        if size > self._left:
            raise busy("Too many large requests at a time. Try again in a second.")
        self._left -= size

    def give(self, size: int) -> None:
        self._left += size


async def read_body(request: Request, limit: int, memory: Memory) -> bytes:
    """The body, at most `limit` bytes, taken from `memory`; the caller gives `len(body)` back."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    taken, chunks = 0, []
    try:
        async for chunk in request.stream():
            if taken + len(chunk) > limit:
                raise _too_large(limit)
            memory.take(len(chunk))
            taken += len(chunk)
            chunks.append(chunk)
    except BaseException:
        memory.give(taken)
        raise
    return b"".join(chunks)


async def parse(headers: Headers, body: bytes, most: int) -> list[Upload]:
    """The images in a body, at most so many."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads = await _multipart(headers, body, most)
    elif kind == "application/json":
        uploads = await asyncio.to_thread(_json, body, most)
    elif _RAW.fullmatch(kind):
        uploads = [Upload(body)] if body else []
    else:
        raise ApiError(
            415,
            "unsupported_media_type",
            "Send multipart/form-data with files, application/json with base64, or the bytes of an image as image/*.",
        )
    if not uploads:
        raise ApiError(422, "no_image", "The request has no image.")
    return uploads


class _InMemory(MultiPartParser):
    spool_max_size = 2**62  # the body is in memory already and has a limit: no file is written


async def _multipart(headers: Headers, body: bytes, most: int) -> list[Upload]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await _InMemory(headers, stream(), max_files=most, max_fields=8, max_part_size=4096).parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise _too_many(most) from error
        raise ApiError(400, "bad_multipart", f"The form cannot be read: {error.message}") from error
    except (ValueError, LookupError) as error:  # an unknown charset, a broken header
        raise ApiError(400, "bad_multipart", "The form cannot be read.") from error
    uploads = []
    try:
        for field, value in form.multi_items():
            if not isinstance(value, UploadFile):
                raise ApiError(422, "not_a_file", f"The field {field[:40]!r} is not a file. Options belong in the URL.")
            uploads.append(Upload(await value.read(), _plain_name(value.filename)))
    finally:
        await form.close()
    return uploads


def _json(body: bytes, most: int) -> list[Upload]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "bad_json", "The body is not valid JSON.") from error
    images = document.get("images") if isinstance(document, dict) else None
    if not isinstance(images, list) or len(document) != 1:
        raise ApiError(422, "bad_json", 'The JSON must be {"images": ["<base64>", …]}.')
    if len(images) > most:
        raise _too_many(most)
    return [Upload(_base64(image, number)) for number, image in enumerate(images, 1)]


def _base64(image: Any, number: int) -> bytes:
    if not isinstance(image, str):
        raise ApiError(422, "bad_base64", "An image in JSON must be a string of base64.", number)
    if re.match(r"(https?|ftp|file):", image[:8], re.IGNORECASE):
        raise ApiError(422, "url_given", "URLs are not fetched. Send the image itself, as base64.", number)
    text = image[match.end() :] if (match := _DATA_URL.match(image[:200])) else image
    try:
        return base64.b64decode(text.translate(_SPACE), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(422, "bad_base64", "The image is not valid base64.", number) from error


def _plain_name(name: str | None) -> str | None:
    """The last part of a client's file name, without control characters."""
    last = re.split(r"[/\\]", name or "")[-1]
    return "".join(c for c in last if c.isprintable())[:200] or None


def _too_large(limit: int) -> ApiError:
    most = f"A request may have at most {limit / 2**20:g} MiB."
    return ApiError(413, "body_too_large", f"{most} Send fewer or smaller images.")


def _too_many(most: int) -> ApiError:
    return ApiError(413, "too_many_images", f"A request may have at most {most} images. Send several requests.")
