"""Clients of an HTTP service, and what they measure: closed loops and open loops of requests with known answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field

import numpy as np

TOLERANCE = 5e-3  # of a probability: engines round differently
JSON, FORM = "application/json", "multipart/form-data; boundary=b"


@dataclass(frozen=True)
class Sample:
    """A request and its right answer."""

    form: bytes  # the body of a request with a file
    encoded: bytes  # with base64 in JSON
    label: str
    probability: float


@dataclass
class Result:
    """What clients of one contestant saw."""

    contestant: str
    loop: str
    clients: int  # or for an open loop, 0
    rate: float  # of the open loop: requests per second that arrived
    seconds: float = 0.0
    answers: int = 0
    wrong: int = 0
    refused: int = 0  # 503
    failed: int = 0  # no answer, or another status
    memory: float = 0.0  # MiB, afterwards
    cpu: float = 0.0  # CPU seconds of the contestant
    latencies: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        return self.answers / self.seconds

    def quantile(self, share: float) -> float:
        """A quantile of the latency, in milliseconds."""
        return 1000 * float(np.quantile(self.latencies, share)) if self.latencies else float("nan")

    def row(self) -> str:
        what = f"{self.clients} clients" if self.clients else f"{self.rate:.1f}/s arrive"
        times = " | ".join(f"{self.quantile(share):.0f}" for share in (0.5, 0.95, 0.99))
        return (
            f"| {self.contestant} | {what} | {self.throughput:.1f} | {times} | {self.wrong} | "
            f"{self.refused} | {self.failed} | {1000 * self.cpu / max(self.answers, 1):.0f} | {self.memory:.0f} |"
        )

    def to_json(self) -> dict[str, object]:
        facts = {name: value for name, value in asdict(self).items() if name != "latencies"}
        quantiles = {f"p{100 * share:g}": self.quantile(share) for share in (0.5, 0.95, 0.99)}
        return facts | {"throughput": self.throughput} | quantiles


class Client:
    """A connection that is kept open; as little work as possible, since the clients share the cores."""

    def __init__(self, port: int, kind: str):
        self._port, self._kind = port, kind
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self._reader is not None and self._reader.at_eof():
            self.close()  # the service has closed the idle connection, as it may
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(f"{head}Content-Type: {self._kind}\r\n\r\n".encode() + body)
        try:
            answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = next(int(line[15:]) for line in answer.split("\r\n") if line.startswith("content-length:"))
            return int(answer[9:12]), await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.close()
            raise ConnectionError from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def one_request(client: Client, sample: Sample, kind: str, begun: float, result: Result) -> None:
    """Sends a request and notes what came back."""
    try:
        status, body = await client.ask("POST", "/predict", sample.form if kind == FORM else sample.encoded)
    except ConnectionError:
        result.failed += 1
        return
    if status != 200:
        result.refused += status == 503
        result.failed += status != 503
        return
    (found,) = json.loads(body)["predictions"]
    right = found["labels"][0] == sample.label and abs(found["probabilities"][0] - sample.probability) < TOLERANCE
    result.wrong += not right
    result.answers += 1
    result.latencies.append(time.perf_counter() - begun)


async def closed_loop(port: int, kind: str, samples: list[Sample], seconds: float, result: Result) -> None:
    """Each client sends its next request when it has an answer."""
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection = Client(port, kind)
        draw = random.Random(number)
        while (begun := time.perf_counter()) < end:
            await one_request(connection, draw.choice(samples), kind, begun, result)
        connection.close()

    begun = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(result.clients)))
    result.seconds = time.perf_counter() - begun


async def open_loop(port: int, kind: str, samples: list[Sample], seconds: float, result: Result) -> None:
    """Requests arrive at random, whether or not earlier ones are answered."""
    draw, idle, tasks = random.Random(0), [], []

    async def request(due: float) -> None:
        connection = idle.pop() if idle else Client(port, kind)
        await one_request(connection, draw.choice(samples), kind, due, result)
        idle.append(connection)

    begun = due = time.perf_counter()
    while (due := due + draw.expovariate(result.rate)) < begun + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(request(due)))
    await asyncio.gather(*tasks)
    result.seconds = time.perf_counter() - begun
    for connection in idle:
        connection.close()
