"""Streams shards from an HTTP server that fails and stalls, with readers that are killed: is each image read once?

    python benchmarks/streaming.py [--images 200000] [--shards 200] [--epochs 2] [--json FILE]
    python benchmarks/streaming.py traffic

Small images, each with its number in its first pixel, are written by `vitrail shard` and served on 127.0.0.1. Of all
requests, 5 % fail (an error, or a connection cut in the middle) and 2 % stall. Two processes read the epochs through
the loader of training, each its share of every batch. Both are killed with -9 several times and continue at the last
batch that both had finished, as after a checkpoint. Every image must be read exactly once per epoch; the memory of the
readers and the size of the cache on disk are recorded.

`traffic` computes how often a set of 1,000 shards is downloaded per epoch, if its batches are shared by machines.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

import numpy as np

SIDE = 16
PROCESSES = 2
SEED = 3


@dataclass(frozen=True)
class Soak:
    """The size of an experiment."""

    images: int = 200_000
    shards: int = 200
    batch: int = 250
    kills: int = 4
    fail: float = 0.05  # share of requests
    stall: float = 0.02
    patience: float = 2.0  # seconds after which a silent request is repeated
    shards_held: float = 40  # size of the cache
    epochs: int = 2


# The server


class Flaky(BaseHTTPRequestHandler):
    """Serves the files of a folder; some requests fail, some are cut off, some stall."""

    folder: ClassVar[Path]
    soak: ClassVar[Soak]
    counts: ClassVar[dict[str, int]] = dict.fromkeys(("requests", "failed", "cut", "stalled", "bytes"), 0)
    lock: ClassVar[threading.Lock] = threading.Lock()
    slots: ClassVar[threading.Semaphore] = threading.Semaphore(16)
    chance: ClassVar[random.Random] = random.Random(SEED)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/statistics":
            return self.answer(json.dumps(self.counts).encode())
        path = self.folder / self.path.lstrip("/")
        if "/" in self.path[1:] or not path.is_file():
            return self.send_error(404)
        with self.lock:
            draw = self.chance.random()
            kind = "failed" if draw < self.soak.fail / 2 else "cut" if draw < self.soak.fail else ""
            kind = kind or ("stalled" if draw < self.soak.fail + self.soak.stall else "")
            self.counts["requests"] += 1
            self.counts["bytes"] += path.stat().st_size
            if kind:
                self.counts[kind] += 1
        with self.slots:
            if kind == "failed":
                return self.send_error(503)
            return self.answer(path.read_bytes(), kind)

    def answer(self, content: bytes, kind: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self.wfile.write(content if not kind else content[: len(content) // 2])
            self.wfile.flush()
            if kind == "stalled":
                time.sleep(3 * self.soak.patience)
        except OSError:  # the client has gone
            pass

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path, soak: Soak) -> None:
    Flaky.folder, Flaky.soak = folder, soak
    server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


# A reader: a process of a run


def read(address: str, rank: int, start: int, log: Path, soak: Soak, cache: float) -> None:
    """Reads batches from `start` on, counted over all epochs; writes each one's image numbers and the memory."""
    from vitrail.data import open_data
    from vitrail.data.loader import TrainBatches
    from vitrail.data.preprocess import Preprocess
    from vitrail.data.shards import fetch

    fetch.SECONDS = soak.patience
    split = open_data(address, cache_gb=cache).splits["train"]
    loader = TrainBatches(split, Preprocess((SIDE, SIDE), 3), soak.batch, SEED)
    with log.open("ab", buffering=0) as file:
        for epoch in range(start // len(loader), soak.epochs):
            first = max(start - epoch * len(loader), 0)
            numbers = [np.array_split(batch, PROCESSES)[rank] for batch in loader.numbers(epoch, first)]
            for k, (pixels, _) in enumerate(loader.read(epoch, numbers), first):
                corner = pixels[:, :, 0, 0].numpy().astype(np.int64)
                found = (corner[:, 0] << 16) + (corner[:, 1] << 8) + corner[:, 2]
                file.write(np.array([epoch * len(loader) + k, memory(), *found]).tobytes())


def memory() -> int:
    """The memory of this process in bytes, without pages of files (Linux)."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


# The experiment


def write(folder: Path, soak: Soak) -> Path:
    """Shards of images that know their numbers."""
    import vitrail

    rng = np.random.default_rng(SEED)
    arrays = folder / "arrays"
    arrays.mkdir()
    for split, count in (("train", soak.images), ("val", 20)):
        pixels = np.lib.format.open_memmap(arrays / f"x_{split}.npy", "w+", np.uint8, (count, SIDE, SIDE, 3))
        for at in range(0, count, 10_000):
            some = np.arange(at, min(at + 10_000, count))
            pixels[some] = rng.integers(0, 256, (len(some), SIDE, SIDE, 3), np.uint8)
            pixels[some, 0, 0] = np.stack([some >> 16, some >> 8, some], axis=1) & 255
        pixels.flush()
        np.save(arrays / f"y_{split}.npy", np.arange(count) % 2)
    out = folder / "shards"
    vitrail.shard(arrays, out, shard_size=str(-(-soak.images // soak.shards)))
    shutil.rmtree(arrays)
    return out


class Readers:
    """The processes that read, and what they have read."""

    def __init__(self, folder: Path, address: str, soak: Soak, cache: float):
        self.logs = [folder / f"read-{rank}" for rank in range(PROCESSES)]
        self._given = address, json.dumps(asdict(soak)), str(cache)
        self._row = 2 + soak.batch // PROCESSES
        self._environment = {**os.environ, "VITRAIL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts all at the batch that follows the last one that all have finished."""
        done = min(len(self.rows(rank)) for rank in range(PROCESSES))
        for rank, log in enumerate(self.logs):
            log.touch()
            os.truncate(log, done * self._row * 8)
            words = [sys.executable, __file__, "read", *self._given, str(rank), str(done), str(log)]
            self._processes.append(subprocess.Popen(words, env=self._environment))

    def kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def running(self) -> bool:
        codes = [process.poll() for process in self._processes]
        if any(codes):
            raise SystemExit(f"A reader failed: {codes}")
        return None in codes

    def rows(self, rank: int) -> Any:
        """Of each batch its number, the memory and the images; an unfinished row is left out."""
        content = self.logs[rank].read_bytes() if self.logs[rank].exists() else b""
        whole = len(content) // (8 * self._row)
        return np.frombuffer(content[: whole * 8 * self._row], np.int64).reshape(whole, self._row)


def size_of(cache: Path) -> int:
    """The bytes of a cache of shards, in which nothing is begun, renamed or removed meanwhile."""
    if not cache.exists():
        return 0
    with (cache / "room.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in cache.iterdir())


def measure(soak: Soak, folder: Path) -> dict[str, Any]:
    """Runs the experiment and returns its figures; raises AssertionError if an image is lost or repeated."""
    shards = write(folder, soak)
    largest = max(path.stat().st_size for path in shards.glob("*.tar"))
    limit = soak.shards_held * largest
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", str(shards), json.dumps(asdict(soak))], stdout=subprocess.PIPE, text=True
    )
    readers = None
    try:
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
        readers = Readers(folder, address, soak, limit / 2**30)
        begun, disk, kills = time.monotonic(), 0, list(killing_points(soak))
        total = soak.epochs * (soak.images // soak.batch)
        readers.start()
        while readers.running():
            time.sleep(0.05)
            disk = max(disk, size_of(folder / "cache" / "remote"))
            done = min(len(readers.rows(rank)) for rank in range(PROCESSES))
            if kills and done >= kills[0]:
                kills.pop(0)
                readers.kill()
                readers.start()
        seconds = time.monotonic() - begun
        with urlopen(f"{address}/statistics", timeout=10) as answer:
            counts = json.load(answer)
        rows = [readers.rows(rank) for rank in range(PROCESSES)]
    finally:
        if readers is not None:
            readers.kill()
        server.kill()
        server.communicate()
    per_epoch = total // soak.epochs
    for mine in rows:
        assert mine[:, 0].tolist() == list(range(total))
    for epoch in range(soak.epochs):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = np.concatenate([mine[part, 2:].ravel() for mine in rows])
        assert np.array_equal(np.sort(seen), np.arange(soak.images)), f"epoch {epoch}: an image is lost or repeated"
    memories = np.stack([mine[:, 1] for mine in rows])
    last = memories[:, -(total - (killing_points(soak) or [0])[-1]) :]  # of the readers that were not killed
    third = last.shape[1] // 3
    return {
        **asdict(soak),
        "processes": PROCESSES,
        "killed at batch": killing_points(soak),
        "batches": total,
        "seconds": round(seconds, 1),
        "images per second": round(soak.epochs * soak.images / seconds),
        "server": counts,
        "set MB": round(sum(path.stat().st_size for path in shards.glob("*.tar")) / 1e6, 1),
        "cache limit MB": round(limit / 1e6, 1),
        "cache peak MB": round(disk / 1e6, 1),
        "memory MB": {
            "first third": round(float(last[:, :third].mean()) / 1e6, 1),
            "last third": round(float(last[:, -third:].mean()) / 1e6, 1),
            "peak": round(float(memories.max()) / 1e6, 1),
            "by tenth": [round(float(part.mean()) / 1e6, 1) for part in np.array_split(last, 10, axis=1)],
        },
    }


def killing_points(soak: Soak) -> list[int]:
    """The batches, over all epochs, at which the readers are killed: in the first half of the run."""
    total = soak.epochs * (soak.images // soak.batch)
    return sorted(random.Random(SEED).sample(range(2, total // 2), soak.kills))


def traffic(machines: int, shards: int = 1000, each: int = 1000, batch: int = 4096) -> float:
    """The shards that all machines need in an epoch, over those that there are."""
    from vitrail.data.loader import TrainBatches
    from vitrail.data.preprocess import Preprocess
    from vitrail.data.shards.files import LocalFile
    from vitrail.data.shards.split import Shard, Shards, ShardSplit

    nothing = np.zeros(each, np.int64)
    store = Shards([Shard(LocalFile(Path(str(k))), nothing.astype("S1"), nothing, nothing) for k in range(shards)])
    split = ShardSplit(store, np.arange(shards * each), np.zeros(shards * each, np.int64), 3)
    numbers = TrainBatches(split, Preprocess((SIDE, SIDE), 3), batch, SEED).numbers(0)
    parts = zip(*(np.array_split(store.shard_numbers(one), machines) for one in numbers), strict=True)
    return sum(len(np.unique(np.concatenate(part))) for part in parts) / shards


def main() -> None:
    if sys.argv[1:] == ["traffic"]:
        for machines in (1, 2, 4, 8, 16):
            print(f"{machines:2} machines: {traffic(machines):.2f} times the set")
        return
    if len(sys.argv) > 1 and sys.argv[1] in ("serve", "read"):
        given = sys.argv[2:]
        if sys.argv[1] == "serve":
            serve(Path(given[0]), Soak(**json.loads(given[1])))
        else:
            address, soak, cache, rank, start, log = given
            read(address, int(rank), int(start), Path(log), Soak(**json.loads(soak)), float(cache))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=Soak.images)
    parser.add_argument("--shards", type=int, default=Soak.shards)
    parser.add_argument("--epochs", type=int, default=Soak.epochs)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Soak(asked.images, asked.shards, epochs=asked.epochs), Path(folder))
    print(json.dumps(figures, indent=2))
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
