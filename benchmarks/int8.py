"""Throughput of int8 files beside PyTorch's, and the accuracy that they lose.

Trains two models on a data set of photographs, a small ViT chosen by the recipe and a Ti/16 at 224 pixels, exports them
to ONNX and OpenVINO in float32 and int8, and measures all programs in the same run: each in a process of its own, in
turns, in batches of 16. The best of the turns counts, because other programs only ever make a turn slower. All read
pixels of the model's size, which the caller resized; the last program resizes inside, as exported files do by default.

    python benchmarks/int8.py DATA                      # trains for 10 minutes each; results/int8.json
    python benchmarks/int8.py DATA --minutes 1 --turns 2
    python benchmarks/int8.py DATA --runs runs/small runs/ti16
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vitrail
from vitrail.device import hardware
from vitrail.errors import UserError
from vitrail.runs.speed import Speed, measured

RESULTS = Path(__file__).parent / "results" / "int8.json"
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "ti16": {"model": "vit_ti16", "img_size": 224, "stem": "patch"},
}

PROGRAMS: dict[str, dict[str, Any]] = {
    "ONNX fp32": {"format": "onnx", "no_preprocess": True},
    "ONNX int8": {"format": "onnx", "no_preprocess": True, "int8": "auto"},
    "OpenVINO fp32": {"format": "openvino", "no_preprocess": True},
    "OpenVINO int8": {"format": "openvino", "no_preprocess": True, "int8": "auto"},
    "OpenVINO int8, resizing": {"format": "openvino", "int8": "auto"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", help="data set of photographs, such as a folder")
    parser.add_argument("--minutes", type=float, default=10, help="of training, per model")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--runs", nargs="*", help="trained runs to measure instead")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        runs = [Path(run) for run in arguments.runs or ()] or [
            vitrail.train(
                arguments.data, out=folder, name=name, time_budget=f"{60 * arguments.minutes:.0f}s", **settings
            )
            for name, settings in MODELS.items()
        ]
        rows = [row for run in runs for row in measure(run, Path(folder), arguments.turns)]
    document = {"hardware": hardware("cpu"), "data": Path(arguments.data).name, "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


def measure(run: Path, folder: Path, turns: int) -> list[dict[str, Any]]:
    """A row for PyTorch and for every file of a run."""
    files: dict[str, Path] = {"PyTorch fp32": run}
    lost: dict[str, float | None] = {"PyTorch fp32": 0.0}
    for name, order in PROGRAMS.items():
        out = folder / f"{run.name}-{len(files)}{'.onnx' if order['format'] == 'onnx' else '.xml'}"
        try:
            proof = vitrail.export(run, out=out, overwrite=True, **order)
        except UserError as error:
            print(f"{run.name}, {name}: {error}")
        else:
            files[name], lost[name] = out, proof.drop
    best: dict[str, Speed] = {}
    for _ in range(turns):
        for name, source in files.items():
            speed = measured(source)
            if name not in best or speed.images_per_second > best[name].images_per_second:
                best[name] = speed
    first = best["PyTorch fp32"].images_per_second
    return [
        {
            "model": run.name,
            "program": name,
            **asdict(speed),
            "times_pytorch": speed.images_per_second / first,
            "points_lost": lost[name],
        }
        for name, speed in best.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'model':<10}{'program':<25}{'images/s':>10}{'× PyTorch':>11}{'ms, batch 1':>13}{'points lost':>13}"]
    lines += [
        f"{row['model']:<10}{row['program']:<25}{row['images_per_second']:>10,.0f}{row['times_pytorch']:>11.2f}"
        f"{row['latency_ms']:>13.1f}{row['points_lost']:>13.2f}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
