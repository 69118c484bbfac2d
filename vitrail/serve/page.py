"""The page at `/`, the documentation of the API at `/docs`, and their assets, read once and sent from memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from vitrail.serve.errors import ApiError

ASSETS = Path(__file__).parent / "assets"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Asset:
    content: bytes
    type: str
    tag: str


@cache
def assets() -> dict[str, Asset]:
    """Every file of the page by name; nothing else can be asked for."""
    found = {}
    for path in sorted(ASSETS.iterdir()):
        content = path.read_bytes()
        found[path.name] = Asset(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


@router.get("/")
async def home(request: Request) -> Response:
    return _send(request, "index.html")


@router.get("/docs")
async def docs(request: Request) -> Response:
    return _send(request, "docs.html")


@router.get("/assets/{name}")
async def asset(request: Request, name: str) -> Response:
    return _send(request, name)


def _send(request: Request, name: str) -> Response:
    found = assets().get(name)
    if found is None:
        raise ApiError(404, "not_found", "Not Found.")
    headers = {"ETag": found.tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.type, headers=headers)
