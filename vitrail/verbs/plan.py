"""`vitrail plan`: what a run needs, before it is started."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.verbs.pretrain import Method

if TYPE_CHECKING:
    from vitrail.plan.estimate import Plan


def plan(
    *,
    data: str | int | Path | None = None,
    classes: int | None = None,
    method: Method | None = None,
    device: str | None = None,
    devices: str | None = None,
    utilisation: float | None = None,
    price: float | None = None,
    watts: float | None = None,
    **settings: object,
) -> Plan:
    """Plan a run: its parameters, compute, memory, time, energy and price, before anything is trained.

    Memory is counted on a traced training step. This machine's speed is measured for a few seconds; that of a GPU is
    its peak rate times an assumed utilisation, without data loading and communication.

    Args:
        data (N|DATA): number of training images, or a data set (default: 1281167, as ImageNet-1k)
        classes: number of classes, if --data is a number (default: 1000)
        method: self-supervised method, to plan `vitrail pretrain`
        device (NAME): cpu, cuda or mps of this machine, or a known GPU such as A100 (default: the fastest here)
        devices (NxNAME): several GPUs, which share each batch: 8xA100
        utilisation: share of a GPU's peak rate that is reached (default: 0.4)
        price: price of a device for an hour, in any currency
        watts: power of a device (default: a GPU's maximum)
        **settings: every option of `vitrail.config.TrainConfig`, by its flat name
    """
    from vitrail.plan.estimate import make_plan
    from vitrail.plan.machines import machine
    from vitrail.plan.settings import planned

    where = machine(device, devices)
    config, opened = planned(data, classes, method, where, settings)
    return make_plan(config, opened, where, utilisation=utilisation, price=price, watts=watts)


def show(plan: Plan, *, json: bool = False) -> int:
    """Print the plan; exits with 1 if the run does not fit.

    Args:
        json: print JSON
    """
    from vitrail.plan.describe import text, to_json

    print(dumps(to_json(plan), indent=2) if json else text(plan))
    return 0 if plan.fits else 1
