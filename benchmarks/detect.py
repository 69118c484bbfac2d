"""Detection from scratch: the dense head against detection tokens, on the same backbone and for about the same time.

    python benchmarks/detect.py fcos 25 60 --data CELLS --keep RUNS
    python benchmarks/detect.py yolos 25 --data CELLS
    python benchmarks/detect.py draw

The number is that of epochs. CELLS is BCCD (https://github.com/Shenggan/BCCD_Dataset, MIT licence): 364 microscope
pictures of blood with boxes of red and white cells and platelets in Pascal VOC XML, 205 for training, 87 for
validation, 72 for the test. A run uses one thread, and its CPU time is measured, that of validation after every epoch,
the report and all else included: so the time does not depend on the load of the machine, and runs can share it. Half of
it is the time on two cores. The scores are those of the kept epoch on the validation and on the test images.

Results are added to `benchmarks/results/detect.json`; `draw` makes the figure and the table of docs/detect.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # of the child processes: CPU time, not the clock, is measured

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "detect.json"
FIGURE = HERE.parent / "docs" / "images" / "detect-time.png"
SETTINGS = {"model": "vit_nano16", "stem": "conv", "img-size": "240x320"}
HEADS: dict[str, dict[str, str]] = {"fcos": {}, "yolos": {"pool": "cls", "opt": "adamw", "lr": "5e-4"}}

CORES = 2

Record = dict[str, Any]


def vitrail(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "vitrail", *words], check=True)


def train(data: str, head: str, out: Path, settings: dict[str, str]) -> list[dict[str, float]]:
    """Runs `vitrail train`; the rows of its metrics.csv."""
    flags = [word for name, value in (SETTINGS | HEADS[head] | settings).items() for word in (f"--{name}", value)]
    vitrail("train", data, "--head", head, *flags, "--out", str(out), "--name", "run", "--overwrite")
    with (out / "run" / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def _cpu_seconds() -> float:
    """The CPU time of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(head: str, data: str, epochs: float, seed: int, keep: str | None) -> Record:
    """Trains one head for a number of epochs, and measures it on both splits."""
    from vitrail.device import hardware

    with tempfile.TemporaryDirectory() as folder:
        out, before = Path(keep or folder), _cpu_seconds()
        rows = train(data, head, out, {"epochs": f"{epochs:g}", "seed": str(seed)})
        minutes = (_cpu_seconds() - before) / 60 / CORES
        scores = {}
        for split in ("val", "test"):
            vitrail("evaluate", str(out / "run"), "--split", split, "--out", f"{folder}/{split}")
            scores[split] = json.loads(Path(folder, split, "metrics.json").read_text())
    curve = [(row["epoch"] / rows[-1]["epoch"] * minutes, row["val_ap50"], row["val_ap"]) for row in rows]
    record: Record = {"head": head, "epochs": epochs, "seed": seed, "minutes": round(minutes, 2), "curve": curve}
    names = ("ap50", "ap", "ap75", "per_class")
    return record | {"cpu": hardware("cpu")} | {s: {n: scores[s][n] for n in names} for s in scores}


def draw() -> None:
    """Saves the figure and prints the table as Markdown."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    from vitrail.charts.style import BLUE, GREY, ORANGE, STYLE, save

    runs = json.loads(RESULTS.read_text())["runs"]
    print("| head | minutes | epochs | images | AP50 | AP | AP75 | AP50 by class |\n|---|---|---|---|---|---|---|---|")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for run in runs:
            for split in ("val", "test"):
                s = run[split]
                classes = ", ".join(f"{each['name']} {each['ap50']:.1%}" for each in s["per_class"])
                print(
                    f"| `{run['head']}` | {run['minutes']:.1f} | {run['epochs']:g} | {split} | {s['ap50']:.1%} "
                    f"| {s['ap']:.1%} | {s['ap75']:.1%} | {classes} |"
                )
            minutes, ap50, _ = np.array(run["curve"]).T
            color = {"fcos": BLUE}.get(run["head"], ORANGE)
            longest = run["epochs"] == max(other["epochs"] for other in runs if other["head"] == run["head"])
            style = {"color": color, "linestyle": "-" if longest else "--"}
            axes.plot(minutes, 100 * ap50, **style, label=f"{run['head']}, {run['epochs']:g} epochs")
        axes.set_xlabel("minutes of training on two CPU cores")
        axes.set_ylabel("validation AP50 in %", color=GREY)
        axes.set_ylim(0, 100)
        axes.set_title("Blood cells from scratch: AP50 against time")
        axes.legend(loc="center right")
        save(figure, FIGURE)


def write(results: Record) -> None:
    RESULTS.write_text(json.dumps(results) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*HEADS, "draw"])
    parser.add_argument("epochs", nargs="*", type=float)
    parser.add_argument("--data", help="the folder of BCCD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--keep", help="folder to keep the run in")
    args = parser.parse_args()
    if args.what == "draw":
        draw()
    for epochs in args.epochs if args.what in HEADS else []:
        for seed in args.seeds:
            record = measure(args.what, args.data, epochs, seed, args.keep)
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
            known["runs"].append(record)
            write(known)


if __name__ == "__main__":
    main()
