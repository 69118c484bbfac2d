"""How much memory loading takes beyond that of the program, as a share of the file's size.

    python benchmarks/load.py [--model NAME] [--json FILE]

Random weights are written in every format, and each is loaded in a process of its own, which tells how far its memory
grew at its highest while it did so. Pages of a mapped file count as the process's, as the system counts them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from vitrail.data.preprocess import Preprocess
from vitrail.models import build, canonical
from vitrail.weights import Card, load, save
from vitrail.weights.convert import To, convert


def peak() -> int:
    """The most memory that the process has had since its program began, in bytes. Linux tells it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def grow(path: Path, answers: Any) -> None:
    """Tells by how many bytes loading a file raises the most memory of this process."""
    torch.zeros(8, 8) @ torch.zeros(8, 8)  # what the first use of torch takes is not the file's
    before = peak()
    model = load(path)
    answers.put(peak() - before)
    del model


def measure(path: Path) -> int:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=grow, args=(path, answers))
    process.start()
    grown: int = answers.get()
    process.join()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_b16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    name, config = canonical(args.model)
    names = tuple(map(str, range(config.classes)))
    card = Card(model=name, config=config, classes=names, preprocess=Preprocess(config.img_size, config.channels))
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.safetensors"
        save(own, build(config), card)
        print(f"{name}\n{'format':<14}{'file, MB':>10}{'grown, MB':>12}{'share':>8}")
        formats: tuple[To, ...] = ("vitrail", "timm", "hf", "torchvision", "npz")
        for to in formats:
            out = Path(folder) / ("there.npz" if to == "npz" else f"there-{to}.safetensors")
            path = own if to == "vitrail" else convert(own, out, to=to)
            size, grown = path.stat().st_size, measure(path)
            rows[to] = {"file": size, "grown": grown, "share": grown / size}
            print(f"{to:<14}{size / 1e6:>10.1f}{grown / 1e6:>12.1f}{grown / size:>8.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
