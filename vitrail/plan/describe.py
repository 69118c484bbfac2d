"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any

from vitrail.config import Duration
from vitrail.plan.estimate import USABLE, Plan, Variant

_COLUMNS = ("weights", "gradients", "optimizer", "averages", "activations", "total")
_TITLES = ("weights", "gradients", "optimiser", "average", "activations", "total")


def text(plan: Plan) -> str:
    """The plan as a page of text."""
    config, machine, optim = plan.config, plan.machine, plan.config.optim
    h, w = config.input.img_size
    rows = [
        ("model", f"{config.model}, {h}x{w}, {plan.tokens:,} tokens"),
        ("parameters", f"{plan.parameters:,}" + _trainable(plan)),
        ("compute", f"{giga(plan.macs)} MACs an image forward, {giga(plan.operations)}FLOP an image in training"),
        ("data", f"{plan.images:,} images, {optim.epochs:g} epochs"),
        ("batch", _batch(plan)),
        ("machine", f"{machine.title}, {size(machine.memory)} each" if machine.count > 1 else _one(plan)),
        ("speed", f"{plan.rate:,.4g} images/s ({plan.basis})"),
        ("epoch", duration(plan.epoch)),
        ("whole run", duration(plan.seconds) + (f", {plan.device_days:,.3g} device-days" if machine.peak else "")),
    ]
    if plan.energy is not None:
        rows.append(("energy", f"{plan.energy:,.3g} kWh at {plan.watts:g} W a device"))
    if plan.cost is not None:
        rows.append(("price", f"{plan.cost:,.2f} at {plan.price:g} a device and hour"))
    lines = [f"{name:<12}{value}" for name, value in rows]
    return "\n".join([*lines, "", *_memory(plan), "", *advice(plan)])


def advice(plan: Plan) -> list[str]:
    """Whether the run fits, and what to change if it does not."""
    machine, run = plan.machine, plan.variants[0]
    room = f"{size(USABLE * machine.memory)} ({USABLE:.0%} of {size(machine.memory)})"
    if run.fits:
        return [f"It fits into {room}; the largest batch that fits is {run.batch:,}."]
    lines = [f"It does not fit into {room}. What fits:"]
    best = _divisor(plan.config.optim.batch_size, run.batch)
    if best:
        accumulate = plan.config.optim.grad_accum_steps * plan.config.optim.batch_size // best
        lines.append(f"  --batch-size {best} --grad-accum-steps {accumulate}, the same optimiser steps")
    lines += [f"  {variant.change}" for variant in plan.variants[1:] if variant.fits]
    lines += [
        f"  {variant.change} with --batch-size {variant.batch} or less"
        for variant in plan.variants[1:]
        if not variant.fits and variant.batch > run.batch
    ]
    if len(lines) == 1:
        lines.append("  nothing of the above: take a smaller model or --img-size, or devices with more memory")
    return lines


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan in JSON types: bytes, seconds, images per second."""
    config, machine = plan.config, plan.machine
    return {
        "model": config.model,
        "img_size": list(config.input.img_size),
        "tokens": plan.tokens,
        "parameters": plan.parameters,
        "trainable": plan.trainable,
        "macs": plan.macs,
        "operations": plan.operations,
        "images": plan.images,
        "epochs": config.optim.epochs,
        "batch_size": config.optim.batch_size,
        "grad_accum_steps": config.optim.grad_accum_steps,
        "machine": {"name": machine.name, "devices": machine.count, "memory": machine.memory},
        "images_per_second": plan.rate,
        "basis": plan.basis,
        "epoch_seconds": plan.epoch,
        "seconds": plan.seconds,
        "device_days": plan.device_days,
        "energy_kwh": plan.energy,
        "price": plan.cost,
        "fits": plan.fits,
        "memory": [
            {
                "with": variant.change,
                **{name: round(getattr(variant.memory, name)) for name in _COLUMNS},
                "largest_batch": variant.batch,
                "fits": variant.fits,
            }
            for variant in plan.variants
        ],
    }


def size(number: float) -> str:
    """Bytes as text: 86.6 MB, 1.2 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:,.1f} {unit}"
    return f"{number:.0f} B"


def giga(number: float) -> str:
    """Operations with their prefix: 17.6 G."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.4g} {unit}"
    return f"{number:g} "


def duration(seconds: float) -> str:
    """A time as text: 1h30m, 12.5 days, 0.4s."""
    if seconds >= 3 * 86_400:
        return f"{seconds / 86_400:,.1f} days"
    return str(Duration(seconds)) if seconds >= 1 else f"{seconds:.2g}s"


def _one(plan: Plan) -> str:
    return f"{plan.machine.title}, {size(plan.machine.memory)}"


def _trainable(plan: Plan) -> str:
    return "" if plan.trainable == plan.parameters else f", {plan.trainable:,} trained"


def _batch(plan: Plan) -> str:
    optim, count = plan.config.optim, plan.machine.count
    shared = f", {-(-optim.batch_size // count)} on each device" if count > 1 else ""
    whole = optim.batch_size * optim.grad_accum_steps
    accumulated = f", accumulated to {whole:,}" if optim.grad_accum_steps > 1 else ""
    return f"{optim.batch_size:,} images{shared}{accumulated}; {optim.opt}, amp {plan.config.run.amp}"


def _memory(plan: Plan) -> list[str]:
    first = max(len(variant.change) for variant in plan.variants) + 2
    first = max(first, len("memory of a device") + 2)
    head = "memory of a device".ljust(first) + "".join(title.rjust(13) for title in _TITLES) + "largest batch".rjust(15)
    return [head, *(_row(variant, first) for variant in plan.variants)]


def _row(variant: Variant, first: int) -> str:
    cells = "".join(size(getattr(variant.memory, name)).rjust(13) for name in _COLUMNS)
    return f"{variant.change or 'this run':<{first}}{cells}{variant.batch:>15,}"


def _divisor(batch: int, most: int) -> int:
    """The largest divisor of a batch size up to `most`; 0 if there is none."""
    return max((d for d in range(1, min(batch, most) + 1) if batch % d == 0), default=0)
