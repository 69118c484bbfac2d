"""Several processes: their speed against threads, the memory that FSDP2 saves, the bytes that they send; checkpoints.

    python benchmarks/distributed.py speed     # 1 process with 2 threads against 2 processes with 1 thread
    python benchmarks/distributed.py memory    # ViT-B/16 on 4 processes: weights, gradients and optimiser
    python benchmarks/distributed.py bytes     # ViT-B/16 on 4 processes: what a step sends, with DDP and FSDP2
    python benchmarks/distributed.py save      # ViT-B/16 with AdamW: how long training waits for a checkpoint

Processes are started by torchrun and talk by gloo on this machine. `speed` trains Ti/16 at 96 pixels in batches of 32;
both contestants alternate, medians of 3 runs. `bytes` reads the counter of a loopback interface of its own, in a
network namespace, which needs root.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROCESSES = 4
STEPS, WARM_UP = 20, 3
TIMES = 3


def start(processes: int, threads: int, part: str, isolated: bool = False) -> dict[str, Any]:
    """Runs a part of this program in some processes; returns what the first one prints last."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*words, __file__, part] if processes > 1 else [sys.executable, __file__, part]
    if isolated:
        words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def learner(model: str, size: int, batch: int, shard: str) -> tuple[Any, ...]:
    """What `vitrail.train.loop.steps` needs, for blank images of 1,000 classes."""
    from vitrail.data.blank import blank
    from vitrail.train.prepare import make_card, open_splits, prepare
    from vitrail.train.progress import Progress
    from vitrail.train.resolve import resolve
    from vitrail.train.setup import set_up
    from vitrail.world import World

    world = World.join()
    data = blank(STEPS * batch, 1000, val=1, size=(size, size))
    settings = {"model": model, "img_size": size, "batch_size": batch, "opt": "adamw", "amp": "off", "device": "cpu"}
    settings |= {"name": "benchmark", "shard": shard, "epochs": 1, "crop_scale": 1.0, "randaug": 0}
    config = resolve("blank", data, settings)
    network, progress = prepare(config, data)[0], Progress()
    parts = set_up(network, make_card(config, data, network), config, data.splits["train"].targets, progress, world)
    return *parts, open_splits(config, data)[1], config, progress, world


def walk(objective: Any, optimizers: Any, scaler: Any, loader: Any, config: Any, progress: Any, world: Any) -> Any:
    from vitrail.train.loop import steps

    return steps(objective, optimizers, scaler, loader, 1000, config, lambda _: 1e-3, progress, world)


def measure_speed() -> dict[str, float]:
    """Images per second of training."""
    taken = walk(*learner("vit_ti16", 96, 32, "off"))
    for _ in range(WARM_UP):
        next(taken)
    begun = time.perf_counter()
    for _ in range(STEPS - WARM_UP):
        next(taken)
    return {"images_per_second": (STEPS - WARM_UP) * 32 / (time.perf_counter() - begun)}


def measure_memory() -> dict[str, dict[str, int]]:
    """The bytes of this process's shards after a step, and those of the whole."""
    parts = learner("vit_b16", 224, PROCESSES, "full")
    objective, optimizers, *_, world = parts
    gradients: dict[str, int] = {}
    hooks = [optimizer.register_step_pre_hook(lambda *_: gradients.update(held())) for optimizer in optimizers]

    def held() -> dict[str, int]:
        grads = [p.grad for p in objective.parameters() if p.grad is not None]
        return {"local": sum(world.local(g).nbytes for g in grads), "whole": sum(g.nbytes for g in grads)}

    next(walk(*parts))
    for hook in hooks:
        hook.remove()
    states = [v for o in optimizers for state in o.state.values() for v in state.values() if v.ndim]
    tensors = {"weights": [*objective.parameters()], "optimiser": states}
    sizes = {
        name: {"local": sum(world.local(t).nbytes for t in each), "whole": sum(t.nbytes for t in each)}
        for name, each in tensors.items()
    }
    return sizes | {"gradients": gradients}


def measure_bytes(shard: str) -> dict[str, float]:
    """The bytes that a process sends in a step, and the bytes of the weights."""
    parts = learner("vit_b16", 224, PROCESSES, shard)
    objective, *_, world = parts
    weights = sum(p.numel() for p in objective.parameters()) * 4
    taken = walk(*parts)
    next(taken)
    sent = []
    for _ in range(3):
        world.once(lambda: None)
        sent.append(_sent())
        next(taken)
    world.once(lambda: None)
    return {"sent": (_sent() - sent[0]) / 3 / PROCESSES, "weights": weights}


def measure_save() -> dict[str, float]:
    """The seconds of a checkpoint, and those of them in which training waits for a copy; its bytes."""
    import tempfile

    from vitrail.train.checkpoint import Checkpoints, checkpoint_path

    parts = learner("vit_b16", 224, 2, "off")
    objective, optimizers, *_ = parts
    next(walk(*parts))
    state = {name: part.state_dict() for name, part in objective.parts().items()}
    state |= {f"optimizer {i}": optimizer.state_dict() for i, optimizer in enumerate(optimizers)}
    copied, saved = [], []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, Checkpoints(Path(folder)) as checkpoints:
        for _ in range(TIMES):
            begun = time.perf_counter()
            checkpoints.save(state)
            copied.append(time.perf_counter() - begun)
            checkpoints.wait()
            saved.append(time.perf_counter() - begun)
        size = checkpoint_path(Path(folder)).stat().st_size
    return {"copied": statistics.median(copied), "saved": statistics.median(saved), "bytes": size}


def _sent() -> int:
    """The bytes that the loopback interface of this network namespace has sent."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    if part == "speed":
        rates: dict[str, list[float]] = {"1 process, 2 threads": [], "2 processes, 1 thread": []}
        for _ in range(TIMES):
            for (name, taken), (processes, threads) in zip(rates.items(), ((1, 2), (2, 1)), strict=True):
                taken.append(start(processes, threads, "measure-speed")["images_per_second"])
                print(f"{name:<22} {taken[-1]:6.1f} images/s", flush=True)
        one, two = map(statistics.median, rates.values())
        print(f"2 processes reach {two / one:.2f} of the speed of 2 threads")
    elif part == "memory":
        for name, size in start(PROCESSES, 1, "measure-memory").items():
            print(
                f"{name:<10} {size['local'] / 2**20:6.1f} of {size['whole'] / 2**20:7.1f} MiB: "
                f"{size['local'] / size['whole']:.3f}"
            )
    elif part == "bytes":
        for name, shard, passes in (("DDP", "off", 2), ("FSDP2", "full", 3)):
            found = start(PROCESSES, 1, f"measure-bytes-{shard}", isolated=True)
            theory = passes * (PROCESSES - 1) / PROCESSES * found["weights"]
            print(
                f"{name:<6} {found['sent'] / 2**20:7.1f} MiB per process and step; in theory "
                f"{theory / 2**20:7.1f}: {found['sent'] / theory:.3f}"
            )
    elif part == "save":
        from vitrail.config import options

        found, every = start(1, 2, "measure-save"), 60 * options()["save_minutes"].default
        print(
            f"{found['bytes'] / 2**20:,.0f} MiB in {found['saved']:.1f} s. Training waits for {found['copied']:.1f} s "
            f"of them: {found['copied'] / every:.1%} instead of {found['saved'] / every:.1%} of the {every / 60:g} "
            "minutes between checkpoints."
        )
    elif part.startswith("measure-"):
        measure = {
            "measure-speed": measure_speed,
            "measure-memory": measure_memory,
            "measure-save": measure_save,
            "measure-bytes-off": lambda: measure_bytes("off"),
            "measure-bytes-full": lambda: measure_bytes("full"),
        }[part]
        found = measure()
        from vitrail.world import world

        if world().first():
            print(json.dumps(found))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
