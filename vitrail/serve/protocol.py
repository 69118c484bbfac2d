"""HTTP/1.1 of uvicorn, with limits on the headers of a request: their size and the time to send them.

They are read before anything knows who asks. uvicorn's other parser, httptools, has no limit of the size.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LARGEST = 2**16  # bytes of the headers
LONGEST = 30.0  # seconds to send them


class LimitedProtocol(H11Protocol):
    """Closes connections on which a request is begun, but its headers are not complete in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self.conn.their_state is h11.IDLE:
            self._expect_headers()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(LONGEST, lambda: self.transport.close())

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
