"""Recipes: functions from what is known of the data to a complete configuration.

The first line of a docstring is what `vitrail recipes` says of it. The published ones give the published values
for data of the published size; on other data, and where the user says otherwise, they all follow these rules:

- The batch is the published one, or on small data the largest power of two that gives an epoch 20 steps. A
  forward pass takes at most 128 images, or `--batch-size`, and the gradients of several are added up.
- The learning rate is the published one at the published batch. At another it is scaled, with SGD and DeiT by the
  batch, with Adam and LAMB by its square root (https://arxiv.org/abs/2205.10287, https://arxiv.org/abs/1904.00962).
- The warm-up is the published one, but at most an eighth of the run.
- Mirror images are made of colour images only: a mirrored grey sign is often another sign or none.
- Photographs are trained at the published size, smaller images at their own. The centre crop of 0.875 when
  evaluating is for photographs only.
- With --weights the architecture is that of the weights.

RandAugment here has no invert, cutout or solarize-add, always applies its operations (timm: half of the time),
in both directions, and without noise in the magnitude, which ends at 10. Erased rectangles are filled with the mean
colour, not with noise. "Adam with decoupled weight decay" is AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from vitrail.config import ArchConfig, AugmentConfig, InputConfig, OptimConfig, RunConfig, TrainConfig, options
from vitrail.device import choose_precision
from vitrail.models import ModelConfig


@dataclass(frozen=True)
class Facts:
    """What a recipe may look at: the data, the model to train, and how long and in what batches if the user said so."""

    source: str
    name: str
    images: int
    model: str
    config: ModelConfig
    device: str
    epochs: float | None
    weights: str | None
    only_new: bool = False  # of trained weights nothing learns: only a head, or adapters
    batch_size: int | None = None
    grad_accum_steps: int | None = None


def small(facts: Facts) -> TrainConfig:
    """From scratch on small data: the default up to 100,000 images.

    `vitrail train fashion-mnist --time-budget 10m`: 91.59 % of the 10,000 test images on two CPU cores, the mean of
    three seeds; with 3m 89.11 %. docs/recipes.md has the curves.
    `vitrail train digits --epochs 30`: 98.05 % of 359 held-out digits at the best epoch, 58 s on the same cores.
    """
    epochs = facts.epochs or min(max(round(600_000 / facts.images), 10), 60)
    often = epochs >= 20  # seen so often that the model learns the images by heart unless it is hindered
    photo = min(facts.config.img_size) >= 64
    augment = _augment(facts.config)
    if photo:
        augment = replace(augment, shift=0, crop_scale=0.35)
    if often:
        augment = replace(augment, mixup=0.8, cutmix=1.0) if photo else replace(augment, mixup=0.2)
    return TrainConfig(
        data=facts.source,
        recipe="small",
        model=facts.model,
        weights=facts.weights,
        input=_input(facts.config),
        arch=replace(_arch(facts.config), drop_path=0.1 if often else 0.0),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=_batch(facts.images),
            opt="muon",
            lr=2e-3,
            weight_decay=0.05,
            sched="linear",
            warmup_epochs=round(0.1 * epochs, 2),
        ),
        augment=augment,
        run=_run(facts),
    )


def finetune(facts: Facts) -> TrainConfig:
    """From trained weights: AdamW, lower rates further from the head; the default with --weights.

    The fine-tuning of BEiT (https://arxiv.org/abs/2106.08254) and MAE (https://arxiv.org/abs/2111.06377): AdamW,
    weight decay 0.05, cosine, layer-wise decay, label smoothing 0.1. They decay by 0.65 to 0.75 a layer, for weights
    that have never seen a label, and mix images; the milder 0.85 here, with a body that learns a tenth as fast as the
    head, suits weights that were trained to classify and sets too small for mixing to pay. Where only what is new
    learns, the head or adapters of low rank, it learns three times as fast: there is nothing to spoil. However few the
    images are, there are 200 steps: with 20 images, 50 were too few (docs/transfer.md).
    """
    batch = _batch(facts.images)
    few = math.ceil(_FEWEST_STEPS / max(facts.images // batch, 1))  # epochs that a handful of images needs
    epochs = facts.epochs or max(min(max(round(200_000 / facts.images), 5), 50), few)
    return TrainConfig(
        data=facts.source,
        recipe="finetune",
        model=facts.model,
        weights=facts.weights,
        input=_input(facts.config),
        arch=_arch(facts.config),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=batch,
            opt="adamw",
            lr=3e-3 if facts.only_new else 1e-3,
            weight_decay=0.05,
            sched="cosine",
            warmup_epochs=round(0.1 * epochs, 2),
            layer_decay=0.85,
        ),
        augment=_augment(facts.config),
        run=_run(facts),
    )


def paper_pretrain(facts: Facts) -> TrainConfig:
    """The ViT paper's pre-training: Adam, long warm-up, strong weight decay, no augmentation but crops.

    https://arxiv.org/abs/2010.11929, Table 3: the row for ImageNet up to 3 million images, that for ImageNet-21k up
    to 30 million, that for JFT above; of "7/14" and "30/90" epochs the longer. The paper reports 77.91 % on ImageNet
    for ViT-B/16 after fine-tuning at 384 pixels (Table 5).
    """
    c = facts.config
    optim: dict[str, Any] = {"opt": "adamw", "batch": 4096, "scaling": "sqrt", "warmup_steps": 10_000}
    if facts.images < 3_000_000:
        optim |= {"epochs": 300, "lr": 3e-3, "weight_decay": 0.3, "sched": "cosine", "clip_grad": 1.0}
    elif facts.images < 30_000_000:
        optim |= {"epochs": 90, "lr": 1e-3, "weight_decay": 0.03, "sched": "linear", "clip_grad": 0.0}
    else:
        large = 4e-4 if c.step < 32 else 6e-4
        lr = 8e-4 if c.width < 1024 else large if c.width < 1280 else 3e-4
        epochs = 7 if c.width < 1024 or lr == 6e-4 else 14
        optim |= {"epochs": epochs, "lr": lr, "weight_decay": 0.1, "sched": "linear", "clip_grad": 0.0}
    return _published(
        "paper-pretrain",
        facts,
        fresh={"head": "tanh"},
        drop=0.1 if facts.images < 30_000_000 else 0.0,
        optim=optim,
        augment=AugmentConfig(crop_scale=0.05, hflip=_flip(c)),
    )


def paper_finetune(facts: Facts) -> TrainConfig:
    """The ViT paper's fine-tuning: SGD with momentum at 384 pixels, no weight decay; for --weights.

    https://arxiv.org/abs/2010.11929, Table 4: 500 steps of 512 images below 10,000 images (Pets, Flowers), 10,000
    steps below 100,000 (CIFAR), 20,000 above (ImageNet), here as the same number of epochs. The paper tries four
    learning rates on held-out images, 0.003 to 0.06 for ImageNet and 0.001 to 0.03 elsewhere; this takes 0.03 and
    0.01, defaults of the authors' code for ImageNet and for ViT-B/16 on CIFAR-10: try others with --lr. The code's
    are the warm-ups too, 500 steps, or 100 of 500. Weights for small images keep their size. The average of weights,
    "Polyak & Juditsky averaging with a factor of 0.9999", is the paper's for its largest models on ImageNet; here it
    is always on, as it warms up with the run (--model-ema 0 turns it off).
    """
    many = facts.images >= 100_000
    steps = 500 if facts.images < 10_000 else 20_000 if many else 10_000
    return _published(
        "paper-finetune",
        facts,
        crop=1.0,
        optim={
            "opt": "sgd",
            "batch": 512,
            "scaling": "linear",
            "epochs": math.ceil(steps * 512 / facts.images),
            "lr": 0.03 if many else 0.01,
            "weight_decay": 0.0,
            "sched": "cosine",
            "warmup_steps": 100 if steps == 500 else 500,
            "clip_grad": 1.0,
            "model_ema": 0.9999,
        },
        augment=AugmentConfig(crop_scale=0.05, hflip=_flip(facts.config)),
    )


# Mixup, and RandAugment's operations and magnitude. The paper's magnitudes 15 and 20 go beyond what 10 means here.
_AUGREG = {
    "none": {},
    "light1": {"randaug": 2, "magnitude": 0.0},
    "light2": {"randaug": 2, "magnitude": 10.0, "mixup": 0.2},
    "medium1": {"randaug": 2, "magnitude": 10.0, "mixup": 0.2},
    "medium2": {"randaug": 2, "magnitude": 10.0, "mixup": 0.5},
}


def augreg(facts: Facts) -> TrainConfig:
    """How to train your ViT: Adam, and as much augmentation as the model is large for its data.

    https://arxiv.org/abs/2106.10270 and the authors' configurations for ImageNet and, above 5 million images, for
    ImageNet-21k (vit_i1k.py and vit_i21k.py of big_vision): a binary loss for each class, and augmentation by the
    size of the model from "none" to "medium2", where RandAugment stops at magnitude 10 here, not 15. Their weight
    decay of 1e-4, which is not multiplied by the learning rate of 1e-3, is 0.1 in AdamW's terms.
    """
    c = facts.config
    if facts.images < 5_000_000:
        level = "light1" if c.width < 384 else "medium1" if c.width < 768 and c.step >= 32 else "medium2"
    elif c.width < 768:
        level = "light1" if c.width >= 384 and c.step < 32 else "none"
    else:
        level = "light2" if c.width < 1024 else "medium2"
    return _published(
        "augreg",
        facts,
        fresh={"head": "tanh"},
        optim={
            "opt": "adamw",
            "loss": "bce",
            "batch": 4096,
            "scaling": "sqrt",
            "epochs": 300,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "sched": "cosine",
            "warmup_steps": 10_000,
            "clip_grad": 1.0,
        },
        augment=replace(AugmentConfig(crop_scale=0.05, hflip=_flip(c)), **_AUGREG[level]),  # type: ignore[arg-type]
    )


def beyer(facts: Facts) -> TrainConfig:
    """Better plain ViT baselines: a simple and good start on ImageNet; average pooling, fixed positions.

    https://arxiv.org/abs/2205.01580 and the authors' vit_s16_i1k.py (big_vision): ViT-S/16 reaches 76.5 % on
    ImageNet in 90 epochs and 80.0 % in 300 (--epochs 300). Weight decay as in `augreg`.
    """
    return _published(
        "beyer",
        facts,
        fresh={"pool": "gap", "pos": "sincos2d", "head": "tanh"},
        optim={
            "opt": "adamw",
            "batch": 1024,
            "scaling": "sqrt",
            "epochs": 90,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "sched": "cosine",
            "warmup_steps": 10_000,
            "clip_grad": 1.0,
        },
        augment=AugmentConfig(crop_scale=0.05, hflip=_flip(facts.config), randaug=2, magnitude=10.0, mixup=0.2),
    )


def deit(facts: Facts) -> TrainConfig:
    """DeiT: AdamW and strong augmentation, to train on ImageNet alone.

    https://arxiv.org/abs/2012.12877 and the defaults of the authors' main.py: without distillation Ti reaches
    72.2 %, S 79.9 %, B 81.8 % on ImageNet; with --teacher, in the paper a RegNetY-16GF, and a distillation token Ti
    74.5 %, S 81.2 %, B 83.4 %. Left out: repeated augmentation (three copies of an image in a batch) and ten epochs at
    the lowest learning rate after the last.
    """
    return _published(
        "deit",
        facts,
        drop_path=0.1,
        optim={
            "opt": "adamw",
            "batch": 1024,
            "scaling": "linear",
            "epochs": 300,
            "lr": 1e-3,  # 5e-4 for 512 images
            "weight_decay": 0.05,
            "sched": "cosine",
            "warmup_epochs": 5.0,
            "min_lr": 0.01,
            "clip_grad": 0.0,
        },
        augment=AugmentConfig(
            crop_scale=0.08,
            hflip=_flip(facts.config),
            randaug=2,
            magnitude=9.0,
            reprob=0.25,
            mixup=0.8,
            cutmix=1.0,
            smoothing=0.1,
        ),
    )


def deit3(facts: Facts) -> TrainConfig:
    """DeiT III: LAMB, a binary loss, LayerScale and the three plain changes of 3-Augment, for a long run.

    https://arxiv.org/abs/2204.07118 and the authors' commands for ImageNet: S reaches 81.4 %, B 83.8 %, L 84.9 %.
    B and L are trained at 192 pixels, S at 224 (--img-size 224) and H at 160; B, L and H then for 20 epochs more
    at 224, with AdamW, a learning rate of 1e-5 and weight decay 0.1. Models smaller than S take its values. Left
    out: repeated augmentation, and that the class token has no position. The binary loss is the sum over the
    classes, not their mean, which LAMB does not feel, and the bias of the head begins at -log K, not at 0.
    """
    width = facts.config.width
    lr = 4e-3 if width < 768 else 3e-3
    return _published(
        "deit3",
        facts,
        fresh={"layer_scale": 1e-4},
        drop_path=0.05 if width < 768 else 0.2 if width < 1024 else 0.45 if width < 1280 else 0.6,
        optim={
            "opt": "lamb",
            "loss": "bce",
            "batch": 2048,
            "scaling": "sqrt",
            "epochs": 800,
            "lr": lr,
            "weight_decay": 0.05,
            "sched": "cosine",
            "warmup_epochs": 5.0,
            "min_lr": 1e-5 / lr,
            "clip_grad": 0.0,
        },
        augment=AugmentConfig(
            crop_scale=0.08,
            hflip=_flip(facts.config),
            three_augment=1.0,
            color_jitter=0.3,
            mixup=0.8,
            cutmix=1.0,
        ),
    )


@dataclass(frozen=True)
class Recipe:
    """A recipe, and what it is made for where neither --model nor --img-size is given."""

    make: Callable[[Facts], TrainConfig]
    model: str | None = None  # for photographs; else chosen to fit the images
    photo: int = 128  # side of photographs; the default trains in minutes
    resize: int | None = None  # side for weights that were trained on photographs; else their own

    @property
    def line(self) -> str:
        """What it is, in a line."""
        return (self.make.__doc__ or "").split("\n", 1)[0]


RECIPES = {
    "small": Recipe(small),
    "finetune": Recipe(finetune),
    "paper-pretrain": Recipe(paper_pretrain, "vit_b16", 224),
    "paper-finetune": Recipe(paper_finetune, "vit_b16", 384, resize=384),
    "augreg": Recipe(augreg, "vit_b16", 224),
    "beyer": Recipe(beyer, "vit_s16", 224),
    "deit": Recipe(deit, "vit_b16", 224),
    "deit3": Recipe(deit3, "vit_b16", 192),
}

SMALL_IMAGE = 96  # longest side up to which images keep their size; beyond they are photographs
MOST_SMALL = 100_000  # images up to which a data set is small
_FEWEST_STEPS = 200  # of fine-tuning
_PASS = 128  # images of a forward pass, unless the user says so


def _published(
    recipe: str,
    facts: Facts,
    *,
    optim: dict[str, Any],
    augment: AugmentConfig,
    fresh: dict[str, Any] | None = None,  # of the architecture, where there are no weights that have theirs
    drop: float = 0.0,
    drop_path: float = 0.0,
    crop: float = 0.875,
) -> TrainConfig:
    c = facts.config
    wanted = {"drop": drop, "drop_path": drop_path, **({} if facts.weights or fresh is None else fresh)}
    changes = {name: value for name, value in wanted.items() if getattr(_arch(c), name) is not None}
    return TrainConfig(
        data=facts.source,
        recipe=recipe,
        model=facts.model,
        weights=facts.weights,
        input=replace(_input(c), crop=crop if max(c.img_size) > SMALL_IMAGE else 1.0),
        arch=replace(_arch(c), **changes),
        optim=_optim(facts, **optim),
        augment=augment,
        run=_run(facts),
    )


def _optim(
    facts: Facts,
    *,
    epochs: int,
    batch: int,
    lr: float,
    scaling: Literal["linear", "sqrt"],
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
    **rest: Any,
) -> OptimConfig:
    """The published values after the rules at the top of this file."""
    wanted = _batch(facts.images, batch)
    size = facts.batch_size or min(wanted, _PASS)
    passes = facts.grad_accum_steps or max(round(wanted / size), 1)
    share = size * passes / batch
    length = facts.epochs or epochs
    warmup = warmup_epochs or warmup_steps / max(facts.images // (size * passes), 1)
    return OptimConfig(
        epochs=length,
        batch_size=size,
        grad_accum_steps=passes,
        lr=float(f"{lr * (share if scaling == 'linear' else math.sqrt(share)):.4g}"),
        warmup_epochs=round(min(warmup, length / 8), 2),
        body_lr=1.0,
        **rest,
    )


def _batch(images: int, most: int = 128) -> int:
    """A power of two that gives an epoch 20 steps or more; from 16 to `most`."""
    batch = 16
    while batch < most and images >= 20 * 2 * batch:
        batch *= 2
    return batch


def _augment(config: ModelConfig) -> AugmentConfig:
    """Small shifts, where a pixel is not already a large one; mirror images of photographs, not of grey signs."""
    shift = min(config.img_size) // 14 if min(config.img_size) >= 16 else 0
    return AugmentConfig(shift=shift, hflip=0.0 if config.channels == 1 else 0.5, smoothing=0.1)


def _input(config: ModelConfig) -> InputConfig:
    return InputConfig(img_size=config.img_size, channels=config.channels)


def _arch(config: ModelConfig) -> ArchConfig:
    has = {field.name for field in fields(config)}
    values: dict[str, Any] = {name: getattr(config, name) if name in has else None for name in options(ArchConfig)}
    return ArchConfig(**values)


def _run(facts: Facts) -> RunConfig:
    return RunConfig(name=f"{facts.name}-{facts.model}", device=facts.device, amp=choose_precision(facts.device))


def _flip(config: ModelConfig) -> float:
    return 0.0 if config.channels == 1 else 0.5
