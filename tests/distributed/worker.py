"""Training runs in this process, which torchrun may have started with others; records the loss of every step.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/worker.py CASES OUT

CASES is a JSON file of runs by name: the verb, the data and the settings. They are made in OUT, with `losses.json`.
With `--shard hybrid`, two processes are a machine. `--compile` captures graphs, but generates no code for them.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

Case = tuple[str, str, dict[str, Any]]


def train_all(cases: dict[str, Case], out: Path) -> dict[str, list[float]]:
    """Trains every case in a folder; returns the losses of their steps."""
    from torch import nn

    import vitrail
    from vitrail.train.progress import Progress
    from vitrail.world import world

    losses: dict[str, list[float]] = {}
    add = Progress.add

    def record(progress: Progress, values: dict[str, float]) -> None:
        losses[name].append(values["loss"])
        add(progress, values)

    with (
        patch.object(Progress, "add", record),
        patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")),
        patch("vitrail.train.journal.save_charts"),
        patch("vitrail.evaluate.measure.save_charts"),
        patch("vitrail.verbs.train.reported", lambda run: run),
    ):
        for name, (verb, data, settings) in cases.items():
            losses[name] = []
            if settings.get("shard") == "hybrid":
                os.environ["LOCAL_WORLD_SIZE"] = "2"
            getattr(vitrail, verb)(data, out=str(out), name=name, **settings)
            if world().first():
                (out / "losses.json").write_text(json.dumps(losses))
    return losses


if __name__ == "__main__":
    train_all(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
