"""Typed, frozen configuration: the only definition of each option's name, type, default and help text.

The command line, the Python API and the `config.yaml` of a run are all derived from the dataclasses below. A field
without a default must be set by the recipe, so every `TrainConfig` is complete: nothing in it is derived later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.world import Shard

CONFIG_FILE = "config.yaml"  # in a run folder
LARGEST_SIDE = 8192  # pixels of a model's input

Size = tuple[int, int]
Names = tuple[str, ...]
Floats = tuple[float, ...]
Ints = tuple[int, ...]
Pos = Literal[
    "learned",
    "patches",
    "learned2d",
    "relative",
    "sincos2d",
    "none",
    "learned_every",
    "learned_shared",
    "learned2d_every",
    "learned2d_shared",
]
Head = Literal[
    "linear",
    "tanh",
    "mask",
    "setr-naive",
    "setr-pup",
    "setr-mla",
    "mlp",
    "fcos",
    "pyramid",
    "yolos",
    "yolos-mid",
    "detr",
]
Freeze = Literal["all", "image"] | int  # all but the head; the image tower; or the embeddings and the first N blocks
TokenizerName = Literal["bytes", "bpe", "clip"]  # of captions


class Duration(float):
    """A time in seconds, written as 90s, 10m or 1h30m."""

    def __str__(self) -> str:
        hours, seconds = divmod(round(self), 3600)
        minutes, seconds = divmod(seconds, 60)
        parts = [(hours, "h"), (minutes, "m"), (seconds, "s")]
        return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


Verb = Literal["", "train", "pretrain", "python"]


def option(help: str, default: Any = dataclasses.MISSING, alias: str = "", only: Verb = "", bare: bool = False) -> Any:
    """A field with its help text, an alias of its flag, and the only verb that has it, if there is one.

    The flag of a `bare` option may be given without a value, which means its default.
    """
    return field(default=default, metadata={"help": help, "alias": alias, "only": only, "bare": bare})


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """How the data set is read, split and weighted."""

    val: str | None = option("data set to validate on, if it is not part of the data", None)
    val_fraction: float = option(
        "share of images held out for validation, if the data has no val split (default: 0.2; pretrain: 0.05)", 0.2
    )
    folds: int = option("number of cross-validation folds (0 = off)", 0, only="train")
    fold: int = option("train only this fold, from 1 (0 = all folds in turn)", 0, only="train")
    data_dir: str | None = option("folder of the built-in data sets (default: $VITRAIL_DATA, then common places)", None)
    image_dir: str | None = option("folder of a table's images (default: that of the table)", None)
    image_column: str | None = option("column of a table or hf: data set with the images (default: detected)", None)
    label_column: Names | None = option(
        "column with the labels, or several: x,y (default: detected)", None, only="train"
    )
    mask_values: Names | None = option(
        "class of each value of the masks: 0=ground,255=nucleus; * for all others, ignore for none", None, only="train"
    )
    task: str | None = option(
        "multiclass, multilabel, regression, masks, boxes or pairs (default: detected)", None, only="train"
    )
    streaming: bool = option("stream an hf: data set or Parquet files instead of storing them", False)
    class_weights: bool = option("weight each class in the loss by its inverse frequency", False, only="train")
    balanced_sampling: bool = option("sample all classes equally often", False, only="train")
    max_pixels: int | None = option("pixels of the largest image to read (default: 178956970)", None)
    workers: int = option("threads that read images", 2, alias="-j")
    cache_gb: float = option("disk space for decoded images, or for remote tar shards, in GiB (0 = off)", 10.0)


@dataclass(frozen=True, kw_only=True)
class CaptionConfig:
    """How captions are read, of images with captions."""

    tokenizer: TokenizerName | None = option(
        "tokens of captions: bytes, bpe = learnt from the captions, clip = CLIP's (default: bytes)", None, only="train"
    )
    context: int | None = option(
        "tokens of a caption at most, longer ones are cut (default: 96 bytes, 64 of bpe, 77 of clip)",
        None,
        only="train",
    )


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """The input of the model."""

    img_size: Size = option("image height and width: 224 or 192x256", alias="--imgsz")
    channels: int = option("image channels: 1, 3, 4 (with alpha) or the number of bands (default: as the data)")
    bits: int = option("bits per pixel value: 8, 16, or 32 for floats (default: as the data)", 8)
    normalize: Literal["half", "imagenet", "dataset", "weights"] = option(
        "mean and std: 0.5, ImageNet's, measured, as --weights (default: weights, else half; above 8 bits dataset)",
        "half",
    )
    mean: Floats = option("mean per channel, or one for all, instead of --normalize", (0.5,))
    std: Floats = option("standard deviation per channel, or one for all, instead of --normalize", (0.5,))
    crop: float = option("share of the image kept by the centre crop at evaluation", 1.0)
    interpolation: Literal["bicubic", "bilinear", "lanczos"] = option(
        "resampling filter for images (default: bicubic, or that of --weights)", "bicubic"
    )
    fit: Literal["crop", "pad"] = option(
        "crop the centre of images of another shape, or pad to keep all of it (default: crop; for masks and boxes pad)",
        "crop",
    )


@dataclass(frozen=True, kw_only=True)
class ArchConfig:
    """Changes to the architecture of the named model."""

    # A field is None if the model's family does not have the option.
    pool: Literal["cls", "cls_dist", "cls_gap", "gap", "gap_norm", "mae", "map"] | None = option(
        "pooling: cls = class token, cls_dist = with a distillation token, cls_gap = class token and average, "
        "gap = average after the final norm, gap_norm = before it, mae = gap_norm with a class token, map = attention"
    )
    pos: Pos | None = option(
        "position embeddings; patches = learned, but none for the class token; every = also before every block, "
        "shared = the same before every block"
    )
    head: Head | None = option(
        "one linear layer, or with a hidden tanh layer as in pre-training; for masks and boxes a dense head",
        only="train",
    )
    stem: Literal["patch", "conv", "clip"] | None = option(
        "patch projection, overlapping convolutions, or CLIP's: no bias, and a LayerNorm after it"
    )
    attention: str | None = option(
        "attention pattern: global, window:SIZE, window:SIZE,shift (every second block shifted), axial, "
        "neighbourhood:SIZE or strided; with ,global:N after it, N blocks are global",
        None,
    )
    registers: int | None = option("number of register tokens")
    layer_scale: float | None = option("initial value of LayerScale (0 = off)")
    drop: float = option("dropout rate")
    drop_path: float = option("stochastic-depth rate of the last block; grows linearly from 0")


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """How pre-trained weights are fine-tuned (with --weights)."""

    freeze: Freeze | None = option(
        "freeze the embeddings and the first N blocks, all but the head, or the image tower (captions)",
        None,
        only="train",
    )
    lora_rank: int = option("train only the head and LoRA adapters of this rank (0 = off)", 0, only="train")
    lora_alpha: float = option(
        "LoRA scale alpha; adapters are scaled by alpha / rank (default: twice the rank)", 0.0, only="train"
    )
    pos_resample: Literal[
        "bicubic", "bicubic_plain", "bicubic_offset", "bicubic_aligned", "bilinear", "bilinear_plain", "linear"
    ] = option(
        "resampling of position embeddings at another image size (default: as the source of --weights)", "bicubic"
    )
    partial: bool = option("load the weights that fit, initialise the rest, and list both", False)
    head_init: Literal["zero", "probe"] = option(
        "a new classification head starts at zero, or as a linear probe of the features", "zero", only="train"
    )


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """How a model learns from a teacher (with --teacher)."""

    teacher: str | None = option(
        "teacher for distillation: run, weights file, timm:NAME, hf:REPO or .onnx file", None, only="train"
    )
    teacher_model: str | None = option(
        "model name of the teacher, if its weights do not determine it", None, only="train"
    )
    distill: Literal["hard", "soft"] = option(
        "distil the teacher's decisions or its probabilities", "hard", only="train"
    )
    distill_alpha: float = option("weight of the distillation loss; the labels' loss gets the rest", 0.5, only="train")
    distill_tau: float = option("temperature of soft distillation", 1.0, only="train")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """What a self-supervised method masks, crops and predicts; recipes set the options of their method."""

    # A field is None if the method does not have the option.
    mask_ratio: float | None = option("share of patches to mask (masked, mae, simmim)", None, only="pretrain")
    mask_size: int | None = option("side of masked squares, in pixels (simmim)", None, only="pretrain")
    target: Literal["colour", "mini", "pixels"] | None = option(
        "predict mean colours, 4x4 mini-patches of colours, or pixels (masked)", None, only="pretrain"
    )
    decoder_width: int | None = option("width of the decoder (mae)", None, only="pretrain")
    decoder_depth: int | None = option("blocks of the decoder (mae)", None, only="pretrain")
    global_crops: int | None = option("large crops of each image (dino, lejepa)", None, only="pretrain")
    local_crops: int | None = option("small crops of each image (dino, lejepa)", None, only="pretrain")
    global_scale: Floats | None = option("area shares of large crops: smallest, largest", None, only="pretrain")
    local_scale: Floats | None = option("area shares of small crops: smallest, largest", None, only="pretrain")
    local_size: int | None = option("pixels per side of small crops", None, only="pretrain")
    head_width: int | None = option("hidden units of the head or projector (dino, lejepa)", None, only="pretrain")
    prototypes: int | None = option("outputs of the head (dino)", None, only="pretrain")
    teacher_momentum: float | None = option("initial momentum of the teacher, grows to 1 (dino)", None, only="pretrain")
    teacher_temp: float | None = option("temperature of the teacher (dino)", None, only="pretrain")
    projection: int | None = option("outputs of the projector (lejepa)", None, only="pretrain")
    sigreg: float | None = option("weight of SIGReg in the loss (lejepa)", None, only="pretrain")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser, loss and learning-rate schedule; recipes may set other defaults."""

    epochs: float = option("passes over the training images; may be fractional")
    time_budget: Duration | None = option("train for this long instead of --epochs: 10m or 1h30m", None)
    batch_size: int = option("images per optimiser step, of all processes together", alias="-b")
    grad_accum: int = option("equal forward passes that a batch is split into, to save memory", 1)
    opt: Literal["adamw", "sgd", "muon", "lamb"] = option("optimiser; muon uses AdamW for all but weight matrices")
    loss: Literal["ce", "bce", "dice", "focal", "sigmoid", "softmax"] = option(
        "cross-entropy, or binary cross-entropy per class; of masks also with Dice added, or focal; of captions "
        "SigLIP's sigmoid or CLIP's softmax (default: ce; of captions sigmoid)",
        "ce",
        only="train",
    )
    lr: float = option("peak learning rate; not scaled by the batch size")
    weight_decay: float = option("weight decay; not of norms, biases, tokens and position embeddings", alias="--wd")
    sched: Literal["cosine", "linear", "constant"] = option("learning-rate schedule; constant ends with --cooldown")
    warmup_epochs: float = option("epochs of linear warm-up")
    min_lr: float = option("final learning rate, as a share of the peak", 0.0)
    cooldown: float = option("share of training in which the constant schedule decays", 0.2)
    clip_grad: float = option("maximum gradient norm (0 = no clipping)", 1.0)
    layer_decay: float = option("layer-wise learning-rate decay, per stage from the head down", 1.0)
    body_lr: float = option("learning-rate factor of all but the head, with --weights (default: 0.1; pretrain: 1)", 0.1)
    model_ema: float = option("decay of the weights' moving average, which is evaluated and saved (0 = off)", 0.0)

    @property
    def pass_size(self) -> int:
        """Images per forward pass, of all processes together."""
        return self.batch_size // max(self.grad_accum, 1)


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Which epoch is kept, and when training stops."""

    best: Literal["top1", "f1", "balanced", "map", "r2", "miou", "dice", "loss"] | None = option(
        "score by which an epoch is kept; f1 = macro F1, balanced = balanced accuracy (default: top1, map, r2 or miou)",
        None,
        only="train",
    )
    patience: int = option("stop after this many epochs without a better score (0 = off)", 0, only="train")
    restarts: Floats | None = option(
        "epochs after which the learning rate warms up and decays anew; --resume RUN --epochs N adds one", None
    )


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images; recipes may set other defaults."""

    crop_scale: float = option("minimum area share of random resized crops (1 = off)", 1.0)
    shift: int = option("maximum random shift, in pixels", 0)
    hflip: float = option("probability of a horizontal flip", 0.0)
    randaug: int = option("RandAugment operations per image", 0)
    magnitude: float = option("RandAugment magnitude, 0 to 10", 9.0)
    three_augment: float = option("probability of 3-Augment: greyscale, solarize or blur", 0.0)
    color_jitter: float = option("strength of brightness, contrast and saturation jitter", 0.0)
    reprob: float = option("probability of random erasing", 0.0)
    aug_repeats: int = option(
        "copies of each image in a batch, augmented independently; an epoch then has fewer images (1 = off)",
        1,
        alias="--repeated-aug",
    )
    mixup: float = option("mixup alpha (0 = off)", 0.0, only="train")
    cutmix: float = option("CutMix alpha (0 = off)", 0.0, only="train")
    mix_prob: float = option("probability of mixup or CutMix per batch", 1.0, only="train")
    smoothing: float = option("label smoothing", 0.0, only="train")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where and how a run is carried out."""

    name: str = option("name of the run folder (default: <data>-<model>, and the method of pretrain)")
    out: str = option("parent folder of runs", "runs", alias="--output")
    seed: int = option("random seed", 0)
    device: str = option("cpu, cuda, cuda:1 or mps (default: the fastest available)")
    amp: Literal["off", "bf16", "fp16"] = option(
        "automatic mixed precision (default: the best for the device)", bare=True
    )
    compile: bool = option("compile the model with torch.compile", False)
    shard: Shard = option(
        "under torchrun, shard weights, gradients and optimiser over all processes, or over those of each machine",
        "off",
    )
    grad_checkpointing: bool = option("recompute activations in the backward pass to save memory", False)
    log: Names | None = option("also log to wandb or mlflow; metrics.csv and TensorBoard are always written", None)
    save_minutes: float = option("minutes between checkpoints within an epoch", 5.0)
    probe: str | None = option("labelled data set to measure k-NN accuracy on while training", None, only="pretrain")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run."""

    data: str = option("folder, .npz or .npy file, CSV/TSV/Parquet table, tar shards, hf:NAME or built-in data set")
    recipe: str = option(
        "recipe of unset options, see `vitrail recipes` (default: small, beyer above 100,000 images, finetune with "
        "--weights, pretrain-small for pre-training)"
    )
    model: str = option("model or family, see `vitrail models`")
    weights: str | None = option("pre-trained weights: run, weights file, timm:NAME or hf:REPO", None)
    source: SourceConfig = field(default_factory=SourceConfig)
    captions: CaptionConfig = field(default_factory=CaptionConfig)
    input: InputConfig
    arch: ArchConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    distillation: DistillConfig = field(default_factory=DistillConfig)
    pretraining: PretrainConfig = field(default_factory=PretrainConfig)
    optim: OptimConfig
    stop: StopConfig = field(default_factory=StopConfig)
    augment: AugmentConfig
    run: RunConfig
    python: Names | None = option("what was given as Python objects", None, only="python")
