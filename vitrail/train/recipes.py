"""Recipes: functions from the data and the model to a complete configuration.

`vitrail recipes` prints the first line of each docstring. On data of another size than the published one, recipes
follow the rules in `recipe_rules`.

Differences from the sources that all published recipes share:

- RandAugment has the identity among its 14 operations, as in its paper, but no invert, cutout or solarize-add. It
  always applies its operations (timm: with probability 0.5), in both directions, and without noise in the magnitude,
  which ends at 10. Posterize keeps at least 4 bits; at magnitude 9, DeiT's `inc1` keeps 1.
- Mixup and CutMix draw a share for every image; timm and big_vision draw one for the whole batch.
- Erased rectangles are filled with the mean colour, not with noise.
- Images are resized with antialiased bicubic filters, as in DeiT. big_vision resizes crops bilinearly without
  antialiasing, and evaluation images by area.
- Weights are initialised as in the ViT paper's JAX code, with a zero head; DeiT and DeiT III draw all of them from a
  truncated normal distribution of standard deviation 0.02.
- "Adam with decoupled weight decay" is AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vitrail.config import AugmentConfig, OptimConfig, TrainConfig, TransferConfig
from vitrail.tasks import METHODS
from vitrail.train.pretrain_recipes import dino, mae, pretrain_small
from vitrail.train.recipe_rules import (
    OFTEN,
    RecipeInputs,
    arch_config,
    batch_size,
    hflip,
    input_config,
    light_augment,
    photo,
    published,
    run_config,
)


def small(inputs: RecipeInputs) -> TrainConfig:
    """From scratch on small data: the default up to 100,000 images.

    `vitrail train fashion-mnist --time-budget 3m`: 90.23 % on the 10,000 test images, on two CPU cores; 92.03 % with
    10m. docs/recipes.md says how it was chosen.
    """
    epochs = inputs.epochs or min(max(round(600_000 / inputs.images), 10), 60)
    often = epochs >= OFTEN  # long enough to overfit without regularisation
    augment, batch = light_augment(inputs.config, epochs), batch_size(inputs.images)
    if photo(inputs.config):
        augment = replace(augment, shift=0, crop_scale=0.35)
    else:  # a pass over fewer than 64 small images takes less time than Muon: see docs/recipes.md
        batch = max(batch, batch_size(inputs.images, most=64, steps=8))
    if often:
        augment = replace(augment, mixup=0.8, cutmix=1.0) if photo(inputs.config) else replace(augment, mixup=0.2)
    return TrainConfig(
        data=inputs.source,
        recipe="small",
        model=inputs.model,
        weights=inputs.weights,
        input=input_config(inputs.config),
        arch=replace(arch_config(inputs.config), drop_path=0.1 if often else 0.0),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=batch,
            opt="muon",
            lr=2e-3 if often else 4e-3,
            weight_decay=0.05,
            sched="linear",
            warmup_epochs=round(0.1 * epochs, 2),
        ),
        augment=augment,
        run=run_config(inputs),
    )


def finetune(inputs: RecipeInputs) -> TrainConfig:
    """Fine-tuning with AdamW and layer-wise learning rates; the default with --weights.

    The fine-tuning of BEiT (https://arxiv.org/abs/2106.08254) and MAE (https://arxiv.org/abs/2111.06377): AdamW, weight
    decay 0.05, cosine schedule, layer-wise decay, label smoothing 0.1. They decay by 0.65 to 0.75 per layer, for
    self-supervised weights, and use mixup; the milder 0.85 here, with a tenth of the head's learning rate for the
    backbone, suits supervised weights and data too small for mixup. Weights of `vitrail pretrain` get a decay of 0.75
    and the full learning rate. After minutes of pre-training all layers still have much to learn: a model narrower than
    a ViT-Ti has the full learning rate in all of them, or, with weights of `vitrail pretrain`, is trained as by `small`
    (docs/transfer.md, docs/pretrain.md). If only the head or LoRA adapters are trained, the learning rate is three
    times as high, as no pre-trained weights can be damaged. At least 200 steps: with 20 images, 50 were too few
    (docs/transfer.md). Up to 100,000 images, a new classification head starts as a linear probe, so that it does not
    distort the features while it learns (https://arxiv.org/abs/2202.10054).
    """
    batch = batch_size(inputs.images)
    few = math.ceil(_FEWEST_STEPS / max(inputs.images // batch, 1))  # epochs for the minimum number of steps
    epochs = inputs.epochs or max(min(max(round(200_000 / inputs.images), 5), 50), few)
    transfer = TransferConfig(head_init="probe" if inputs.weights and inputs.images <= MOST_SMALL else "zero")
    tiny = inputs.config.features < _TINY
    if inputs.unlabelled and tiny and not inputs.only_new:
        config = small(replace(inputs, epochs=epochs))
        return replace(config, recipe="finetune", transfer=transfer, optim=replace(config.optim, body_lr=1.0))
    return TrainConfig(
        data=inputs.source,
        recipe="finetune",
        model=inputs.model,
        weights=inputs.weights,
        input=input_config(inputs.config),
        arch=arch_config(inputs.config),
        transfer=transfer,
        optim=OptimConfig(
            epochs=epochs,
            batch_size=batch,
            opt="adamw",
            lr=3e-3 if inputs.only_new else 1e-3,
            weight_decay=0.05,
            sched="cosine",
            warmup_epochs=round(0.1 * epochs, 2),
            layer_decay=1.0 if tiny else 0.75 if inputs.unlabelled else 0.85,
            body_lr=1.0 if tiny or inputs.unlabelled else 0.1,
        ),
        augment=light_augment(inputs.config, epochs),
        run=run_config(inputs),
    )


def paper_pretrain(inputs: RecipeInputs) -> TrainConfig:
    """The ViT paper's pre-training: Adam, long warm-up, strong weight decay, crops as the only augmentation.

    https://arxiv.org/abs/2010.11929, Table 3: the row for ImageNet up to 3 million images, ImageNet-21k up to 30
    million, JFT above; of "7/14" and "30/90" epochs the longer. The paper reports 77.91 % on ImageNet for ViT-B/16
    after fine-tuning at 384 pixels (Table 5).
    """
    c = inputs.config
    optim: dict[str, Any] = {"opt": "adamw", "batch": 4096, "scaling": "sqrt", "warmup_steps": 10_000}
    if inputs.images < 3_000_000:
        optim |= {"epochs": 300, "lr": 3e-3, "weight_decay": 0.3, "sched": "cosine", "clip_grad": 1.0}
    elif inputs.images < 30_000_000:
        optim |= {"epochs": 90, "lr": 1e-3, "weight_decay": 0.03, "sched": "linear", "clip_grad": 0.0}
    else:
        large = 4e-4 if c.step < 32 else 6e-4
        lr = 8e-4 if c.width < 1024 else large if c.width < 1280 else 3e-4
        epochs = 7 if c.width < 1024 or lr == 6e-4 else 14
        optim |= {"epochs": epochs, "lr": lr, "weight_decay": 0.1, "sched": "linear", "clip_grad": 0.0}
    return published(
        "paper-pretrain",
        inputs,
        fresh={"head": "tanh"},
        drop=0.1 if inputs.images < 30_000_000 else 0.0,
        optim=optim,
        augment=AugmentConfig(crop_scale=0.05, hflip=hflip(c)),
    )


def paper_finetune(inputs: RecipeInputs) -> TrainConfig:
    """The ViT paper's fine-tuning: SGD with momentum at 384 pixels, no weight decay; for --weights.

    https://arxiv.org/abs/2010.11929, Table 4: 500 steps at batch size 512 below 10,000 images (Pets, Flowers), 10,000
    steps below 100,000 (CIFAR), 20,000 above (ImageNet), converted to epochs. The paper selects one of four learning
    rates on held-out images, 0.003 to 0.06 for ImageNet and 0.001 to 0.03 elsewhere; this uses 0.03 and 0.01, the
    defaults of the authors' code for ImageNet and for ViT-B/16 on CIFAR-10: try others with --lr. The warm-up is also
    the code's: 500 steps, or 100 of 500. Weights for small images keep their image size. Weight averaging ("Polyak &
    Juditsky averaging with a factor of 0.9999") is used in the paper for its largest models on ImageNet; here it is
    always on, because it warms up with the run (--model-ema 0 turns it off).
    """
    many = inputs.images >= 100_000
    steps = 500 if inputs.images < 10_000 else 20_000 if many else 10_000
    return published(
        "paper-finetune",
        inputs,
        crop=1.0,
        optim={
            "opt": "sgd",
            "batch": 512,
            "scaling": "linear",
            "epochs": math.ceil(steps * 512 / inputs.images),
            "lr": 0.03 if many else 0.01,
            "weight_decay": 0.0,
            "sched": "cosine",
            "warmup_steps": 100 if steps == 500 else 500,
            "clip_grad": 1.0,
            "model_ema": 0.9999,
        },
        augment=AugmentConfig(crop_scale=0.05, hflip=hflip(inputs.config)),
    )


# Mixup and RandAugment settings. The paper's magnitudes 15 and 20 exceed the maximum of 10 here.
_AUGREG = {
    "none": {},
    "light1": {"randaug": 2, "magnitude": 0.0},
    "light2": {"randaug": 2, "magnitude": 10.0, "mixup": 0.2},
    "medium1": {"randaug": 2, "magnitude": 10.0, "mixup": 0.2},
    "medium2": {"randaug": 2, "magnitude": 10.0, "mixup": 0.5},
}


def augreg(inputs: RecipeInputs) -> TrainConfig:
    """How to train your ViT (AugReg): Adam, with augmentation by model and data size.

    https://arxiv.org/abs/2106.10270 and the authors' configurations for ImageNet and, above 5 million images, for
    ImageNet-21k (vit_i1k.py and vit_i21k.py of big_vision): binary cross-entropy per class, and augmentation from
    "none" to "medium2" by model size, with RandAugment's magnitude limited to 10 instead of 15. For ImageNet the head
    reads the class token through a hidden layer, for ImageNet-21k the average of the patches without one. Their weight
    decay of 1e-4, not multiplied by the learning rate of 1e-3, corresponds to 0.1 in AdamW.
    """
    c = inputs.config
    many = inputs.images >= 5_000_000
    if not many:
        level = "light1" if c.width < 384 else "medium1" if c.width < 768 and c.step >= 32 else "medium2"
    elif c.width < 768:
        level = "light1" if c.width >= 384 and c.step < 32 else "none"
    else:
        level = "light2" if c.width < 1024 else "medium2"
    return published(
        "augreg",
        inputs,
        fresh={"pool": "gap", "head": "linear"} if many else {"head": "tanh"},
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
        augment=replace(AugmentConfig(crop_scale=0.05, hflip=hflip(c)), **_AUGREG[level]),  # type: ignore[arg-type]
    )


def beyer(inputs: RecipeInputs) -> TrainConfig:
    """Better plain ViT baselines: a simple, strong ImageNet baseline; average pooling, sin-cos positions.

    https://arxiv.org/abs/2205.01580 and the authors' vit_s16_i1k.py (big_vision): ViT-S/16 reaches 76.5 % on
    ImageNet in 90 epochs and 80.0 % in 300 (--epochs 300). Weight decay as in `augreg`.
    """
    return published(
        "beyer",
        inputs,
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
        augment=AugmentConfig(crop_scale=0.05, hflip=hflip(inputs.config), randaug=2, magnitude=10.0, mixup=0.2),
    )


def deit(inputs: RecipeInputs) -> TrainConfig:
    """DeiT: AdamW and strong augmentation, to train on ImageNet alone.

    https://arxiv.org/abs/2012.12877 and the defaults of the authors' main.py: without distillation Ti reaches
    72.2 %, S 79.9 %, B 81.8 % on ImageNet; with a distillation token and --teacher, in the paper a RegNetY-16GF, Ti
    74.5 %, S 81.2 %, B 83.4 %. Not included: the ten cool-down epochs at the minimum learning rate.
    """
    return published(
        "deit",
        inputs,
        drop_path=0.1,
        normalize="imagenet",
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
            hflip=hflip(inputs.config),
            randaug=2,
            magnitude=9.0,
            reprob=0.25,
            aug_repeats=3,
            mixup=0.8,
            cutmix=1.0,
            smoothing=0.1,
        ),
    )


def deit3(inputs: RecipeInputs) -> TrainConfig:
    """DeiT III: LAMB, binary cross-entropy, LayerScale and 3-Augment, for long runs.

    https://arxiv.org/abs/2204.07118 and the authors' commands for ImageNet: S reaches 81.4 %, B 83.8 %, L 84.9 %.
    B and L are trained at 192 pixels, S at 224 (--img-size 224) and H at 160; B, L and H are then fine-tuned for 20
    epochs at 224, with AdamW, a learning rate of 1e-5 and weight decay 0.1. Models smaller than S use its values. Not
    included: the class token without position embedding (--pos patches). The loss is summed over the K classes, not
    averaged, to which LAMB is invariant; so gradients are clipped at K where the authors' LAMB clips at 1, by its
    default. The head's bias starts at -log K, not at 0.
    """
    width, classes = inputs.config.width, inputs.config.classes
    lr = 4e-3 if width < 768 else 3e-3
    return published(
        "deit3",
        inputs,
        fresh={"layer_scale": 1e-4},
        drop_path=0.05 if width < 768 else 0.2 if width < 1024 else 0.45 if width < 1280 else 0.6,
        crop=1.0,
        normalize="imagenet",
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
            "clip_grad": float(max(classes, 1)),
        },
        augment=AugmentConfig(
            crop_scale=0.08,
            hflip=hflip(inputs.config),
            three_augment=1.0,
            color_jitter=0.3,
            aug_repeats=3,
            mixup=0.8,
            cutmix=1.0,
        ),
    )


@dataclass(frozen=True)
class Recipe:
    """A recipe, with its default model and image sizes."""

    make: Callable[[RecipeInputs], TrainConfig]
    model: str | None = None  # default for photographs; None chooses one to fit the images
    photo: int = 128  # image size for photographs; the default trains in minutes
    resize: int | None = None  # image size for weights trained on photographs; None keeps theirs
    methods: tuple[str, ...] = ()  # of self-supervised pre-training that it is for; none for supervised training

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
    "pretrain-small": Recipe(pretrain_small, methods=METHODS),
    "mae": Recipe(mae, "vit_b16", 224, methods=("mae",)),
    "dino": Recipe(dino, "vit_s16", 224, methods=("dino",)),
}

DEFAULT_METHOD = "mae"  # of self-supervised pre-training: docs/pretrain.md
MOST_SMALL = 100_000  # images up to which a data set counts as small
_FEWEST_STEPS = 200  # of fine-tuning
_TINY = 192  # features of a ViT-Ti


def method_of(recipe: str | None) -> str:
    """The self-supervised method of a recipe that is for one only, else the default."""
    methods = RECIPES[recipe].methods if recipe in RECIPES else ()
    return methods[0] if len(methods) == 1 else DEFAULT_METHOD
