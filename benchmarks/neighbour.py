"""Training next to busy programs: what waiting threads cost, by OpenMP's settings and the number of threads.

    python benchmarks/neighbour.py --neighbours 0      # some three minutes, on a quiet machine
    python benchmarks/neighbour.py                     # with eight busy neighbours

Each setting is a process of its own, because OpenMP reads its settings once. The processes take turns of a second in
random order while the others sleep, so that all see the same state of the machine, which need not be quiet. A speed is
compared with that of the first setting in the same round; the table shows the median of the ratios and the middle half
of them. Beside it are the steps per second of CPU time, which spinning threads waste.

With neighbours it also shows how many times slower a setting is than without them, and how many times slower it would
be with its fair share: T threads beside N neighbours on C cores get T C / (T + N) cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "neighbour.json"
TURN = 1.0  # seconds
SETTINGS: dict[str, dict[str, str]] = {
    "as vitrail (spins briefly)": {"GOMP_SPINCOUNT": "10000"},
    "libgomp's default (spins)": {},
    "spins less": {"GOMP_SPINCOUNT": "1000"},
    "as vitrail if busy (passive)": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def contestant(settings: dict[str, str], pipe: Connection) -> None:
    """Trains for as many seconds as it is told, again and again; answers with steps, seconds and CPU seconds."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.pop(name, None)
    os.environ.update(settings)
    import torch

    from vitrail.models import create

    torch.manual_seed(0)
    model = create("vit_nano4", img_size=8, channels=1, classes=10)
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    while (seconds := pipe.recv()) is not None:
        steps, begun, used = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - begun < seconds:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        pipe.send((steps, time.perf_counter() - begun, time.process_time() - used))


def neighbour() -> None:
    while True:
        pass


def measure(neighbours: int, seconds: float) -> dict[str, Any]:
    """The turns of every setting: steps, seconds and CPU seconds."""
    context = multiprocessing.get_context("spawn")
    pipes, started = {}, []
    for name, settings in SETTINGS.items():
        pipes[name], theirs = context.Pipe()
        started.append(context.Process(target=contestant, args=(settings, theirs), daemon=True))
    started += [context.Process(target=neighbour, daemon=True) for _ in range(neighbours)]
    for process in started:
        process.start()
    turns: dict[str, list[tuple[int, float, float]]] = {name: [] for name in SETTINGS}
    for number in range(10**9):
        if number == 1:  # the first round warms up
            turns, end = {name: [] for name in SETTINGS}, time.monotonic() + seconds
        if number > 1 and time.monotonic() > end:
            break
        for name in random.sample(list(SETTINGS), len(SETTINGS)):
            pipes[name].send(TURN)
            turns[name].append(pipes[name].recv())
    for process in started:
        process.kill()
    return {"neighbours": neighbours, "load": os.getloadavg()[0], "cores": os.cpu_count(), "turns": turns}


def fair(name: str, neighbours: int, cores: int) -> float:
    """How many times slower a setting would be with its fair share of the cores."""
    threads = int(SETTINGS[name].get("OMP_NUM_THREADS", cores))
    return max(1.0, min(threads, cores) * (threads + neighbours) / (cores * threads))


def show(result: dict[str, Any], quiet: dict[str, Any] | None) -> None:
    turns = result["turns"]
    first = next(iter(turns))
    print(f"{result['neighbours']} neighbours of its own, load {result['load']:.1f} on {result['cores']} cores")
    for name, rounds in turns.items():
        speeds = [steps / seconds for steps, seconds, _ in rounds]
        ratios = [a / (b[0] / b[1]) for a, b in zip(speeds, turns[first], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        efficiency = sum(turn[0] for turn in rounds) / sum(turn[2] for turn in rounds)
        print(
            f"{name:<28} {statistics.median(speeds):7.1f} steps/s   ×{middle:.2f} ({low:.2f} to {high:.2f})   "
            f"{efficiency:7.1f} steps per CPU second   {len(rounds)} rounds"
        )
    if result["neighbours"] and quiet is not None:
        for name, rounds in turns.items():
            alone, beside = (
                statistics.median(turn[0] / turn[1] for turn in each) for each in (quiet["turns"][name], rounds)
            )
            share = fair(name, result["neighbours"], result["cores"])
            print(f"{name:<28} {alone / beside:5.1f} times slower than alone; with a fair share {share:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--neighbours", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=180)
    given = parser.parse_args()
    result = measure(given.neighbours, given.seconds)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(results | {str(given.neighbours): result}) + "\n")
    show(result, results.get("0"))


if __name__ == "__main__":
    main()
