"""Fine-tuning a small model: all layers at the full learning rate against a tenth of it, and against from scratch.

    python benchmarks/tuning_rates.py --seeds 0 1 2       # about 6 minutes of one core for a seed
    python benchmarks/tuning_rates.py draw                # the table of docs/transfer.md

A `vit_nano8` is trained on 30,000 Fashion-MNIST images of five classes for 2 epochs, and then on 100 images of each
of the other five: with the recipe `finetune`, with the same as it was before (all but the head at a tenth of the
learning rate, with layer-wise decay, and a head that starts at zero), and from scratch with the recipe `small`.
Accuracies are of the 5,000 test images of these five classes. The recipe was chosen with seed 0.
Results are added to `benchmarks/results/tuning_rates.json`; those already there are not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import vitrail
from vitrail.data import ArraySplit, open_data
from vitrail.data.holdout import stratify
from vitrail.files import write_text

RESULTS = Path(__file__).parent / "results" / "tuning_rates.json"
KNOWN, NEW = (0, 2, 4, 6, 8), (1, 3, 5, 7, 9)  # classes
FEW, EPOCHS = 500, 2  # images to fine-tune on; epochs of pre-training
WAYS: dict[str, dict[str, Any] | None] = {
    "fine-tuned": {},
    "fine-tuned as before": {"body_lr": 0.1, "layer_decay": 0.85, "head_init": "zero"},
    "from scratch": None,
}


def part(file: Path, classes: tuple[int, ...], images: int | None, seed: int) -> Path:
    """Some classes of Fashion-MNIST as an `.npz` file, with all or some of the training images."""
    data = open_data("fashion-mnist")
    train, test = data.splits["train"], data.splits["val"]
    assert isinstance(train, ArraySplit)
    assert isinstance(test, ArraySplit)
    own, tested = (np.flatnonzero(np.isin(split.targets, classes)) for split in (train, test))
    if images is not None:
        own = own[stratify(train.targets[own], images / len(own), seed)[1]]
    names = np.array(data.classes)
    rows = {"train": (train, own), "val": (test, tested[::25]), "test": (test, tested)}
    arrays = {f"x_{name}": split.pixels[at] for name, (split, at) in rows.items()}
    np.savez(file, **arrays, **{f"y_{name}": names[split.targets[at]] for name, (split, at) in rows.items()})
    return file


def measure(seed: int, missing: list[str]) -> None:
    """Measures some ways with one seed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = vitrail.train(
            part(folder / "known.npz", KNOWN, None, seed), epochs=EPOCHS, seed=seed, out=folder, name="weights"
        )
        data = part(folder / "new.npz", NEW, FEW, seed)
        for way in missing:
            settings = WAYS[way]
            given = {} if settings is None else {"weights": weights.path, **settings}
            run = vitrail.train(data, seed=seed, out=folder, name="run", overwrite=True, **given)
            record = {"way": way, "seed": seed, "top1": vitrail.evaluate(run, split="test").top1}
            print(record, flush=True)
            lines = ",\n".join(json.dumps(each) for each in [*known(), record])
            write_text(RESULTS, f"[\n{lines}\n]\n")


def known() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def table() -> None:
    print("| | accuracy |\n|---|---|")
    for way in WAYS:
        values = [100 * record["top1"] for record in known() if record["way"] == way]
        print(f"| {way} | {statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} % ({len(values)}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["draw"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    if args.what == "draw":
        table()
        return
    for seed in args.seeds:
        done = {record["way"] for record in known() if record["seed"] == seed}
        if missing := [way for way in WAYS if way not in done]:
            measure(seed, missing)


if __name__ == "__main__":
    main()
