"""The service under load, beside a plain FastAPI service and LitServe.

    python benchmarks/serve.py                       # about 25 minutes, on an otherwise idle machine
    python benchmarks/serve.py --seconds 3 --soak 500 --clients 1 8    # a short look
    python benchmarks/serve.py --table               # the tables of docs/serve.md, from the results

ViT-Ti/16 with 10 classes, JPEG photographs, on every core. Each contestant runs in processes of its own, and the
clients in this one:

| contestant | what it is |
|---|---|
| `vitrail` | `vitrail serve`, with its defaults |
| `one by one` | the same without batching: `--max-batch 1` |
| `plain` | `services/plain.py`: FastAPI and PyTorch, what people write today |
| `LitServe` | `services/lit.py`: LitServe with batches of up to 16 |

Closed loop: each of so many clients sends its next request when it has its answer. Open loop: requests arrive at random
at 50 and 90 % of the contestant's own capacity, the best of its closed loops, whether or not earlier ones are answered;
their latency counts from when they were due. Every answer is compared with PyTorch's. At the end `vitrail` answers
`--soak` more requests while its memory is measured. Results go to `benchmarks/results/serve.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from http_load import FORM, JSON, Client, Result, Sample, closed_loop, open_loop
from PIL import Image

from vitrail.device import hardware
from vitrail.files import write_text

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "serve.json"
MODEL, CLASSES, PICTURES = "vit_ti16", 10, 64
HEADER = (
    "| contestant | load | requests/s | p50 ms | p95 ms | p99 ms | wrong | refused | failed | CPU ms | MiB |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


# The model and its right answers ---------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """Random weights of Ti/16: speed does not depend on them. A head scaled up gives answers that differ."""
    from dataclasses import replace

    import torch

    from vitrail.data.preprocess import Preprocess
    from vitrail.models import build, canonical
    from vitrail.tasks import Multiclass
    from vitrail.weights import Card, save

    torch.manual_seed(0)
    name, config = canonical(MODEL)
    config = replace(config, classes=CLASSES, img_size=(224, 224))
    model = build(config)
    with torch.no_grad():
        model.head.weight.normal_(std=2)
    task = Multiclass(tuple(f"class {i}" for i in range(CLASSES)))
    path = folder / "model.safetensors"
    save(path, model, Card(model=name, config=config, task=task, preprocess=Preprocess((224, 224), 3)))
    return path


def make_samples(model: Path) -> list[Sample]:
    """Crops of scikit-learn's photographs as JPEG files, with PyTorch's answers."""
    from sklearn.datasets import load_sample_images

    import vitrail

    rng, photographs = np.random.default_rng(0), load_sample_images().images
    files = []
    for number in range(PICTURES):
        photograph = photographs[number % 2]
        side = int(rng.integers(200, 420))
        y, x = (int(rng.integers(0, length - side + 1)) for length in photograph.shape[:2])
        file = io.BytesIO()
        crop = Image.fromarray(photograph[y : y + side, x : x + side]).transpose(number % 7)
        crop.resize((300, 260)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    answers = vitrail.Predictor(model, engine="torch")(files)
    return [
        _sample(file, *answer.labels[:1], answer.probabilities[0]) for file, answer in zip(files, answers, strict=True)
    ]


def _sample(file: bytes, label: str, probability: float) -> Sample:
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="p.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    encoded = json.dumps({"images": [base64.b64encode(file).decode()]}).encode()
    return Sample(head + file + b"\r\n--b--\r\n", encoded, label, probability)


# Contestants -----------------------------------------------------------------------------------------------


def commands(model: Path) -> dict[str, tuple[list[str], str]]:
    """How each contestant is started, without its port, and what it is sent."""
    serve = ["-m", "vitrail", "serve", str(model)]
    return {
        "vitrail": ([*serve, "--port"], FORM),
        "one by one": ([*serve, "--max-batch", "1", "--port"], FORM),
        "plain": ([str(HERE / "services" / "plain.py"), str(model)], FORM),
        "LitServe": ([str(HERE / "services" / "lit.py"), str(model)], JSON),
    }


@contextmanager
def running(words: list[str]) -> Iterator[tuple[int, int]]:
    """A contestant that is ready: its process and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, *words, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        asyncio.run(_until_ready(port, process))
        yield process.pid, port
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # LitServe leaves its workers behind
        process.wait()


async def _until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(240):
        if process.poll() is not None:
            raise SystemExit(f"A contestant ended with {process.returncode}: {process.args}")
        try:
            if (await Client(port, FORM).ask("GET", "/ready", b""))[0] == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.5)
    raise SystemExit(f"A contestant is not ready after two minutes: {process.args}")


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            children.setdefault(int(_stat(folder.name)[1]), []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def resident(pid: int) -> float:
    """The resident memory of a process and its descendants, in MiB."""
    return sum(int(_stat(each)[21]) for each in tree(pid)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process and its descendants."""
    return sum(int(_stat(each)[11]) + int(_stat(each)[12]) for each in tree(pid)) / os.sysconf("SC_CLK_TCK")


def _stat(pid: object) -> list[str]:
    """The fields of /proc/PID/stat after the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# Loads ----------------------------------------------------------------------------------------------------


def contest(name: str, words: list[str], kind: str, samples: list[Sample], chosen: argparse.Namespace) -> list[Result]:
    """All loads of one contestant."""
    found = []
    with running(words) as (pid, port):
        warm = Result(name, "warm-up", 8, 0.0)
        asyncio.run(closed_loop(port, kind, samples, min(5.0, chosen.seconds), warm))
        for clients in chosen.clients:
            result = Result(name, "closed", clients, 0.0, cpu=-cpu_seconds(pid))
            asyncio.run(closed_loop(port, kind, samples, chosen.seconds, result))
            found.append(_noted(result, pid))
        capacity = max(result.throughput for result in found)
        for share in (0.5, 0.9):
            result = Result(name, f"open, {share:.0%}", 0, share * capacity, cpu=-cpu_seconds(pid))
            asyncio.run(open_loop(port, kind, samples, chosen.seconds, result))
            found.append(_noted(result, pid))
    return found


def soak(words: list[str], kind: str, samples: list[Sample], requests: int) -> list[tuple[int, float]]:
    """The memory of a contestant while it answers many requests: pairs of requests and MiB."""
    with running(words) as (pid, port):
        total = Result("vitrail", "soak", 32, 0.0)
        measured = []
        while total.answers < requests:
            asyncio.run(closed_loop(port, kind, samples, 2.0, total))
            measured.append((total.answers, resident(pid)))
    assert not total.wrong + total.failed, total
    return measured


def _noted(result: Result, pid: int) -> Result:
    result.memory = resident(pid)
    result.cpu += cpu_seconds(pid)
    print(result.row(), flush=True)
    return result


def tables(results: list[dict[str, Any]]) -> str:
    """Closed and open loops as Markdown: requests per second and latencies of each contestant."""
    names = [*dict.fromkeys(result["contestant"] for result in results)]
    closed = {(result["contestant"], result["clients"]): result for result in results if result["loop"] == "closed"}
    clients = sorted({number for _, number in closed})
    lines = [
        "| requests/s (p99 in ms) | " + " | ".join(f"{number} client{'s'[: number > 1]}" for number in clients) + " |"
    ]
    lines.append("|---" * (1 + len(clients)) + "|")
    for name in names:
        cells = [f"{closed[name, n]['throughput']:.1f} ({closed[name, n]['p99']:.0f})" for n in clients]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| open loop | requests/s | p50 ms | p95 ms | p99 ms | failed |", "|---|---|---|---|---|---|"]
    for result in results:
        if result["loop"] != "closed":
            times = " | ".join(f"{result[quantile]:.0f}" for quantile in ("p50", "p95", "p99"))
            share = result["loop"].removeprefix("open, ")
            lines.append(f"| {result['contestant']}, {share} | {result['rate']:.1f} | {times} | {result['failed']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument(
        "--soak", type=int, default=20_000, help="requests at the end, for the memory; 0 keeps the last"
    )
    parser.add_argument("--only", nargs="+", help="some contestants")
    parser.add_argument("--table", action="store_true", help="print the tables of the last results")
    chosen = parser.parse_args()
    if chosen.table:
        print(tables(json.loads(RESULTS.read_text())["results"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        samples = make_samples(model)
        known = commands(model)
        print(HEADER, flush=True)
        results = []
        for name in chosen.only or known:
            results += contest(name, *known[name], samples, chosen)
        memory = (
            soak(*known["vitrail"], samples, chosen.soak) if chosen.soak else json.loads(RESULTS.read_text())["memory"]
        )
    for answered, mebibytes in memory[:: max(1, len(memory) // 10)]:
        print(f"after {answered:,} requests: {mebibytes:.0f} MiB")
    document = {
        "hardware": hardware("cpu"),
        "results": [result.to_json() for result in results],
        "memory": memory,
        "seconds": chosen.seconds,
    }
    write_text(RESULTS, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
