"""A service with a real socket: in a thread of this process, or as the command in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from vitrail.serve.app import create_app
from vitrail.serve.metrics import Shared
from vitrail.serve.server import bind, configure
from vitrail.serve.settings import Settings, named_sources


class Served:
    """A running service and a client of it."""

    def __init__(self, address: str, **client: Any):
        self.address = address
        self.client = httpx.Client(base_url=address, timeout=60, **client)

    def post(self, path: str, content: bytes | None = None, **options: Any) -> httpx.Response:
        """Posts raw bytes, or what httpx makes of the options."""
        params = {name: options.pop(name) for name in list(options) if name not in ("files", "json", "headers")}
        return self.client.post(path, content=content, params=params, **options)

    def get(self, path: str, **params: Any) -> httpx.Response:
        return self.client.get(path, params=params)

    def predict(self, content: bytes, **params: Any) -> Any:
        """The prediction of one image."""
        answer = self.post("/predict", content, **params)
        assert answer.status_code == 200, answer.text
        return answer.json()["predictions"][0]


@contextmanager
def in_thread(*models: object, **settings: Any) -> Iterator[Served]:
    """A service in this process."""
    chosen = Settings(sources=named_sources([str(model) for model in models]), port=0, engine="torch", **settings)
    shared = Shared([name for name, _ in chosen.sources], 1)
    bound = bind(chosen.host, 0)
    server = uvicorn.Server(configure(chosen, partial(create_app, chosen, shared)))
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        with_key = {"headers": {"Authorization": f"Bearer {chosen.api_key}"}} if chosen.api_key else {}
        served = Served(f"http://127.0.0.1:{bound.getsockname()[1]}", **with_key)
        served.server = server
        yield served
        served.client.close()
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


@contextmanager
def by_command(log: Path, *words: object) -> Iterator[tuple[Served, subprocess.Popen[bytes]]]:
    """`vitrail serve` in a process of its own, which logs to a file."""
    command = [sys.executable, "-m", "vitrail", "serve", *map(str, words), "--port", "0", "--engine", "torch"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        until(lambda: "to serve at" in log.read_text() or process.poll() is not None)
        served = Served(re.search(r"http://\S+", log.read_text())[0])
        until(lambda: answers(served))
        yield served, process
        served.client.close()
    finally:
        process.terminate()
        process.wait()


def answers(served: Served) -> bool:
    try:
        return served.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Any, seconds: float = 90) -> None:
    """Waits for a condition."""
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("It never came true.")
