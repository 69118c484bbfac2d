"""From the user's settings to a complete configuration.

`resolve` is the only place where values are derived: it calls the recipe, then applies the user's settings. All values
are logged and saved in the run's `config.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vitrail.config import (
    ArchConfig,
    DistillConfig,
    PretrainConfig,
    Size,
    TrainConfig,
    TransferConfig,
    Verb,
    coerce,
    options,
    override,
)
from vitrail.data import Data
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from vitrail.data.statistics import mean_and_std
from vitrail.device import choose_device, device_name
from vitrail.errors import UserError, nearest
from vitrail.files import free_name
from vitrail.models import CONFIGS, FAMILIES, ModelConfig, backbone, canonical, family, is_meant, named_size
from vitrail.models.module import MODULES
from vitrail.models.validate import DEEPEST, LARGEST, MOST_CLASSES
from vitrail.tasks import task_type
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.loggers import check_loggers
from vitrail.train.pace import images_per_second
from vitrail.train.prepare import preprocessing
from vitrail.train.recipe_rules import SMALL_IMAGE, RecipeInputs
from vitrail.train.recipes import MOST_SMALL, RECIPES, Recipe
from vitrail.weights import absolute, open_card
from vitrail.world import started

LORA_SCALE = 2.0  # alpha / rank
_MOST_CROPS = 1000
_SIZES = {  # of the options of self-supervised methods: least and most
    "decoder_width": (1, LARGEST),
    "decoder_depth": (1, DEEPEST),
    "global_crops": (1, _MOST_CROPS),
    "local_crops": (0, _MOST_CROPS),
    "head_width": (1, LARGEST),
    "prototypes": (2, MOST_CLASSES),
    "projection": (1, LARGEST),
}


def typed(asked: Mapping[str, object], verb: Verb = "") -> dict[str, Any]:
    """The user's settings for a verb, converted to the types of the configuration; paths become absolute."""
    settings = {name: coerce(TrainConfig, name, value) for name, value in _spoken(asked).items()}
    for name in settings if verb else ():
        if (only := options()[name].only) not in ("", verb):
            raise UserError(f"'{name}' is an option of `vitrail {only}`, not of `vitrail {verb}`.")
    if settings.get("task") is not None:
        task_type(settings["task"])  # raises for an unknown name
    if settings.get("image_dir") is not None:
        settings["image_dir"] = str(Path(settings["image_dir"]).expanduser().resolve())
    for name in ("weights", "teacher"):
        if settings.get(name) is not None:
            settings[name] = absolute(settings[name])
    return settings


def _spoken(asked: Mapping[str, object]) -> dict[str, object]:
    """Settings as people say them: amp=True is the default, amp=False (`off` in YAML) none, and device 0 is cuda:0."""
    said = dict(asked)
    if isinstance(amp := said.get("amp"), bool):
        said |= {"amp": "off"}
        if amp:
            del said["amp"]
    if said.get("device") is not None:
        said["device"] = device_name(str(said["device"]))
    return said


def plan(source: str, data: Data, asked: dict[str, Any], custom: Custom = NOTHING) -> TrainConfig:
    """The complete configuration. A time budget is first converted to epochs, which recipes depend on."""
    config = resolve(source, data, asked)
    if config.optim.time_budget is None:
        return config
    if "epochs" in asked:
        raise UserError("--epochs and --time-budget both set the length of the run. Remove one of them.")
    rate = images_per_second(config, data, custom) * started()
    epochs = math.ceil(config.optim.time_budget * rate / len(data.splits["train"]))
    return resolve(source, data, asked | {"epochs": epochs})


def resolve(source: str, data: Data, asked: Mapping[str, object]) -> TrainConfig:
    """The complete configuration: the recipe's choices for this data, overridden by the user's settings."""
    given: dict[str, Any] = {name: coerce(TrainConfig, name, value) for name, value in asked.items()}
    weights, images = given.get("weights"), len(data.splits["train"])
    method = None if data.task.labelled else data.task.name
    usual = "finetune" if weights else "small" if images <= MOST_SMALL else "beyer"
    name = given.get("recipe", usual if method is None else "pretrain-small")
    _check_recipe(name, method)
    model, architecture = _choose_model(data, given, RECIPES[name])
    inputs = RecipeInputs(
        source=source,
        name=data.name,
        images=images,
        model=model,
        config=architecture,
        device=choose_device(given.get("device")),
        epochs=given.get("epochs"),
        weights=weights,
        only_new=given.get("freeze") == "all" or bool(given.get("lora_rank")),
        batch_size=given.get("batch_size"),
        grad_accum=given.get("grad_accum"),
        method=method,
        unlabelled=weights is not None and not open_card(weights, given.get("model")).task.labelled,
    )
    config = data.task.adapt(RECIPES[name].make(inputs))
    if not data.task.single:
        config = override(config, {"head_init": "zero"})
        if given.get("head_init") == "probe":
            raise UserError(f"--head-init probe needs one class per image, but {source} is {data.task.title}.")
    _check_method(config, given, method)
    config = override(config, {"bits": data.bits} | given | {"model": model, "task": data.task.name})
    if weights:
        card = open_card(weights, model)
        theirs = {"interpolation": card.preprocess.interpolation, "pos_resample": card.config.resample}
        config = override(config, {name: value for name, value in theirs.items() if name not in given})
    config = override(config, _normalisation(config, data, given))
    if config.transfer.lora_rank and "lora_alpha" not in given:
        config = override(config, {"lora_alpha": LORA_SCALE * config.transfer.lora_rank})
    config = data.task.check_settings(config, given, source)
    best = config.stop.best
    if best is not None and best not in data.task.choices:
        choices = ", ".join(data.task.choices)
        raise UserError(f"--best {best} does not apply to {data.task.title} data. Choose one of {choices}.")
    crop, (h, w) = config.pretraining.local_size, data.size
    if crop and config.pretraining.local_crops and min(h, w) < crop <= min(config.input.img_size):
        raise UserError(
            f"The images of {data.name} are {h}x{w}, smaller than crops of {crop}x{crop}. Use a smaller --local-size "
            "or --img-size, or --local-crops 0."
        )
    if "name" not in given:
        config = override(config, {"name": free_name(Path(config.run.out), config.run.name)})
    return check(config)


def _check_recipe(name: str, method: str | None) -> None:
    """Raises UserError for an unknown recipe, and for one that is not for this method."""
    if name not in RECIPES:
        raise UserError(f"There is no recipe '{name}'.{nearest(name, RECIPES)} There are {', '.join(RECIPES)}.")
    methods = RECIPES[name].methods
    if methods and method is None:
        raise UserError(f"The recipe '{name}' is for pre-training without labels. Use `vitrail pretrain`.")
    if method is not None and method not in methods:
        fitting = [other for other, recipe in RECIPES.items() if method in recipe.methods]
        raise UserError(f"The recipe '{name}' is not for the method {method}. Use --recipe {' or '.join(fitting)}.")


def _check_method(config: TrainConfig, given: Mapping[str, Any], method: str | None) -> None:
    """Raises UserError for an option that the method does not have: the recipe left it unset."""
    for name in options(PretrainConfig):
        if name in given and getattr(config.pretraining, name) is None:
            raise UserError(f"The method {method} has no option '{name}'. Remove --{name.replace('_', '-')}.")


def _normalisation(config: TrainConfig, data: Data, given: Mapping[str, Any]) -> dict[str, Any]:
    """The mean and std of the pixels: the user's, the weights', or a default for their bit depth."""
    seen = config.input
    data = data.read_as(seen.channels, seen.bits)
    card = open_card(config.weights, config.model).preprocess if config.weights else None
    fits = card is not None and len(card.mean) in (1, seen.channels) and card.bits == seen.bits
    # Sensors seldom use all 16 bits, and floats have any range: 0.5 suits neither.
    choice = given.get("normalize", "weights" if fits else "dataset" if seen.bits > 8 else seen.normalize)
    if "mean" in given and "std" in given:
        numbers: dict[str, Any] = {}
    elif choice == "dataset":
        plain = preprocessing(override(config, {"mean": 0.0, "std": 1.0}))
        mean, std = mean_and_std(data.splits["train"], plain, config.source.workers)
        numbers = {"mean": mean, "std": std}
    elif choice == "imagenet":
        if seen.channels != 3:
            raise UserError(
                f"--normalize imagenet needs 3 channels, but the model reads {seen.channels}. Use --normalize dataset."
            )
        numbers = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    elif choice == "weights":
        if card is None or not fits:
            raise UserError(
                f"--normalize weights needs --weights with {seen.channels} channels of {seen.bits} bits. Add them, or "
                "choose another --normalize."
            )
        numbers = {"mean": card.mean, "std": card.std}
    else:
        numbers = {"mean": 0.5, "std": 0.5}
    return {"normalize": choice} | numbers | {name: given[name] for name in ("mean", "std") if name in given}


def _choose_model(data: Data, given: Mapping[str, Any], recipe: Recipe) -> tuple[str, ModelConfig]:
    """The model and image size: the user's, the weights', the recipe's, or chosen to fit the images."""
    typical = _typical(data, recipe)
    if given.get("weights"):
        card = open_card(given["weights"], given.get("model"))
        name, config = card.model, backbone(card.config)
        if "model" in given and not is_meant(name, given["model"]):
            raise UserError(
                f"The weights in {given['weights']} are a {name}, but --model asks for {given['model']}. "
                "Remove --model to fine-tune them, or --weights to train from scratch."
            )
        resize = recipe.resize if recipe.resize and max(config.img_size) > SMALL_IMAGE else None
        size = _fit((resize, resize), config.step) if resize else config.img_size
    else:
        least = 4 if choose_device(given.get("device")) == "cpu" else 7
        meant = recipe.model if max(given.get("img_size") or data.size) > SMALL_IMAGE else None
        patch = min(_patch(given.get("img_size") or typical, least), data.task.coarsest)
        asked = given.get("model")
        if asked in ("vit", "deit"):  # a family: choose the patch size to fit the images
            asked = f"{asked}_nano{patch}"
        elif asked in FAMILIES and asked not in MODULES:
            asked = _smallest(asked, given.get("img_size") or data.size)
        name, config = canonical(asked or meant or f"vit_nano{patch}")
        size = named_size(asked or "") or _fit(typical, config.step)
    arch = {key: given[key] for key in options(ArchConfig) if key in given}
    if data.task.annotated:
        arch.pop("head", None)  # a dense head, which any backbone may have
    for key in sorted(arch.keys() - {field.name for field in fields(config)}):
        raise UserError(f"A {family(config)} has no option '{key}'; only a ViT has. Remove --{key.replace('_', '-')}.")
    channels = given.get("channels", data.channels)
    size = given.get("img_size") or size
    return name, replace(config, img_size=size, channels=channels, classes=data.task.outputs, **arch)


def _smallest(family_name: str, size: Size) -> str:
    """A family's model for small images, or its smallest published one."""
    names = [name for name, config in CONFIGS.items() if family(config) == family_name]
    return names[0] if max(size) <= SMALL_IMAGE or len(names) == 1 else names[1]


def _typical(data: Data, recipe: Recipe) -> Size:
    """Small images keep their size and shape; photographs become squares of the recipe's size."""
    side = recipe.photo * data.task.detail
    return data.size if max(data.size) <= SMALL_IMAGE else (side, side)


def _patch(size: Size, least: int) -> int:
    """The largest power of two, from 2 to 16, with at least `least` patches along the shorter side, after rounding."""
    patch = 2
    while patch < 16 and round(min(size) / (2 * patch)) >= least:
        patch *= 2
    return patch


def _fit(size: Size, patch: int) -> Size:
    """The nearest multiple of the patch, with at least 4 patches a side."""
    if patch == 1:
        return size
    h, w = (max(round(side / patch), 4) * patch for side in size)
    return h, w


def check(config: TrainConfig) -> TrainConfig:
    """Raises UserError for invalid values and combinations."""
    o, a, r, t, d = config.optim, config.augment, config.run, config.transfer, config.distillation
    restarts = config.stop.restarts or ()
    p = config.pretraining
    rules = [
        ("epochs", o.epochs, 0 < o.epochs < math.inf, "above 0 and finite"),
        ("batch_size", o.batch_size, o.batch_size >= 1, "at least 1"),
        ("grad_accum", o.grad_accum, o.grad_accum >= 1, "at least 1"),
        (
            "batch_size",
            o.batch_size,
            o.batch_size % max(o.grad_accum, 1) == 0,
            f"a multiple of the {o.grad_accum} forward passes of --grad-accum",
        ),
        ("lr", o.lr, 0 < o.lr < math.inf, "above 0 and finite"),
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
        ("patience", config.stop.patience, config.stop.patience >= 0, "at least 0"),
        (
            "restarts",
            list(restarts),
            list(restarts) == sorted({*restarts}) and all(0 < epoch < o.epochs for epoch in restarts),
            "epochs in ascending order, within the run",
        ),
        ("model_ema", o.model_ema, 0 <= o.model_ema < 1, "at least 0 and below 1"),
        ("layer_decay", o.layer_decay, 0 < o.layer_decay <= 1, "above 0 and at most 1"),
        ("folds", config.source.folds, config.source.folds == 0 or config.source.folds >= 2, "0, or 2 and more"),
        (
            "fold",
            config.source.fold,
            0 <= config.source.fold <= config.source.folds,
            "between 0 and the number of folds",
        ),
        ("lora_rank", t.lora_rank, t.lora_rank >= 0, "at least 0"),
        ("distill_alpha", d.distill_alpha, 0 <= d.distill_alpha <= 1, "between 0 and 1, a share of the loss"),
        ("distill_tau", d.distill_tau, 0 < d.distill_tau < math.inf, "above 0"),
        ("crop", config.input.crop, 0 < config.input.crop <= 1, "above 0 and at most 1"),
        ("channels", config.input.channels, config.input.channels >= 1, "at least 1"),
        ("workers", config.source.workers, config.source.workers >= 1, "at least 1"),
        ("cache_gb", config.source.cache_gb, config.source.cache_gb >= 0, "at least 0"),
        ("crop_scale", a.crop_scale, 0 < a.crop_scale <= 1, "above 0 and at most 1"),
        ("color_jitter", a.color_jitter, 0 <= a.color_jitter <= 1, "between 0 and 1, a share"),
        ("smoothing", a.smoothing, 0 <= a.smoothing < 1, "at least 0 and below 1"),
        *(
            (n, getattr(a, n), 0 <= getattr(a, n) <= 1, "a probability")
            for n in ("hflip", "three_augment", "reprob", "mix_prob")
        ),
        ("aug_repeats", a.aug_repeats, a.aug_repeats >= 1, "at least 1"),
        *((n, getattr(a, n), getattr(a, n) >= 0, "at least 0") for n in ("shift", "randaug", "mixup", "cutmix")),
        *(
            (n, getattr(p, n), least <= getattr(p, n) <= most, f"from {least} to {most:,}")
            for n, (least, most) in _SIZES.items()
            if getattr(p, n) is not None
        ),
        ("teacher_momentum", p.teacher_momentum, 0 <= (p.teacher_momentum or 0) < 1, "at least 0 and below 1"),
        ("teacher_temp", p.teacher_temp, p.teacher_temp is None or 0 < p.teacher_temp < math.inf, "above 0"),
        ("sigreg", p.sigreg, p.sigreg is None or 0 < p.sigreg < 1, "above 0 and below 1, a share of the loss"),
    ]
    for name, value, fine, rule in rules:
        if not fine:
            raise UserError(f"'{name}' must be {rule}, but it is {f'{value:g}' if type(value) is float else value}.")
    for name, option in options(TransferConfig).items():
        if config.weights is None and getattr(t, name) != option.default:
            raise UserError(f"--{name.replace('_', '-')} needs trained weights. Add --weights.")
    for name, option in options(DistillConfig).items():
        if d.teacher is None and getattr(d, name) != option.default:
            raise UserError(f"--{name.replace('_', '-')} needs a teacher. Add --teacher.")
    if d.distill == "hard" and d.distill_tau != 1:
        raise UserError("--distill-tau has no effect with --distill hard. Use --distill soft.")
    if t.lora_alpha and not t.lora_rank:
        raise UserError("--lora-alpha needs LoRA adapters. Add --lora-rank.")
    if t.lora_rank and t.lora_alpha <= 0:
        raise UserError(f"'lora_alpha' must be above 0, but it is {t.lora_alpha:g}.")
    if config.source.class_weights and config.source.balanced_sampling:
        raise UserError(
            "--class-weights and --balanced-sampling each balance the classes; together they would overweight the rare "
            "ones. Choose one."
        )
    if a.aug_repeats > 1 and config.source.balanced_sampling:
        raise UserError(
            "--aug-repeats and --balanced-sampling each repeat images in an epoch. Choose one: --aug-repeats 1 is off."
        )
    if a.aug_repeats > 1 and config.source.streaming:
        raise UserError("A stream delivers every image once. Add --aug-repeats 1, or drop --streaming.")
    if r.shard != "off" and r.amp == "fp16":
        raise UserError("--shard needs gradients that need no scaling. Use --amp bf16 or off.")
    check_loggers(config.run.log or ())
    preprocessing(config)  # validates its own values
    return config
