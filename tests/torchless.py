"""Exported files in a process that cannot import torch, nor what torch brings along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BLOCKED = ("torch", "scipy", "safetensors", "tensorboardX", "jinja2")


def predict_evaluate_and_serve(file: Path, data: Path, image: Path, out: Path) -> None:
    """`vitrail predict`, `evaluate` and the service, of an exported file; the scores are in `out`."""
    code = f"""
import sys
for name in {BLOCKED}:
    sys.modules[name] = None
from vitrail.cli import run
assert run(["predict", {str(file)!r}, {str(image)!r}, "--pictures", {str(out / "pictures")!r}]) == 0
assert run(["evaluate", {str(file)!r}, {str(data)!r}, "--out", {str(out)!r}]) == 0
from pathlib import Path
from served import in_thread
with in_thread({str(file)!r}) as service:
    assert service.predict(Path({str(image)!r}).read_bytes(), layer=True)["layer"]
"""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
