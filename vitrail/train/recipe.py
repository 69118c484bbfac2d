"""Recipes: functions from what is known of the data to a complete configuration.

`resolve` is the only place where a value is derived: it asks the recipe, then puts what the user gave on top.
Everything it decides is printed and saved in the run's `config.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.config import (
    ArchConfig,
    AugmentConfig,
    InputConfig,
    OptimConfig,
    RunConfig,
    Size,
    TrainConfig,
    coerce,
    options,
    override,
)
from vitrail.data import Data
from vitrail.data.preprocess import Preprocess
from vitrail.data.statistics import mean_and_std
from vitrail.device import choose_device, choose_precision
from vitrail.errors import UserError, nearest
from vitrail.models import ModelConfig, canonical
from vitrail.weights import open_card


@dataclass(frozen=True)
class Facts:
    """What a recipe may look at: the data, the model to train, and how long if the user said so."""

    source: str
    name: str
    images: int
    model: str
    config: ModelConfig
    device: str
    epochs: int | None
    weights: str | None


def small(facts: Facts) -> TrainConfig:
    """From scratch on small data, below about 100,000 images: the default.

    `vitrail train fashion-mnist`: 91.87 % of the 10,000 test images after 10 epochs, 12 min 49 s on two CPU cores.
    `vitrail train digits --epochs 30`: 98.05 % of 359 held-out digits at the best epoch, 58 s on the same cores.
    """
    epochs = facts.epochs or min(max(round(600_000 / facts.images), 10), 60)
    few = facts.images < 10_000  # so few that the model learns them by heart unless it is hindered
    return TrainConfig(
        data=facts.source,
        recipe="small",
        model=facts.model,
        weights=facts.weights,
        input=_input(facts.config),
        arch=replace(_arch(facts.config), drop_path=0.1 if few else 0.0),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=_batch(facts.images),
            opt="muon",
            lr=2e-3,
            weight_decay=0.05,
            sched="linear",
            warmup_epochs=round(0.1 * epochs, 2),
        ),
        augment=replace(_augment(facts.config), mixup=0.2 if few else 0.0),
        run=_run(facts),
    )


def finetune(facts: Facts) -> TrainConfig:
    """From trained weights: AdamW, a lower rate for stages far from the head; the default with --weights."""
    epochs = facts.epochs or min(max(round(200_000 / facts.images), 5), 50)
    return TrainConfig(
        data=facts.source,
        recipe="finetune",
        model=facts.model,
        weights=facts.weights,
        input=_input(facts.config),
        arch=_arch(facts.config),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=_batch(facts.images),
            opt="adamw",
            lr=1e-3,
            weight_decay=0.05,
            sched="cosine",
            warmup_epochs=round(0.1 * epochs, 2),
            layer_decay=0.85,
        ),
        augment=_augment(facts.config),
        run=_run(facts),
    )


RECIPES: dict[str, Callable[[Facts], TrainConfig]] = {"small": small, "finetune": finetune}


def resolve(source: str, data: Data, asked: Mapping[str, object]) -> TrainConfig:
    """The complete configuration: the recipe's choices for this data, with what the user asked for on top."""
    given: dict[str, Any] = {name: coerce(TrainConfig, name, value) for name, value in asked.items()}
    weights = given.get("weights")
    name = given.get("recipe", "finetune" if weights else "small")
    if name not in RECIPES:
        raise UserError(f"There is no recipe '{name}'.{nearest(name, RECIPES)} There are {', '.join(RECIPES)}.")
    model, architecture = _choose_model(data, given)
    facts = Facts(
        source=source,
        name=data.name,
        images=len(data.splits["train"]),
        model=model,
        config=architecture,
        device=choose_device(given.get("device")),
        epochs=given.get("epochs"),
        weights=weights,
    )
    config = override(RECIPES[name](facts), {"bits": data.bits} | given | {"model": model})
    config = override(config, _normalisation(config, data, given))
    if "name" not in given:
        config = override(config, {"name": _free_name(config.run)})
    return check(config)


def model_config(config: TrainConfig, classes: int) -> ModelConfig:
    """The architecture that a resolved configuration trains."""
    base = open_card(config.weights).config if config.weights else canonical(config.model)[1]
    arch = {name: getattr(config.arch, name) for name in options(ArchConfig)}
    return replace(base, img_size=config.input.img_size, channels=config.input.channels, classes=classes, **arch)


def preprocessing(config: TrainConfig) -> Preprocess:
    """How a resolved configuration makes images what the model reads."""
    seen = config.input
    return Preprocess(seen.img_size, seen.channels, seen.crop, seen.mean, seen.std, seen.bits)


_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def _normalisation(config: TrainConfig, data: Data, given: Mapping[str, Any]) -> dict[str, Any]:
    """How pixels are brought around zero: as asked, as the weights were trained, or as their depth needs it."""
    seen = config.input
    data = data.read_as(seen.channels, seen.bits)
    card = open_card(config.weights).preprocess if config.weights else None
    fits = card is not None and len(card.mean) in (1, seen.channels) and card.bits == seen.bits
    # Sensors seldom use all of 16 bits, and floats can be anything: around 0.5 they would hardly differ.
    choice = given.get("normalize", "weights" if fits else "dataset" if seen.bits > 8 else "half")
    if "mean" in given and "std" in given:
        numbers: dict[str, Any] = {}
    elif choice == "dataset":
        plain = preprocessing(override(config, {"mean": 0.0, "std": 1.0}))
        mean, std = mean_and_std(data.splits["train"], plain, seen.workers)
        numbers = {"mean": mean, "std": std}
    elif choice == "imagenet":
        if seen.channels != 3:
            raise UserError(f"ImageNet's mean is that of 3 channels, but the model sees {seen.channels}.")
        numbers = _IMAGENET
    elif choice == "weights":
        if card is None or not fits:
            raise UserError(
                "There is no mean of weights to keep: give --weights of as many channels and bits, or leave it out."
            )
        numbers = {"mean": card.mean, "std": card.std}
    else:
        numbers = {"mean": 0.5, "std": 0.5}
    return {"normalize": choice} | numbers | {name: given[name] for name in ("mean", "std") if name in given}


def _free_name(run: RunConfig) -> str:
    """The name of the run, with the first number behind it for which there is no run yet."""
    name, number = run.name, 1
    while (Path(run.out) / name).exists():
        number += 1
        name = f"{run.name}-{number}"
    return name


def _choose_model(data: Data, given: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """The model and image size: as asked, as the weights have it, or to fit the images."""
    if given.get("weights"):
        card = open_card(given["weights"])
        name, config = card.model, card.config
        if "model" in given and canonical(given["model"])[0] != name:
            raise UserError(f"The weights in {given['weights']} are a {name}, but --model asks for {given['model']}.")
    else:
        least = 4 if choose_device(given.get("device")) == "cpu" else 7
        name, config = canonical(
            given.get("model") or f"vit_nano{_patch(given.get('img_size') or _typical(data), least)}"
        )
    size = given.get("img_size") or (config.img_size if given.get("weights") else _fit(_typical(data), config.patch))
    arch = {key: given[key] for key in options(ArchConfig) if key in given}
    channels = given.get("channels", data.channels)
    return name, replace(config, img_size=size, channels=channels, classes=len(data.classes), **arch)


_PHOTO = 128  # side at which photographs are trained from scratch unless asked otherwise


def _typical(data: Data) -> Size:
    """Small images keep their size and shape; photographs become squares of a size that trains in minutes."""
    return data.size if max(data.size) <= 96 else (_PHOTO, _PHOTO)


def _patch(size: Size, least: int) -> int:
    """The largest power of two that cuts the shorter side, after rounding, into `least` patches or more; 2 to 16."""
    patch = 2
    while patch < 16 and round(min(size) / (2 * patch)) >= least:
        patch *= 2
    return patch


def _fit(size: Size, patch: int) -> Size:
    """The nearest size that the patch divides, never fewer than 4 patches a side."""
    h, w = (max(round(side / patch), 4) * patch for side in size)
    return h, w


def _batch(images: int) -> int:
    """A power of two that gives an epoch 20 steps or more; 16 to 128."""
    batch = 16
    while batch < 128 and images >= 20 * 2 * batch:
        batch *= 2
    return batch


def _augment(config: ModelConfig) -> AugmentConfig:
    """Small shifts, where a pixel is not already a large one; mirror images of photographs, not of grey signs."""
    shift = min(config.img_size) // 14 if min(config.img_size) >= 16 else 0
    return AugmentConfig(shift=shift, hflip=0.0 if config.channels == 1 else 0.5, smoothing=0.1)


def _input(config: ModelConfig) -> InputConfig:
    return InputConfig(img_size=config.img_size, channels=config.channels)


def _arch(config: ModelConfig) -> ArchConfig:
    return ArchConfig(**{name: getattr(config, name) for name in options(ArchConfig)})


def _run(facts: Facts) -> RunConfig:
    return RunConfig(name=f"{facts.name}-{facts.model}", device=facts.device, amp=choose_precision(facts.device))


def check(config: TrainConfig) -> TrainConfig:
    """Refuses values that no training could use, before anything starts."""
    o, a, r = config.optim, config.augment, config.run
    rules = [
        ("epochs", o.epochs, o.epochs >= 1, "at least 1"),
        ("batch_size", o.batch_size, o.batch_size >= 1, "at least 1"),
        ("grad_accum_steps", o.grad_accum_steps, o.grad_accum_steps >= 1, "at least 1"),
        ("lr", o.lr, o.lr > 0, "above 0"),
        ("min_lr", o.min_lr, 0 <= o.min_lr <= 1, "between 0 and 1, a share of the peak"),
        ("cooldown", o.cooldown, 0 <= o.cooldown <= 1, "between 0 and 1, a share of the run"),
        ("body_lr", o.body_lr, o.body_lr >= 0, "at least 0"),
        ("weight_decay", o.weight_decay, o.weight_decay >= 0, "at least 0"),
        ("clip_grad", o.clip_grad, o.clip_grad >= 0, "at least 0"),
        ("magnitude", a.magnitude, 0 <= a.magnitude <= 10, "between 0 and 10"),
        ("name", repr(r.name), Path(r.name).name == r.name != "", "the name of a folder"),
        (
            "warmup_epochs",
            o.warmup_epochs,
            0 <= o.warmup_epochs <= o.epochs,
            "between 0 and the number of epochs",
        ),
        ("model_ema", o.model_ema, 0 <= o.model_ema < 1, "at least 0 and below 1"),
        ("layer_decay", o.layer_decay, 0 < o.layer_decay <= 1, "above 0 and at most 1"),
        ("crop", config.input.crop, 0 < config.input.crop <= 1, "above 0 and at most 1"),
        ("channels", config.input.channels, config.input.channels >= 1, "at least 1"),
        ("workers", config.input.workers, config.input.workers >= 1, "at least 1"),
        ("crop_scale", a.crop_scale, 0 < a.crop_scale <= 1, "above 0 and at most 1"),
        ("smoothing", a.smoothing, 0 <= a.smoothing < 1, "at least 0 and below 1"),
        *((n, getattr(a, n), 0 <= getattr(a, n) <= 1, "a probability") for n in ("hflip", "reprob", "mix_prob")),
        *((n, getattr(a, n), getattr(a, n) >= 0, "at least 0") for n in ("shift", "randaug", "mixup", "cutmix")),
    ]
    for name, value, fine, rule in rules:
        if not fine:
            raise UserError(f"'{name}' must be {rule}, but it is {value}.")
    preprocessing(config)  # has rules of its own
    return config
