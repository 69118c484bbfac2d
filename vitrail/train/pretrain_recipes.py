"""Recipes of self-supervised pre-training: the default for small data, and the published ones of MAE and DINO."""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, OptimConfig, PretrainConfig, TrainConfig
from vitrail.tasks import task_type
from vitrail.tasks.pretraining import Pretraining
from vitrail.train.recipe_rules import (
    OFTEN,
    RecipeInputs,
    arch_config,
    batch_size,
    hflip,
    input_config,
    photo,
    published,
    run_config,
    shift,
)


def pretrain_small(inputs: RecipeInputs) -> TrainConfig:
    """Self-supervised pre-training on small data, with any method: the default of `vitrail pretrain`.

    Small decoders and heads, as small data and models need them: DINO's published head is larger than a ViT-S.
    """
    c, method = inputs.config, task_type(inputs.method)
    assert issubclass(method, Pretraining)
    epochs = inputs.epochs or min(max(round(3_000_000 / inputs.images), 20), 400)
    crops = method.crops
    augment = AugmentConfig(
        hflip=hflip(c),
        shift=0 if crops or photo(c) else shift(c, epochs),
        crop_scale=0.2 if photo(c) and not crops else 1.0,
        color_jitter=0.4 if crops else 0.0,
        three_augment=0.5 if crops and c.channels == 3 else 0.0,
    )
    return TrainConfig(
        data=inputs.source,
        recipe="pretrain-small",
        model=inputs.model,
        weights=inputs.weights,
        input=input_config(c),
        arch=arch_config(c),
        pretraining=PretrainConfig(**method.small(c)),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=batch_size(inputs.images),
            opt="adamw" if crops else "muon",
            lr=1e-3 if crops else 2e-3 if epochs >= OFTEN else 4e-3,
            weight_decay=0.05,
            sched="cosine",
            warmup_epochs=round(0.1 * epochs, 2),
            body_lr=1.0,
            clip_grad=3.0 if crops else 1.0,
        ),
        augment=augment,
        run=run_config(inputs),
    )


def mae(inputs: RecipeInputs) -> TrainConfig:
    """MAE: masked autoencoders, to pre-train on a million images; for --method mae.

    https://arxiv.org/abs/2111.06377 and the authors' code: 75 % of the patches masked, a decoder of width 512 and depth
    8, random crops and flips only, AdamW with a learning rate of 1.5e-4 for 256 images, 800 epochs. ViT-B reaches
    83.6 % on ImageNet after fine-tuning. Differences: beta2 is 0.999 instead of 0.95, and the
    encoder's fixed positions have the frequencies of big_vision.
    """
    config = published(
        "mae",
        inputs,
        fresh={"pos": "sincos2d"},
        optim={
            "opt": "adamw",
            "batch": 4096,
            "scaling": "linear",
            "epochs": 800,
            "lr": 2.4e-3,  # 1.5e-4 for 256 images
            "weight_decay": 0.05,
            "sched": "cosine",
            "warmup_epochs": 40.0,
            "clip_grad": 0.0,
        },
        augment=AugmentConfig(crop_scale=0.2, hflip=hflip(inputs.config)),
    )
    return replace(config, pretraining=PretrainConfig(mask_ratio=0.75, decoder_width=512, decoder_depth=8))


def dino(inputs: RecipeInputs) -> TrainConfig:
    """DINO: self-distillation over crops, to pre-train on a million images; for --method dino.

    https://arxiv.org/abs/2104.14294 and the defaults of the authors' code: two crops of 40 to 100 % of the area at full
    size and eight of 5 to 40 % at 96 pixels, 65,536 prototypes, teacher momentum 0.996, AdamW with a learning rate of
    5e-4 for 256 images, 100 epochs: ViT-S/16 reaches 73.3 % on ImageNet by a linear probe. Differences: weight decay is
    0.04 throughout instead of growing to 0.4; the teacher's temperature is 0.04 throughout; colour jitter has no hue,
    and greyscale, blur and solarisation are those of 3-Augment, one of them for half of the crops.
    """
    from vitrail.tasks.multicrop import local_size  # imports torch

    config = published(
        "dino",
        inputs,
        optim={
            "opt": "adamw",
            "batch": 1024,
            "scaling": "linear",
            "epochs": 100,
            "lr": 2e-3,  # 5e-4 for 256 images
            "weight_decay": 0.04,
            "sched": "cosine",
            "warmup_epochs": 10.0,
            "min_lr": 5e-4,
            "clip_grad": 3.0,
        },
        augment=AugmentConfig(hflip=hflip(inputs.config), color_jitter=0.4, three_augment=0.5),
        drop_path=0.1,
    )
    return replace(
        config,
        pretraining=PretrainConfig(
            global_crops=2,
            local_crops=8,
            global_scale=(0.4, 1.0),
            local_scale=(0.05, 0.4),
            local_size=local_size(inputs.config),
            head_width=2048,
            prototypes=65_536,
            teacher_momentum=0.996,
            teacher_temp=0.04,
        ),
    )
