"""The time that `vitrail plan` predicts against that of real runs, for four families at three sizes.

    python benchmarks/plan.py        # about five minutes, on an otherwise idle machine

Each run trains on 2,000 made images for one epoch. Results are written to `benchmarks/results/plan.json`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import vitrail
from vitrail.files import write_text
from vitrail.plan.settings import plan_run
from vitrail.runs.run import Run

RESULTS = Path(__file__).parent / "results" / "plan.json"
MODELS = ("vit_nano4", "swin_nano", "bit_nano", "mixer_nano")
SIDES = (16, 32, 48)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            data = Path(folder) / f"made{side}.npz"
            rng = np.random.default_rng(0)
            arrays = {}
            for split, count in (("train", 2000), ("val", 200)):
                arrays[f"x_{split}"] = rng.integers(0, 255, (count, side, side, 3), np.uint8)
                arrays[f"y_{split}"] = np.arange(count) % 10
            np.savez(data, **arrays)
            for model in MODELS:
                settings = {"model": model, "epochs": 1, "out": folder, "name": f"{model}-{side}", "cache_gb": 0.0}
                planned = plan_run(str(data), None, settings).seconds
                run = vitrail.train(data, **settings)
                real = Run(run).history[-1]["seconds"]
                rows.append({"model": model, "side": side, "planned": round(planned, 2), "real": round(real, 2)})
                print(
                    f"{model:<12}{side:>4} px   planned {planned:6.1f} s   real {real:6.1f} s   {planned / real:5.2f}"
                )
    worst = max(abs(row["planned"] / row["real"] - 1) for row in rows)
    print(f"largest error {worst:.0%}")
    RESULTS.parent.mkdir(exist_ok=True)
    write_text(RESULTS, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
