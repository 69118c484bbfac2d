"""Time and memory of a training step and of inference, against MACs, tokens and batch size.

    python benchmarks/cost.py              # at most 5 minutes, on an otherwise idle machine
    python benchmarks/cost.py draw         # the last figure and table of docs/speed.md

ViT-Ti with patch size 16 and 10 classes: growing images at batch size 1, and growing batches of 49-patch images. Each
cell runs in its own process: the median time of its steps, and the peak resident memory beyond imports, weights and, in
training, gradients and AdamW's two moments. Results are written to `benchmarks/results/cost.json`.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the vitrail command, before torch is imported

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from contestants import (
    VITRAIL,
    Shape,
    Step,
    Variant,
    build,
    default_precision,
    import_library,
    peak,
    pixels_of,
    predictor_of,
    training_steps,
    turn,
)
from speed_page import DOCS, fill, table

from vitrail.files import write_text

RESULTS = Path(__file__).parent / "results" / "cost.json"
FIGURE = DOCS / "images" / "cost.png"

GRIDS = (7, 10, 14, 20, 28, 40, 64)  # patches per side: 49 to 4,096 patches
BATCHES = (1, 4, 16, 64, 256)
SECONDS = 1.0  # of steps in each cell, at least one

What = Literal["training", "inference"]


@dataclass(frozen=True)
class Cell:
    what: What
    grid: int  # patches per side
    batch: int

    @property
    def shape(self) -> Shape:
        return Shape(192, 12, 3, 768, 16, (16 * self.grid, 16 * self.grid), 10)


CELLS = [
    Cell(what, grid, batch)
    for what in ("training", "inference")
    for grid, batch in [*((grid, 1) for grid in GRIDS), *((GRIDS[0], batch) for batch in BATCHES[1:])]
]


def measure(cell: Cell) -> dict[str, Any]:
    """Time and memory of a cell; to be called in a new process."""
    import_library(VITRAIL)
    from vitrail.device import keep_freed_memory
    from vitrail.models import macs

    if cell.what == "training":
        keep_freed_memory()
    step_of(cell.what, build(VITRAIL, Shape(16, 1, 1, 16, 16, (16, 16), 10)), 1)()  # loads every kernel and module
    before = peak()
    model: Any = build(VITRAIL, cell.shape)
    step = step_of(cell.what, model, cell.batch)
    step()
    seconds = turn(step, SECONDS)
    held = sum(p.numel() for p in model.parameters()) * (16 if cell.what == "training" else 4) / 2**20
    work = macs(model.config) * cell.batch * (3 if cell.what == "training" else 1)
    return asdict(cell) | {"macs": work, "seconds": seconds, "memory": peak() - before - held}


def step_of(what: What, model: Any, batch: int) -> Step:
    """A training step of a model in vitrail's default precision, or inference by its Predictor."""
    config = model.config
    shape = Shape(**{field.name: getattr(config, field.name) for field in fields(Shape)})
    if what == "training":
        return training_steps(VITRAIL, model.train(), shape, batch)(Variant(VITRAIL, default_precision()))
    predictor = predictor_of(model.eval().requires_grad_(False), shape)
    return partial(predictor.outputs, pixels_of(shape, batch))


def run() -> None:
    from vitrail.device import hardware

    found = []
    for number, cell in enumerate(CELLS, start=1):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measure, (cell,)))
        about = f"{cell.what}, {cell.grid**2} patches, batch {cell.batch}"
        print(f"{number}/{len(CELLS)} {about}: {found[-1]['seconds']:.3f} s, {found[-1]['memory']:.0f} MiB", flush=True)
    document = {"cpu": hardware("cpu"), "precision": default_precision(), "cells": found}
    RESULTS.parent.mkdir(exist_ok=True)
    write_text(RESULTS, json.dumps(document, indent=1) + "\n")


def draw() -> None:
    """Saves the figure and rewrites its part of the page."""
    document = json.loads(RESULTS.read_text())
    cells = document["cells"]
    _figure(cells, document["cpu"])
    by = {(cell["what"], cell["grid"]): cell for cell in cells if cell["batch"] == 1}

    def lines() -> Iterator[list[str]]:
        for grid in GRIDS:
            pair = [by["training", grid], by["inference", grid]]
            times = [f"{1000 * cell['seconds']:,.0f}" for cell in pair]
            memories = [f"{max(cell['memory'], 0):,.0f}" for cell in pair]
            yield [f"{grid**2:,}", f"{pair[1]['macs'] / 1e9:.2f}", *times, *memories]

    head = ["patches", "GMACs", "training step, ms", "inference, ms", "training, MiB", "inference, MiB"]
    about = f"Measured on {document['cpu']}, training in {document['precision']}:"
    picture = "![Time against MACs, and memory against tokens](images/cost.png)"
    fill({"cost": "\n".join([picture, "", about, "", table(head, lines())])})
    print(f"{FIGURE} written")


def _figure(cells: list[dict[str, Any]], cpu: str) -> None:
    """Time against MACs, and memory against tokens, with guides of slope 1 and 2."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from vitrail.charts.style import BLUE, GREY, ORANGE, STYLE, heading, save

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for what, color in (("training", BLUE), ("inference", ORANGE)):
            series = [cell for cell in cells if cell["what"] == what]
            tokens = sorted((c for c in series if c["batch"] == 1), key=lambda c: c["grid"])
            batches = sorted((c for c in series if c["grid"] == GRIDS[0]), key=lambda c: c["batch"])
            for chosen, style, name in ((tokens, "o-", "larger images"), (batches, "s--", "larger batches")):
                work, times = [c["macs"] / 1e9 for c in chosen], [c["seconds"] for c in chosen]
                left.plot(work, times, style, color=color, markersize=4, label=f"{what}, {name}")
            lengths, memory = [c["grid"] ** 2 for c in tokens], [max(c["memory"], 0.1) for c in tokens]
            right.plot(lengths, memory, "o-", color=color, markersize=4, label=what)
        largest = max((c for c in cells if c["what"] == "training"), key=lambda c: c["macs"])
        work = [min(c["macs"] for c in cells) / 1e9, largest["macs"] / 1e9]
        left.plot(work, [largest["seconds"] * x / work[1] for x in work], ":", color=GREY, label="time ∝ MACs")
        lengths = [GRIDS[0] ** 2, GRIDS[-1] ** 2]
        top = max(c["memory"] for c in cells if c["batch"] == 1)
        for power, style, name in ((1, ":", "memory ∝ tokens"), (2, "-.", "memory ∝ tokens²")):
            guide = [top * (n / lengths[1]) ** power for n in lengths]
            right.plot(lengths, guide, style, color=GREY, linewidth=1, label=name)
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.legend(fontsize=8)
        left.set_xlabel("GMACs of the step (a training step is three forward passes)")
        left.set_ylabel("seconds")
        right.set_xlabel("patches of the image")
        right.set_ylabel("MiB")
        right.set_ylim(bottom=1)
        heading(left, "Time against MACs", f"ViT-Ti/16; {cpu}")
        heading(right, "Memory against tokens", "batch size 1; activations only, see the text")
        save(figure, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure", "draw"], default="measure")
    if parser.parse_args().what == "measure":
        run()
    draw()


if __name__ == "__main__":
    main()
