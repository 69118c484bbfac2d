"""The outermost layer: who may ask, security headers on every answer, one log line per request.

Log lines have the method, the path without its query, the status, the time and the sizes; nothing of the images.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.progress import log
from vitrail.serve.errors import ApiError
from vitrail.serve.settings import Settings

# The page and the probes need no key: they tell nothing about the models.
OPEN = frozenset({"/", "/docs", "/openapi.json", "/health", "/ready"})
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """ASGI middleware around the whole service."""

    def __init__(self, app: ASGIApp, settings: Settings, count: Callable[[str, int, float], None]):
        self._app, self._settings, self._count = app, settings, count
        self._key = None if settings.api_key is None else settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # the start and the end; there are no web sockets
            return
        begun, status, sent, received = time.monotonic(), 0, 0, 0
        head = scope["method"] == "HEAD"
        asked = {**scope, "method": "GET"} if head else scope  # answered like GET, without the body

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def guarded(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
                message["headers"] = headers.raw
            elif message["type"] == "http.response.body":
                if head:
                    message = {**message, "body": b""}
                sent += len(message.get("body", b""))
            await send(message)

        try:
            refusal = self._refusal(scope["path"], Headers(scope=scope))
            await (self._app if refusal is None else refusal.response())(asked, counted, guarded)
        finally:
            seconds = time.monotonic() - begun
            self._count(scope["path"], status, seconds)
            path = scope.get("raw_path", b"").decode("latin-1").partition("?")[0][:100]
            log.info(
                f"{scope['method']} {path} {status or 'closed'} {1000 * seconds:.1f} ms, {received} B in, {sent} B out"
            )

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        """The reason why a request is not passed on."""
        if self._settings.local and self._key is None and _host(headers.get("host", "")) not in _LOCAL:
            # Otherwise a web page could reach the service by a name that it resolves to this machine.
            return ApiError(421, "wrong_host", "This service answers to localhost only. Use --host to open it.")
        foreign = "origin" in headers and urlsplit(headers["origin"]).netloc != headers.get("host", "")
        crossed = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        if foreign or crossed:
            return ApiError(403, "cross_site", "Other web sites may not use this service.")
        if self._key is None or path in OPEN or path.startswith("/assets/"):
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if secrets.compare_digest(given.encode("utf-8", "surrogateescape"), self._key):
            return None
        return ApiError(
            401,
            "unauthorized",
            "This service needs its API key, as `Authorization: Bearer KEY`.",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _host(value: str) -> str:
    """A Host header without its port."""
    name = value.rpartition(":")[0] if value.rpartition(":")[2].isdecimal() and ":" in value else value
    return name.lower()
