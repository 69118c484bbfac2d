"""Training recipes: functions from facts about the data to a complete configuration.

The first line of a recipe's docstring is its description in `vitrail recipes`. Published recipes have the published
values for data of the published size. For other data and user overrides they follow these rules:

- Batch size: the published one or, on small data, the largest power of two with 20 steps per epoch. A forward pass
  takes at most 128 images, or `--batch-size`; gradients are accumulated to the full batch.
- Learning rate: scaled from the published batch size, linearly for SGD and DeiT, by the square root for Adam and LAMB
  (https://arxiv.org/abs/2205.10287, https://arxiv.org/abs/1904.00962).
- Warm-up: the published one, but at most an eighth of the run.
- Horizontal flips: for colour images only, because grayscale images are often characters, which flips change.
- Image size: photographs are trained at the published size, smaller images at their own. Only photographs are
  evaluated with a centre crop of 0.875.
- With --weights, the architecture is that of the weights.

RandAugment here has no invert, cutout or solarize-add, always applies its operations (timm: half of the time) in both
directions, and has no noise in the magnitude, whose maximum is 10. Random erasing fills with the mean colour, not with
noise. "Adam with decoupled weight decay" is AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from vitrail.config import ArchConfig, AugmentConfig, InputConfig, OptimConfig, RunConfig, TrainConfig, options
from vitrail.device import choose_precision
from vitrail.models import ModelConfig, step


@dataclass(frozen=True)
class Facts:
    """The input of a recipe: data, model, device, and the user's epochs and batch size."""

    source: str
    name: str
    images: int
    model: str
    config: ModelConfig
    device: str
    epochs: float | None
    weights: str | None
    only_new: bool = False  # only new parameters are trained: the head, or LoRA adapters
    batch_size: int | None = None
    grad_accum_steps: int | None = None


def small(facts: Facts) -> TrainConfig:
    """From scratch on small data: the default up to 100,000 images.

    `vitrail train fashion-mnist --time-budget 10m`: 91.59 % on the 10,000 test images, on two CPU cores, mean of
    three seeds; 89.11 % with 3m. docs/recipes.md has the curves.
    `vitrail train digits --epochs 30`: 98.05 % on 359 held-out digits at the best epoch, 58 s on the same cores.
    """
    epochs = facts.epochs or min(max(round(600_000 / facts.images), 10), 60)
    often = epochs >= 20  # long enough to overfit without regularisation
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
    """Fine-tuning with AdamW and layer-wise learning rates; the default with --weights.

    The fine-tuning of BEiT (https://arxiv.org/abs/2106.08254) and MAE (https://arxiv.org/abs/2111.06377): AdamW,
    weight decay 0.05, cosine schedule, layer-wise decay, label smoothing 0.1. They decay by 0.65 to 0.75 per layer, for
    self-supervised weights, and use mixup; the milder 0.85 here, with a tenth of the head's learning rate for the
    backbone, suits supervised weights and data too small for mixup. If only the head or LoRA adapters are trained, the
    learning rate is three times as high, as no pre-trained weights can be damaged. At least 200 steps: with 20 images,
    50 were too few (docs/transfer.md).
    """
    batch = _batch(facts.images)
    few = math.ceil(_FEWEST_STEPS / max(facts.images // batch, 1))  # epochs for the minimum number of steps
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
    """The ViT paper's pre-training: Adam, long warm-up, strong weight decay, crops as the only augmentation.

    https://arxiv.org/abs/2010.11929, Table 3: the row for ImageNet up to 3 million images, ImageNet-21k up to 30
    million, JFT above; of "7/14" and "30/90" epochs the longer. The paper reports 77.91 % on ImageNet for ViT-B/16
    after fine-tuning at 384 pixels (Table 5).
    """
    c = facts.config
    optim: dict[str, Any] = {"opt": "adamw", "batch": 4096, "scaling": "sqrt", "warmup_steps": 10_000}
    if facts.images < 3_000_000:
        optim |= {"epochs": 300, "lr": 3e-3, "weight_decay": 0.3, "sched": "cosine", "clip_grad": 1.0}
    elif facts.images < 30_000_000:
        optim |= {"epochs": 90, "lr": 1e-3, "weight_decay": 0.03, "sched": "linear", "clip_grad": 0.0}
    else:
        large = 4e-4 if step(c) < 32 else 6e-4
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

    https://arxiv.org/abs/2010.11929, Table 4: 500 steps at batch size 512 below 10,000 images (Pets, Flowers), 10,000
    steps below 100,000 (CIFAR), 20,000 above (ImageNet), converted to epochs. The paper selects one of four learning
    rates on held-out images, 0.003 to 0.06 for ImageNet and 0.001 to 0.03 elsewhere; this uses 0.03 and 0.01, the
    defaults of the authors' code for ImageNet and for ViT-B/16 on CIFAR-10: try others with --lr. The warm-up is also
    the code's: 500 steps, or 100 of 500. Weights for small images keep their image size. Weight averaging ("Polyak &
    Juditsky averaging with a factor of 0.9999") is used in the paper for its largest models on ImageNet; here it is
    always on, because it warms up with the run (--model-ema 0 turns it off).
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


# Mixup and RandAugment settings. The paper's magnitudes 15 and 20 exceed the maximum of 10 here.
_AUGREG = {
    "none": {},
    "light1": {"randaug": 2, "magnitude": 0.0},
    "light2": {"randaug": 2, "magnitude": 10.0, "mixup": 0.2},
    "medium1": {"randaug": 2, "magnitude": 10.0, "mixup": 0.2},
    "medium2": {"randaug": 2, "magnitude": 10.0, "mixup": 0.5},
}


def augreg(facts: Facts) -> TrainConfig:
    """How to train your ViT (AugReg): Adam, with augmentation by model and data size.

    https://arxiv.org/abs/2106.10270 and the authors' configurations for ImageNet and, above 5 million images, for
    ImageNet-21k (vit_i1k.py and vit_i21k.py of big_vision): binary cross-entropy per class, and augmentation from
    "none" to "medium2" by model size, with RandAugment's magnitude limited to 10 instead of 15. Their weight decay of
    1e-4, not multiplied by the learning rate of 1e-3, corresponds to 0.1 in AdamW.
    """
    c = facts.config
    if facts.images < 5_000_000:
        level = "light1" if c.width < 384 else "medium1" if c.width < 768 and step(c) >= 32 else "medium2"
    elif c.width < 768:
        level = "light1" if c.width >= 384 and step(c) < 32 else "none"
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
    """Better plain ViT baselines: a simple, strong ImageNet baseline; average pooling, sin-cos positions.

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
    72.2 %, S 79.9 %, B 81.8 % on ImageNet; with a distillation token and --teacher, in the paper a RegNetY-16GF, Ti
    74.5 %, S 81.2 %, B 83.4 %. Not included: repeated augmentation (three copies of an image per batch) and the ten
    cool-down epochs at the minimum learning rate.
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
    """DeiT III: LAMB, binary cross-entropy, LayerScale and 3-Augment, for long runs.

    https://arxiv.org/abs/2204.07118 and the authors' commands for ImageNet: S reaches 81.4 %, B 83.8 %, L 84.9 %.
    B and L are trained at 192 pixels, S at 224 (--img-size 224) and H at 160; B, L and H are then fine-tuned for 20
    epochs at 224, with AdamW, a learning rate of 1e-5 and weight decay 0.1. Models smaller than S use its values. Not
    included: repeated augmentation, and the class token without position embedding. The loss is summed over the
    classes, not averaged, to which LAMB is invariant, and the head's bias starts at -log K, not at 0.
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
    """A recipe, with its default model and image sizes."""

    make: Callable[[Facts], TrainConfig]
    model: str | None = None  # default for photographs; None chooses one to fit the images
    photo: int = 128  # image size for photographs; the default trains in minutes
    resize: int | None = None  # image size for weights trained on photographs; None keeps theirs

    @property
    def line(self) -> str:
        """The one-line description."""
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

SMALL_IMAGE = 96  # longest side up to which images keep their size; larger ones count as photographs
MOST_SMALL = 100_000  # images up to which a data set counts as small
_FEWEST_STEPS = 200  # of fine-tuning
_PASS = 128  # default images per forward pass


def _published(
    recipe: str,
    facts: Facts,
    *,
    optim: dict[str, Any],
    augment: AugmentConfig,
    fresh: dict[str, Any] | None = None,  # architecture options when training from scratch
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
    """The published values, adapted by the rules at the top of this file."""
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
    """The largest power of two from 16 to `most` with at least 20 steps per epoch."""
    batch = 16
    while batch < most and images >= 20 * 2 * batch:
        batch *= 2
    return batch


def _augment(config: ModelConfig) -> AugmentConfig:
    """Small shifts, except for tiny images, and flips of colour images."""
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
