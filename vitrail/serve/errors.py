"""`ApiError`, the error that a client can fix, and its JSON: `{"error": {"code": …, "message": …}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse


class ApiError(Exception):
    """A refused request: the HTTP status, a code for programs, and a sentence for people."""

    def __init__(
        self, status: int, code: str, message: str, image: int | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.code, self.message, self.image, self.headers = status, code, message, image, headers

    def of_image(self, number: int) -> ApiError:
        """The same error, for an image of the request, counted from 1."""
        return ApiError(self.status, self.code, self.message, number, self.headers)

    def response(self) -> JSONResponse:
        content: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.image is not None:
            content["image"] = self.image
        return JSONResponse({"error": content}, self.status, headers=self.headers)


def busy(message: str) -> ApiError:
    """The service cannot take the request now."""
    return ApiError(503, "busy", message, headers={"Retry-After": "1"})
