"""The settings of a service, as `vitrail serve` makes them from its flags."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from vitrail.errors import UserError
from vitrail.runs import EngineName

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker process needs to know."""

    sources: tuple[tuple[str, str], ...]  # name and run folder or file of each model; the first is the default
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    api_key: str | None = None
    max_batch: int = 16
    max_wait_ms: float = 5.0
    queue: int = 256
    timeout: float = 30.0
    max_mb: float = 32.0
    max_megapixels: float = 50.0
    max_images: int = 32
    reload: float = 2.0
    device: str | None = None
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        above = {"workers": 1, "max_batch": 1, "queue": 1, "max_images": 1, "max_wait_ms": 0, "reload": 0, "port": 0}
        for name, least in above.items():
            if getattr(self, name) < least:
                raise UserError(f"'{name}' must be at least {least}, but it is {getattr(self, name)}.")
        for name in ("timeout", "max_mb", "max_megapixels"):
            if not getattr(self, name) > 0:
                raise UserError(f"'{name}' must be above 0, but it is {getattr(self, name)}.")
        if self.port > 65535:
            raise UserError(f"'port' must be at most 65535, but it is {self.port}.")
        if self.queue < self.max_images:
            raise UserError(
                f"'queue' must be at least 'max_images', {self.max_images}, but it is {self.queue}: "
                "a request of that many images could never be accepted."
            )
        if self.api_key is not None and len(self.api_key) < 8:
            raise UserError("The API key must have at least 8 characters. Make one with `openssl rand -hex 16`.")
        if self.api_key is not None and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", self.api_key):
            raise UserError(
                "The API key must have only ASCII letters, digits and punctuation, as HTTP headers do. Make one with "
                "`openssl rand -hex 16`."
            )

    @property
    def max_bytes(self) -> int:
        """The largest body of a request."""
        return int(self.max_mb * 2**20)

    @property
    def max_pixels(self) -> int:
        return int(self.max_megapixels * 1e6)

    @property
    def local(self) -> bool:
        """Whether only programs on this machine can connect."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __repr__(self) -> str:  # it is pickled for workers and may be logged: without the key
        shown = (f.name for f in fields(self) if f.name != "api_key")
        return f"Settings({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def named_sources(models: Sequence[str | Path]) -> tuple[tuple[str, str], ...]:
    """Names and sources, from `runs/demo` or `name=runs/demo`."""
    found: dict[str, str] = {}
    for model in map(str, models):
        name, equals, source = model.partition("=")
        if not equals or not _NAME.fullmatch(name) or Path(model).exists():
            name, source = _short(model), model
        if not source:
            raise UserError(f"'{model}' names no model. Write {name}=RUN.")
        if name in found:
            raise UserError(f"Two models are named '{name}'. Name them: vitrail serve a=RUN b=RUN")
        found[name] = source
    if not found:
        raise UserError("There is no model to serve. Give a run folder or a weights file.")
    return tuple(found.items())


def _short(source: str) -> str:
    """The name of a model from its path."""
    path = Path(source)
    name = path.stem if path.suffix in (".onnx", ".xml", ".safetensors", ".pth", ".pt", ".npz", ".bin") else path.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name or path.resolve().name).strip("-._")[:64]
    return name or "model"


def key_from_environment(given: str | None) -> str | None:
    """The API key: the given one, or VITRAIL_API_KEY."""
    return given or os.environ.get("VITRAIL_API_KEY") or None
