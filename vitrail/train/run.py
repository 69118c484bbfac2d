"""A run in progress: how it is resumed and described, how far it has come, and how it is stopped."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from vitrail.config import TrainConfig, coerce, flat, override
from vitrail.data import Data, full_name
from vitrail.data.balance import class_counts, imbalance
from vitrail.data.targets import titled
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.evaluate.metrics import AnyMetrics
from vitrail.models import Model, is_meant, parameters
from vitrail.models.vit import ViTConfig
from vitrail.progress import log
from vitrail.runs.run import Run
from vitrail.train.checkpoint import checkpoint_path
from vitrail.train.resolve import check
from vitrail.train.transfer import describe_learning

# Settings that decide how a run is carried out, not what it computes: they may change when it resumes.
_FREE_ON_RESUME = {"device", "workers", "save_minutes", "data_dir", "cache_gb"}


def reopen(run: Path, source: str | None, asked: Mapping[str, object]) -> tuple[Path, TrainConfig]:
    """The configuration of a run to resume; `asked` may only change how the run is carried out."""
    config = Run.open(run).config
    saved = flat(config)
    changed = []
    for name, value in {**asked, **({"data": full_name(source)} if source else {})}.items():
        value = coerce(TrainConfig, name, value)
        if name == "model":
            value = saved[name] if is_meant(saved[name], value) else value
        if name in _FREE_ON_RESUME:
            config = override(config, {name: value})
        elif value != saved[name]:
            new, old = (f"{x:g}" if type(x) is float else x for x in (value, saved[name]))
            changed.append(f"{name} {new} instead of {old}")
    if changed:
        raise UserError(
            f"A run resumes with its own settings, but this asks for {', '.join(changed)}. "
            f"Leave that out, or start a new run with `--weights {run}`."
        )
    choose_device(config.run.device)
    return run, check(config)


def derive(*numbers: int) -> int:
    """A seed that depends on all of the numbers: the state of every generator at a step, made from the step."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def describe(config: TrainConfig, data: Data, model: Model) -> str:
    """What is about to be trained on what, in a few lines."""
    counts = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    c, o = config.input, config.optim
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (c.mean, c.std))
    length = f"{o.epochs:g} epochs" if o.time_budget is None else f"{o.time_budget}, about {o.epochs:g} epochs"
    arch = config.arch
    chosen = (
        f", {arch.stem} stem, {arch.pool} pooling, {arch.pos} positions" if isinstance(model.config, ViTConfig) else ""
    )
    lines = [
        f"data      {config.data}: {counts}; {titled(data.task, data.classes)}",
        f"pixels    {c.channels} {'channel' if c.channels == 1 else 'channels'} of {c.bits} bits; "
        f"mean {mean}, std {std} ({c.normalize})",
        f"model     {config.model} at {c.img_size[0]}x{c.img_size[1]}x{c.channels}{chosen}: "
        f"{model.config.length} tokens, {parameters(model.config):,} parameters",
        f"recipe    {config.recipe}: {length}, batch {o.batch_size * o.grad_accum_steps}, {o.opt}, "
        f"lr {o.lr:g} {o.sched} with {o.warmup_epochs:g} epochs of warm-up, weight decay {o.weight_decay:g}",
        *([f"weights   {config.weights}: {describe_learning(model, config)}"] if config.weights else []),
        f"device    {config.run.device}, precision {config.run.amp}, seed {config.run.seed}",
    ]
    return "\n".join(lines)


def uneven(config: TrainConfig, data: Data) -> str | None:
    """A warning if some classes have far fewer images than others and nothing makes up for it."""
    if data.task == "regression":
        return None
    counts = class_counts(data.splits["train"].targets, len(data.classes)).tolist()
    found = imbalance(dict(zip(data.classes, counts, strict=True)))
    if found is None or config.source.class_weights or config.source.balanced_sampling:
        return None
    return (
        f"{found}: try {'--class-weights' if data.task == 'multilabel' else '--balanced-sampling, or --class-weights'}."
    )


class Diverged(UserError):
    """The loss, the gradient or the weights are not finite any more."""


def diverged(run: Path, step: int, lr: float, loss: float, norm: float) -> Diverged:
    path = checkpoint_path(run)
    kept = f"The last good checkpoint is {path}." if path.exists() else "There was no checkpoint yet."
    return Diverged(
        f"Training diverged at step {step} with learning rate {lr:.3g}: the loss is {loss}, the gradient {norm}. "
        f"{kept} Start again with a lower --lr, a longer --warmup-epochs or a --clip-grad of 1."
    )


@dataclass
class Progress:
    """How far a run has come: all of its state that is not in the model and the optimiser."""

    step: int = 0
    seconds: float = 0.0
    prepared: float = 0.0  # those of them before any step, in which a teacher was asked
    lr: float = 0.0  # of the last step
    trained: float = 0.0  # seconds of this epoch's steps
    waited: float = 0.0  # and those of them without data
    taught: float | None = None  # and those of its teacher, if it has one
    best: float = -math.inf
    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clock = self._saved = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds of steps and validations, by which the time of those to come is estimated."""
        return self.seconds - self.prepared

    def tick(self) -> float:
        """Adds the time since the last tick to the run's time, and returns it."""
        now = time.monotonic()
        passed, self._clock = now - self._clock, now
        self.seconds += passed
        return passed

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what happens inside as waiting for data."""
        start = time.monotonic()
        yield
        self.waited += time.monotonic() - start

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """Counts what happens inside as the teacher's time."""
        start = time.monotonic()
        yield
        self.taught = (self.taught or 0.0) + time.monotonic() - start

    def minutes_unsaved(self) -> float:
        return (time.monotonic() - self._saved) / 60

    def add(self, values: Mapping[str, float]) -> None:
        """Counts one optimiser step."""
        self.step += 1
        self.count += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / max(self.count, 1)

    def close_epoch(self, metrics: AnyMetrics) -> None:
        """Adds the row of a finished epoch and begins the next one's sums."""
        self.tick()
        trained = self.trained or math.inf
        self.rows.append(
            {
                "epoch": len(self.rows) + 1,
                "step": self.step,
                "lr": self.lr,
                **{f"train_{name}": self.mean(name) for name in self.sums},
                **{f"val_{name}": value for name, value in metrics.row().items()},
                "seconds": round(self.seconds, 2),
                "wait": round(self.waited / trained, 4),  # share of the steps' time
                **({} if self.taught is None else {"teach": round(self.taught / trained, 4)}),
            }
        )
        self.trained = self.waited = 0.0
        self.taught = None if self.taught is None else 0.0
        self.count, self.sums = 0, dict.fromkeys(self.sums, 0.0)

    def state(self, data: Data) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        self._saved = time.monotonic()
        return {"progress": asdict(self), "data": data.fingerprint()}

    @classmethod
    def restore(cls, state: Mapping[str, Any], data: Data) -> Progress:
        if state["data"] != data.fingerprint():
            raise UserError(
                "The data has changed since the run began: other images, labels or classes. "
                "Put it back as it was, or start a new run with --weights."
            )
        return cls(**state["progress"])


class Interruption:
    """Turns Ctrl-C and a polite kill into a request, so that training can save and stop at a step's end."""

    def __init__(self, run: Path):
        self.requested = False
        self._run = run
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is KeyboardInterrupt:
            log.info(f"Stopped. Go on with: vitrail train --resume {self._run}")

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.info("Stopping at the end of this step, to save. Once more to stop at once.")
