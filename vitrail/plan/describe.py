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
        ("speed", f"{plan.rate:,{'.0f' if plan.rate >= 1000 else '.4g'}} images/s ({plan.basis})"),
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
    batch, passes = plan.config.optim.batch_size, _passes(plan.config.optim.batch_size, run.batch, machine.count)
    if run.fits:
        lines = [f"It fits into {room}; the largest forward pass that fits has {run.batch:,} images."]
        fewer = 0 < passes < plan.config.optim.grad_accum
        return [*lines, *([f"The batch fits with --grad-accum {passes}: fewer and larger passes."] if fewer else [])]
    lines = [f"It does not fit into {room}. What fits:"]
    if passes:
        lines.append(f"  --grad-accum {passes}, the same optimiser steps")
    lines += [f"  {variant.change}" for variant in plan.variants[1:] if variant.fits]
    lines += [
        f"  {variant.change} --grad-accum {passes}"
        for variant in plan.variants[1:]
        if not variant.fits and variant.batch > run.batch and (passes := _passes(batch, variant.batch, machine.count))
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
        "grad_accum": config.optim.grad_accum,
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
                "largest_pass": variant.batch,
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
    split = f" in {optim.grad_accum} forward passes" if optim.grad_accum > 1 else ""
    shared = f", {-(-optim.pass_size // count)} at a time on each device" if count > 1 else ""
    return f"{optim.batch_size:,} images{split}{shared}; {optim.opt}, amp {plan.config.run.amp}"


def _memory(plan: Plan) -> list[str]:
    first = max(len(variant.change) for variant in plan.variants) + 2
    first = max(first, len("memory of a device") + 2)
    head = "memory of a device".ljust(first) + "".join(title.rjust(13) for title in _TITLES) + "largest pass".rjust(15)
    return [head, *(_row(variant, first) for variant in plan.variants)]


def _row(variant: Variant, first: int) -> str:
    cells = "".join(size(getattr(variant.memory, name)).rjust(13) for name in _COLUMNS)
    return f"{variant.change or 'this run':<{first}}{cells}{variant.batch:>15,}"


def _passes(batch: int, most: int, devices: int) -> int:
    """The fewest forward passes of at most `most` images that a batch splits into, on all devices; 0 if none do."""
    counts = range(1, batch // devices + 1)
    return next((n for n in counts if batch % (n * devices) == 0 and batch // n <= most), 0)
