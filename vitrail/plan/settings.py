"""The configuration of a run that is planned, on real data or on a number of images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.config import TrainConfig, override
from vitrail.config.splits import split_settings
from vitrail.data import Data, Source, full_name, open_data
from vitrail.data.blank import IMAGENET_CLASSES, IMAGENET_IMAGES, blank
from vitrail.errors import UserError
from vitrail.models import canonical
from vitrail.plan.estimate import Plan, make_plan
from vitrail.plan.machines import Machine, machine
from vitrail.train.resolve import LORA_SCALE, resolve, typed
from vitrail.train.resolve import plan as resolve_run

_MOST_CLASSES = 1_000_000  # of a number of images; each has a name in memory
_VALIDATION = 0.04  # of the images, if only their number is known; ImageNet's share
_TUNING = ("freeze", "lora_rank", "lora_alpha")


def planned(
    data: str | int | Path | None, classes: int | None, method: str | None, where: Machine, asked: Mapping[str, Any]
) -> tuple[TrainConfig, Data]:
    """The resolved configuration of a run on a machine, and its data."""
    given = typed(asked)
    if method is not None:
        given["task"] = method
    if where.peak:
        given.setdefault("amp", "bf16" if "bf16" in where.peak else "fp16")
    given["device"] = where.device
    given.setdefault("name", "plan")  # no folder is made
    tuning = {name: given.pop(name) for name in _TUNING if name in given and given.get("weights") is None}
    if tuning:
        given.setdefault("recipe", "finetune")
    opened, source = _data(data, classes, given)
    config = resolve(source, opened, given)
    if tuning.get("lora_rank"):
        tuning.setdefault("lora_alpha", LORA_SCALE * tuning["lora_rank"])
    return override(config, tuning), opened


def _data(data: str | int | Path | None, classes: int | None, given: dict[str, Any]) -> tuple[Data, str]:
    number = int(data) if isinstance(data, int) or (isinstance(data, str) and data.isdigit()) else None
    if data is not None and number is None:
        if classes is not None:
            raise UserError("'classes' is for a number of images; a data set has its own. Remove --classes.")
        return open_data(str(data), **split_settings(given)), full_name(str(data))
    number = IMAGENET_IMAGES if number is None else number
    kinds = IMAGENET_CLASSES if classes is None else classes
    if min(number, kinds) < 1:
        raise UserError(f"'data' and 'classes' must be at least 1, but they are {number} and {kinds}.")
    if kinds > _MOST_CLASSES:
        raise UserError(f"'classes' must be at most {_MOST_CLASSES:,}, but it is {kinds:,}. Plan for fewer.")
    if given.get("weights") is None and given.get("model") is not None and "img_size" not in given:
        given["img_size"] = canonical(given["model"])[1].img_size
    val = max(round(number * _VALIDATION), 1)
    channels = given.get("channels", 3)
    opened = blank(number, kinds, val=val, channels=channels, task=given.get("task"), name=f"{number} images")
    return opened, f"{number:,} images"


def plan_run(source: Source | None, resume: str | None, asked: Mapping[str, Any]) -> Plan:
    """The plan of the run that `vitrail train` would start with these settings, on this machine."""
    if source is None or resume is not None:
        raise UserError("--plan is for a new run. Give its data, and remove --resume.")
    given = typed(asked, "train")
    data = open_data(source, **split_settings(given))
    config = resolve_run(full_name(source), data, given)
    return make_plan(config, data, machine(config.run.device))
