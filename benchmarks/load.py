"""Peak memory of loading weights, as a fraction of the file size.

    python benchmarks/load.py [--model NAME] [--kinds KIND …] [--json FILE]

Random weights are written in every format, also as a PyTorch checkpoint and sharded, and each is loaded in its own
process, which reports the growth of its peak memory. Pages of a memory-mapped file count.
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
from safetensors.torch import load_file, save_file

from vitrail.data.preprocess import Preprocess
from vitrail.models import build, canonical
from vitrail.verbs.convert import To, convert
from vitrail.weights import WEIGHTS_FILE, Card, load, save
from vitrail.weights.tensors import SUFFIXES

KINDS = ("vitrail", "timm", "hf", "torchvision", "npz", "pth", "sharded", "hf sharded")


def peak() -> int:
    """The peak resident memory of this process in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def measure_growth(path: Path, results: Any) -> None:
    """Loads a file and reports the growth of this process's peak memory."""
    torch.zeros(8, 8) @ torch.zeros(8, 8)  # initialises torch before the measurement
    before = peak()
    model = load(path)
    results.put(peak() - before)
    del model


def measure(path: Path) -> int:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure_growth, args=(path, results))
    process.start()
    grown: int = results.get()
    process.join()
    return grown


_TO: dict[str, To] = {
    "timm": "timm",
    "sharded": "timm",
    "hf": "hf",
    "hf sharded": "hf",
    "npz": "npz",
    "torchvision": "torchvision",
}


def write(kind: str, own: Path, folder: Path) -> Path:
    """Writes the same weights in another format to an empty folder; returns the path to load."""
    folder.mkdir()
    if kind == "vitrail":
        return own
    if kind == "pth":
        torch.save({"model": load_file(own)}, folder / "model.pth")
        return folder / "model.pth"
    to = _TO[kind]
    path = convert(own, folder / "model.npz" if to == "npz" else folder if to == "hf" else folder / WEIGHTS_FILE, to=to)
    return shard(path) if "sharded" in kind else path


def shard(path: Path, count: int = 4) -> Path:
    """Splits weights into shards with an index, as Hugging Face does."""
    state = load_file(path)
    files = {name: f"model-{1 + i * count // len(state):05}-of-{count:05}.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: value for name, value in state.items() if files[name] == file}, path.with_name(file))
    path.unlink()
    path.with_suffix(".json").unlink()
    index = path.with_name(f"{path.name}.index.json")
    index.write_text(json.dumps({"weight_map": files}))
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_b16")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    name, config = canonical(args.model)
    names = tuple(map(str, range(config.classes)))
    card = Card(model=name, config=config, classes=names, preprocess=Preprocess(config.img_size, config.channels))
    rows = {}
    print(f"{name}\n{'format':<14}{'size, MB':>10}{'grown, MB':>12}{'share':>8}")
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder) / "own" / "model.safetensors"
            own.parent.mkdir()
            save(own, build(config), card)
            path = write(kind, own, Path(folder) / "other")
            size = sum(file.stat().st_size for file in path.parent.iterdir() if file.suffix in SUFFIXES)
            grown = measure(path)
        rows[kind] = {"size": size, "grown": grown, "share": grown / size}
        print(f"{kind:<14}{size / 1e6:>10.1f}{grown / 1e6:>12.1f}{grown / size:>8.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
