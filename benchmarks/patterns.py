"""Time and memory of an attention layer with each pattern, from 14² to 64² patches.

    python benchmarks/patterns.py              # at most 5 minutes, on an otherwise idle machine
    python benchmarks/patterns.py draw         # the figure and table of attention patterns in docs/speed.md

An attention layer of ViT-S (width 384, 6 heads) with a class token, batch size 1, fp32: the median time of a forward
and backward pass and of a forward pass alone, and the most bytes that are allocated at once in the former. Results are
written to `benchmarks/results/patterns.json`.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the vitrail command, before torch is imported

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contestants import turn
from speed_page import DOCS, fill, table

from vitrail.files import write_text

RESULTS = Path(__file__).parent / "results" / "patterns.json"
FIGURE = DOCS / "images" / "patterns.png"

WIDTH, HEADS = 384, 6
GRIDS = (14, 21, 28, 42, 56, 64)  # patches per side: 196 to 4,096 patches
SECONDS = 1.5  # of measuring, in each cell
PATTERNS = ("global", "window:7", "window:7,shift", "axial", "neighbourhood:7", "strided")


def measure(pattern: str, grid: int, seconds: float) -> dict[str, Any]:
    """Time and memory of a layer."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from vitrail.models.layers import Attention
    from vitrail.models.patterns import choice

    torch.manual_seed(0)
    layer = Attention(WIDTH, HEADS, pattern=choice(pattern, 2).layers(2, (grid, grid), 1)[1])
    x = torch.randn(1, 1 + grid * grid, WIDTH, requires_grad=True)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer(x).sum().backward()

    forward()
    both()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        both()
    assert found.profiler is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    times = {"both": turn(both, seconds), "forward": turn(forward, seconds / 2)}
    return {"pattern": pattern, "grid": grid, "memory": highest / 2**20, **times}


def run(seconds: float) -> None:
    from vitrail.device import hardware, keep_freed_memory

    keep_freed_memory()
    found = []
    for grid in GRIDS:
        for pattern in PATTERNS:
            found.append(measure(pattern, grid, seconds))
            ms, memory = 1000 * found[-1]["both"], found[-1]["memory"]
            print(f"{grid}² patches, {pattern}: {ms:.1f} ms, {memory:.1f} MiB", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    write_text(RESULTS, json.dumps({"cpu": hardware("cpu"), "seconds": seconds, "cells": found}, indent=1) + "\n")


def draw() -> None:
    """Saves the figure and rewrites its part of the page."""
    document = json.loads(RESULTS.read_text())
    by = {(cell["pattern"], cell["grid"]): cell for cell in document["cells"]}
    _figure(by, document["cpu"])

    def lines() -> Iterator[list[str]]:
        for pattern in PATTERNS:
            cells = [by[pattern, grid] for grid in (GRIDS[0], GRIDS[2], GRIDS[-1])]
            times = [f"{1000 * cell['both']:,.0f} ({1000 * cell['forward']:,.0f})" for cell in cells]
            yield [f"`{pattern}`", *times, f"{cells[-1]['memory']:,.0f}"]

    head = ["pattern", *(f"{grid}², ms" for grid in (GRIDS[0], GRIDS[2], GRIDS[-1])), f"{GRIDS[-1]}², MiB"]
    about = f"Measured on {document['cpu']}: forward and backward pass, in brackets the forward pass alone."
    if document["seconds"] < SECONDS:
        about += " This was a quick run on a busy machine: read the ratios only."
    picture = "![Time and memory of an attention layer with each pattern](images/patterns.png)"
    fill({"patterns": "\n".join([picture, "", about, "", table(head, lines())])})
    print(f"{FIGURE} written")


def _figure(by: dict[tuple[str, int], dict[str, Any]], cpu: str) -> None:
    """Time and memory against the number of patches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from vitrail.charts.style import STYLE, heading, save

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        patches = [grid**2 for grid in GRIDS]
        for number, pattern in enumerate(PATTERNS):
            cells = [by[pattern, grid] for grid in GRIDS]
            style: dict[str, Any] = {"color": f"C{number}", "marker": "o", "markersize": 4, "label": pattern}
            left.plot(patches, [1000 * cell["both"] for cell in cells], **style)
            right.plot(patches, [cell["memory"] for cell in cells], **style)
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.set_xlabel("patches of the image")
        left.legend(fontsize=8)
        left.set_ylabel("ms, forward and backward")
        right.set_ylabel("MiB")
        heading(left, "Time of an attention layer", f"width {WIDTH}, {HEADS} heads, batch size 1; {cpu}")
        heading(right, "Most memory allocated at once", "forward and backward pass, without weights")
        save(figure, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure", "draw"], default="measure")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of measuring, in each cell (default: {SECONDS})"
    )
    options = parser.parse_args()
    if options.what == "measure":
        run(options.seconds)
    draw()


if __name__ == "__main__":
    main()
