"""A plan: the memory, time, energy and price of a run on a machine, and what to change if it does not fit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from vitrail.config import TrainConfig, override
from vitrail.data import Data
from vitrail.errors import UserError
from vitrail.models import macs, parameters
from vitrail.plan.machines import UTILISATION, Machine
from vitrail.plan.trace import Trace, Tracer
from vitrail.progress import log
from vitrail.train.pace import images_per_second
from vitrail.train.prepare import model_config
from vitrail.train.setup import autocast
from vitrail.world import Shard

USABLE = 0.9  # share of a device's memory for tensors; the rest is for the runtime, workspaces and fragmentation
_STEP, _LONGEST = 1.0, 2.0  # seconds of a measured step, and of one image above which only a product is measured
_PER_MACHINE = 8  # GPUs of a machine, over which --shard hybrid shards
_GATHERED = 2  # stages that FSDP holds unsharded at a time: the current and the next


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    weights: float
    gradients: float
    optimizer: float
    averages: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.averages + self.activations


@dataclass(frozen=True)
class Variant:
    """The same run with another setting."""

    change: str  # the flags; empty for the run itself
    memory: Memory
    batch: int  # images of the largest forward pass that fits, over all devices
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What a run needs on a machine."""

    config: TrainConfig
    machine: Machine
    images: int  # of the training split
    parameters: int
    trainable: int
    macs: int  # of the model, forward, one image
    tokens: int
    operations: float  # of a training step, per image; a multiply-accumulate is two
    variants: tuple[Variant, ...]  # the run itself first
    rate: float  # training images per second, on all devices
    basis: str  # where the rate comes from
    epoch: float  # seconds, with validation
    price: float | None = None  # per device and hour
    watts: float | None = None  # per device

    def __str__(self) -> str:
        from vitrail.plan.describe import text

        return text(self)

    @property
    def memory(self) -> Memory:
        return self.variants[0].memory

    @property
    def fits(self) -> bool:
        return self.variants[0].fits

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        budget = self.config.optim.time_budget
        return self.epoch * self.config.optim.epochs if budget is None else float(budget)

    @property
    def device_days(self) -> float:
        return self.seconds * self.machine.count / 86_400

    @property
    def energy(self) -> float | None:
        """Kilowatt-hours of the devices."""
        return None if self.watts is None else self.watts * self.machine.count * self.seconds / 3.6e6

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.price * self.machine.count * self.seconds / 3600


def make_plan(
    config: TrainConfig,
    data: Data,
    machine: Machine,
    *,
    utilisation: float | None = None,
    price: float | None = None,
    watts: float | None = None,
) -> Plan:
    """The plan of a resolved configuration. Nothing of it is trained; a device of this machine is measured briefly."""
    _check(config, machine, utilisation, price, watts)
    architecture = model_config(config, data.task)
    trace = Tracer(data, gpu=_is_gpu(machine))
    traced = trace(config)
    rate, basis = _rate(config, data, machine, traced, utilisation)
    val = len(data.splits["val"]) / 3 if "val" in data.splits else 0  # a forward pass is a third of a step
    images = len(data.splits["train"])
    return Plan(
        config=config,
        machine=machine,
        images=images,
        parameters=parameters(architecture),
        trainable=traced.trainable,
        macs=macs(architecture),
        tokens=architecture.length,
        operations=traced.operations,
        variants=(
            _variant("", traced, config, machine),
            *_variants(config, data, machine, trace),
        ),
        rate=rate,
        basis=basis,
        epoch=(images + val) / rate,
        price=price,
        watts=machine.watts if watts is None else watts,
    )


def _check(
    config: TrainConfig,
    machine: Machine,
    utilisation: float | None,
    price: float | None,
    watts: float | None,
) -> None:
    if machine.peak and config.run.amp not in machine.peak:
        raise UserError(f"A {machine.name} has no {config.run.amp}. Use --amp {' or '.join(machine.peak)}.")
    if utilisation is not None and not machine.peak:
        raise UserError("'utilisation' is for known GPUs; this machine is measured. Remove it, or name a --device.")
    if utilisation is not None and not 0 < utilisation <= 1:
        raise UserError(f"'utilisation' must be above 0 and at most 1, but it is {utilisation:g}.")
    if config.run.shard != "off" and machine.count == 1:
        raise UserError("--shard needs several devices. Give them, as in --devices 8xA100.")
    for name, value in (("price", price), ("watts", watts)):
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"'{name}' must be a number of at least 0, but it is {value:g}.")
    if config.optim.pass_size % machine.count:
        raise UserError(
            f"The {machine.count} devices share each forward pass equally, but it has {config.optim.pass_size} images. "
            f"Give a --batch-size that is a multiple of {machine.count * config.optim.grad_accum}."
        )


def _is_gpu(machine: Machine) -> bool:
    return bool(machine.peak) or machine.device.startswith("cuda")


# Memory


def memory_of(traced: Trace, batch: float, devices: int = 1, shard: bool = False, over: int | None = None) -> Memory:
    """The memory of each device, at a batch that the devices share. FSDP shards all but the activations.

    It shards them `over` some of the devices, by default all.
    """
    parts = min(over or devices, devices) if shard else 1
    gathered = _GATHERED * traced.largest if shard else 0
    return Memory(
        weights=traced.weights / parts + gathered,
        gradients=traced.gradients / parts + (traced.learning if shard else 0),
        optimizer=traced.optimizer / parts,
        averages=traced.averages / parts,
        activations=traced.activations(math.ceil(batch / devices)),
    )


def largest_batch(traced: Trace, machine: Machine, shard: Shard = "off") -> int:
    """Images of the largest forward pass, over all devices, that fits into their memory; 0 if none does."""

    def fits(each: int) -> bool:
        return _memory(traced, each * machine.count, machine, shard).total <= USABLE * machine.memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * machine.count


def _memory(traced: Trace, batch: float, machine: Machine, shard: Shard) -> Memory:
    return memory_of(traced, batch, machine.count, shard != "off", _PER_MACHINE if shard == "hybrid" else None)


def _variant(change: str, traced: Trace, config: TrainConfig, machine: Machine, shard: Shard | None = None) -> Variant:
    shard = shard or config.run.shard
    memory = _memory(traced, config.optim.pass_size, machine, shard)
    return Variant(change, memory, largest_batch(traced, machine, shard), memory.total <= USABLE * machine.memory)


def _variants(config: TrainConfig, data: Data, machine: Machine, trace: Tracer) -> Iterator[Variant]:
    """The run with other settings that change its memory."""

    def other(change: str, settings: dict[str, object]) -> Variant:
        return _variant(change, trace(override(config, settings)), config, machine)

    half = "bf16" if "bf16" in machine.peak or not machine.peak else "fp16"
    if config.run.amp == "off":
        yield other(f"--amp {half}", {"amp": half})
    else:
        yield other("--amp off", {"amp": "off"})
    if not config.run.grad_checkpointing:
        yield other("--grad-checkpointing", {"grad_checkpointing": True})
    if machine.count > 1 and config.run.shard == "off":
        yield _variant("--shard full", trace(config), config, machine, "full")
    tuned = config.transfer.freeze is not None or config.transfer.lora_rank
    if data.task.labelled and not tuned:
        with suppress(UserError):  # without attention
            yield other("--lora-rank 8", {"lora_rank": 8, "lora_alpha": 16.0})
        yield other("--freeze all", {"freeze": "all"})


# Time


def _rate(
    config: TrainConfig, data: Data, machine: Machine, traced: Trace, utilisation: float | None
) -> tuple[float, str]:
    """Training images per second on all devices, and how it was found."""
    if machine.peak:
        share = UTILISATION if utilisation is None else utilisation
        peak, amp = machine.peak[config.run.amp], config.run.amp
        basis = f"{share:.0%} of the peak, {peak / 1e12:g} TFLOP/s in {'fp32' if amp == 'off' else amp}"
        return share * peak * machine.count / traced.operations, f"{basis}, {'given' if utilisation else 'assumed'}"
    # A product first: a precision that the processor has no instructions for is a hundred times slower than fp32.
    product = _product(config)
    expected = UTILISATION * product / traced.operations
    if expected * _LONGEST < 1 or memory_of(traced, 1).total > USABLE * machine.memory / 2:
        return expected, (
            f"{UTILISATION:.0%} of a matrix product's speed here, {product / 1e9:,.3g} GFLOP/s: a step is too large "
            "to be measured"
        )
    batch = min(config.optim.pass_size, max(int(_STEP * expected), 1))
    while batch > 1 and memory_of(traced, batch).total > USABLE * machine.memory / 2:
        batch //= 2
    log.info(f"Measuring the training speed with {batch} images …")
    rate = images_per_second(replace(config, weights=None), data, batch_size=batch)
    return rate, f"measured with batches of {batch} images"


def _product(config: TrainConfig) -> float:
    """Operations per second of a large matrix product in the run's precision."""
    side = 512 if config.run.device == "cpu" else 4096  # quick without instructions for the precision; fills a GPU
    a = torch.ones(side, side, device=config.run.device)
    with autocast(config)():
        torch.mm(a, a).sum().item()
        begun, count = time.perf_counter(), 0
        while not count or time.perf_counter() - begun < 0.5:
            torch.mm(a, a).sum().item()
            count += 1
    return count * 2 * side**3 / (time.perf_counter() - begun)
