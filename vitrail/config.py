"""Typed, frozen configuration: the only definition of each option's name, type, default and help text.

The command line, the Python API and the `config.yaml` of a run are all derived from the dataclasses below. A field
without a default must be set by the recipe, so every `TrainConfig` is complete: nothing in it is derived later.
"""

from __future__ import annotations

import dataclasses
import re
import types
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from vitrail.errors import UserError, nearest

CONFIG_FILE = "config.yaml"  # in a run folder

Size = tuple[int, int]
Names = tuple[str, ...]
Floats = tuple[float, ...]
Ints = tuple[int, ...]
Freeze = Literal["all"] | int  # all but the head, or the embeddings and the first N blocks


class Duration(float):
    """A time in seconds, written as 90s, 10m or 1h30m."""

    def __str__(self) -> str:
        hours, seconds = divmod(round(self), 3600)
        minutes, seconds = divmod(seconds, 60)
        parts = [(hours, "h"), (minutes, "m"), (seconds, "s")]
        return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def option(help: str, default: Any = dataclasses.MISSING, alias: str = "") -> Any:
    """A field with its help text and an alias of its flag."""
    return field(default=default, metadata={"help": help, "alias": alias})


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """How the data set is read, split and weighted."""

    val_fraction: float = option("share of images held out for validation, if the data has no val split", 0.2)
    folds: int = option("number of cross-validation folds (0 = off)", 0)
    fold: int = option("train only this fold, from 1 (0 = all folds in turn)", 0)
    data_dir: str | None = option("folder of the built-in data sets (default: $VITRAIL_DATA, then common places)", None)
    image_column: str | None = option("column of a table or hf: data set with the images (default: detected)", None)
    label_column: Names | None = option("column with the labels, or several: x,y (default: detected)", None)
    task: str | None = option("multiclass, multilabel or regression (default: detected)", None)
    streaming: bool = option("stream an hf: data set or Parquet files instead of storing them", False)
    class_weights: bool = option("weight each class in the loss by its inverse frequency", False)
    balanced_sampling: bool = option("sample all classes equally often", False)
    workers: int = option("threads that read images", 2, alias="-j")
    cache_gb: float = option("disk space for the cache of decoded images, in GiB (0 = off)", 10.0)


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


@dataclass(frozen=True, kw_only=True)
class ArchConfig:
    """Changes to the architecture of the named model."""

    # A field is None if the model's family does not have the option.
    pool: Literal["cls", "cls_dist", "cls_gap", "gap", "gap_norm", "mae", "map"] | None = option(
        "pooling: cls = class token, cls_dist = with a distillation token, cls_gap = class token and average, "
        "gap = average after the final norm, gap_norm = before it, mae = gap_norm with a class token, map = attention"
    )
    pos: Literal["learned", "patches", "learned2d", "relative", "sincos2d", "none"] | None = option(
        "position embeddings; patches = learned, but none for the class token"
    )
    head: Literal["linear", "tanh"] | None = option("one linear layer, or with a hidden tanh layer as in pre-training")
    stem: Literal["patch", "conv"] | None = option("patch projection, or overlapping convolutions")
    registers: int | None = option("number of register tokens")
    layer_scale: float | None = option("initial value of LayerScale (0 = off)")
    drop: float = option("dropout rate")
    drop_path: float = option("stochastic-depth rate of the last block; grows linearly from 0")


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """How pre-trained weights are fine-tuned (with --weights)."""

    freeze: Freeze | None = option("freeze the embeddings and the first N blocks, or all but the head", None)
    lora_rank: int = option("train only the head and LoRA adapters of this rank (0 = off)", 0)
    lora_alpha: float = option("LoRA scale alpha; adapters are scaled by alpha / rank (default: twice the rank)", 0.0)
    pos_resample: Literal["bicubic", "bilinear", "linear"] = option(
        "resampling of position embeddings at another image size; linear as in the paper", "bicubic"
    )
    partial: bool = option("load the weights that fit, initialise the rest, and list both", False)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """How a model learns from a teacher (with --teacher)."""

    teacher: str | None = option("teacher for distillation: run, weights file, timm:NAME, hf:REPO or .onnx file", None)
    teacher_model: str | None = option("model name of the teacher, if its weights do not determine it", None)
    distill: Literal["hard", "soft"] = option("distil the teacher's decisions or its probabilities", "hard")
    distill_alpha: float = option("weight of the distillation loss; the labels' loss gets the rest", 0.5)
    distill_tau: float = option("temperature of soft distillation", 1.0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser, loss and learning-rate schedule; recipes may set other defaults."""

    epochs: float = option("passes over the training images; may be fractional")
    time_budget: Duration | None = option("train for this long instead of --epochs: 10m or 1h30m", None)
    batch_size: int = option("images per forward pass", alias="-b")
    grad_accum_steps: int = option("forward passes per optimiser step", 1)
    opt: Literal["adamw", "sgd", "muon", "lamb"] = option("optimiser; muon uses AdamW for all but weight matrices")
    loss: Literal["ce", "bce"] = option("cross-entropy, or binary cross-entropy per class", "ce")
    lr: float = option("peak learning rate; not scaled by the batch size")
    weight_decay: float = option("weight decay; not of norms, biases, tokens and position embeddings", alias="--wd")
    sched: Literal["cosine", "linear", "constant"] = option("learning-rate schedule; constant ends with --cooldown")
    warmup_epochs: float = option("epochs of linear warm-up")
    min_lr: float = option("final learning rate, as a share of the peak", 0.0)
    cooldown: float = option("share of training in which the constant schedule decays", 0.2)
    clip_grad: float = option("maximum gradient norm (0 = no clipping)", 1.0)
    layer_decay: float = option("layer-wise learning-rate decay, per stage from the head down", 1.0)
    body_lr: float = option("learning-rate factor of all but the head, with --weights", 0.1)
    model_ema: float = option("decay of the weights' moving average, which is evaluated and saved (0 = off)", 0.0)


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
    mixup: float = option("mixup alpha (0 = off)", 0.0)
    cutmix: float = option("CutMix alpha (0 = off)", 0.0)
    mix_prob: float = option("probability of mixup or CutMix per batch", 1.0)
    smoothing: float = option("label smoothing", 0.0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where and how a run is carried out."""

    name: str = option("name of the run folder (default: <data>-<model>)")
    out: str = option("parent folder of runs", "runs", alias="--output")
    seed: int = option("random seed", 0)
    device: str = option("cpu, cuda, cuda:1 or mps (default: the fastest available)")
    amp: Literal["off", "bf16", "fp16"] = option("automatic mixed precision (default: the best for the device)")
    compile: bool = option("compile the model with torch.compile", False)
    grad_checkpointing: bool = option("recompute activations in the backward pass to save memory", False)
    save_minutes: float = option("minutes between checkpoints within an epoch", 5.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run."""

    data: str = option("folder, .npz or .npy file, CSV/TSV/Parquet table, tar shards, hf:NAME or built-in data set")
    recipe: str = option("recipe of unset options, see `vitrail recipes` (default: small; finetune with --weights)")
    model: str = option("model or family, see `vitrail models`")
    weights: str | None = option("pre-trained weights: run, weights file, timm:NAME or hf:REPO", None)
    source: SourceConfig = field(default_factory=SourceConfig)
    input: InputConfig
    arch: ArchConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    distillation: DistillConfig = field(default_factory=DistillConfig)
    optim: OptimConfig
    augment: AugmentConfig
    run: RunConfig


C = TypeVar("C")


@dataclass(frozen=True)
class Option:
    """One setting of a configuration, with its flat name, whichever group it is in."""

    name: str
    group: str
    type: Any
    default: Any
    help: str
    alias: str


def options(cls: type[Any] = TrainConfig) -> dict[str, Option]:
    """All settings of a configuration class and its groups, by flat name."""
    found: dict[str, Option] = {}
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if is_dataclass(hints[f.name]):
            inner = options(hints[f.name])
            found |= {name: dataclasses.replace(o, group=f.name) for name, o in inner.items()}
        else:
            meta = f.metadata
            found[f.name] = Option(f.name, "", hints[f.name], f.default, meta.get("help", ""), meta.get("alias", ""))
    return found


def coerce(cls: type[Any], name: str, value: object) -> Any:
    """Converts a value to the type of the setting with this flat name; raises UserError with the rule."""
    known = options(cls)
    unknown_setting([name], known)
    return _coerce(name, known[name].type, value)


def override(config: C, changes: dict[str, object]) -> C:
    """A copy of a configuration with settings changed by flat name."""
    known = options(type(config))
    groups: dict[str, dict[str, object]] = {}
    for name, value in changes.items():
        value = coerce(type(config), name, value)
        groups.setdefault(known[name].group, {})[name] = value
    top: dict[str, Any] = groups.pop("", {})
    for group, values in groups.items():
        top[group] = dataclasses.replace(getattr(config, group), **values)
    return dataclasses.replace(config, **top)  # type: ignore[type-var]  # configurations are dataclasses


def unknown_setting(given: Any, known: Any) -> None:
    """Raises UserError for the first name in `given` that is not `known`."""
    for name in given:
        if name not in known:
            raise UserError(f"There is no setting '{name}'.{nearest(name, known)}")


def flat(config: Any) -> dict[str, Any]:
    """All settings of a configuration by flat name."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        found |= flat(value) if is_dataclass(value) else {f.name: value}
    return found


def to_plain(config: Any) -> dict[str, Any]:
    """The inverse of `from_plain`: dictionaries, lists and plain values; sizes are `[height, width]`."""
    return dataclasses.asdict(config, dict_factory=lambda items: {k: _plain(v) for k, v in items})


def to_yaml(config: Any) -> str:
    """A configuration as the text of its `config.yaml`."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def save_yaml(config: Any, path: Path) -> None:
    """Writes a configuration as YAML."""
    path.write_text(to_yaml(config), encoding="utf-8")


def load_yaml(cls: type[C], path: Path) -> C:
    """Reads what `save_yaml` wrote; raises UserError for unknown, missing or ill-typed settings."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        return from_plain(cls, document)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a YAML file: {str(error).splitlines()[0]}.") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def from_plain(cls: type[C], document: object, where: str = "") -> C:
    """A validated configuration from dictionaries, lists and plain values, as in YAML and JSON."""
    if not isinstance(document, dict):
        raise UserError(f"{where or 'The file'} must contain settings, but it contains {document!r}.")
    hints = get_type_hints(cls)
    unknown_setting(document, hints)
    values = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # configurations are dataclasses
        if f.name in document:
            hint, value, group = hints[f.name], document[f.name], is_dataclass(hints[f.name])
            values[f.name] = from_plain(hint, value, f.name) if group else _coerce(f.name, hint, value)
        elif f.default is f.default_factory is dataclasses.MISSING:
            raise UserError(f"The setting '{f.name}' is missing.")
    return cls(**values)


def _plain(value: object) -> object:
    if isinstance(value, Duration):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _coerce(name: str, hint: Any, value: object) -> Any:
    if hint == Freeze | None:
        return None if value is None else _coerce_freeze(name, value)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
        origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        if value in choices:
            return value
        raise UserError(
            f"'{name}' must be one of {', '.join(choices)}, but it is {value!r}.{nearest(str(value), choices)}"
        )
    if hint == Size:
        return _coerce_size(name, value)
    if hint is Duration:
        return _coerce_duration(name, value)
    if hint == Names:
        return coerce_names(name, value)
    if hint in (Floats, Ints):
        return _coerce_numbers(name, value, get_args(hint)[0])
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, Path):
        return str(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    raise UserError(f"'{name}' must be {kind}, but it is {value!r}.")


def _coerce_size(name: str, value: object) -> Size:
    """A size: 224, (192, 256), "224" or "192x256"."""
    try:
        parts = value.lower().replace(",", "x").split("x") if isinstance(value, str) else value
        sides = [int(side) for side in parts] if isinstance(parts, (list, tuple)) else [int(parts)]  # type: ignore[call-overload]
    except (TypeError, ValueError):
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"'{name}' must be a size like 224 or 192x256, but it is {value!r}.")
    return sides[0], sides[-1]


def _coerce_duration(name: str, value: object) -> Duration:
    """A duration: 90s, 10m, 1h30m, 1.5h or a `Duration`."""
    if isinstance(value, Duration):
        return value
    parts = (
        re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", value.strip().lower())
        if isinstance(value, str)
        else None
    )
    try:
        hours, minutes, seconds = (float(part or 0) for part in parts.groups()) if parts else (0.0, 0.0, 0.0)
    except ValueError:  # two decimal points
        hours = minutes = seconds = 0.0
    total = 3600 * hours + 60 * minutes + seconds
    if total < 1:
        raise UserError(f"'{name}' must be at least a second, as in 90s, 10m or 1h30m, but it is {value!r}.")
    return Duration(total)


def _coerce_freeze(name: str, value: object) -> Freeze:
    """What to freeze: 3, "3" or "all"."""
    if value == "all":
        return "all"
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise UserError(f"'{name}' must be all, or a number of blocks from 0, but it is {value!r}.")
    return int(text)


def coerce_names(name: str, value: object) -> Names:
    """Names: "x", "x,y" or ["x", "y"]."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise UserError(f"'{name}' must be a name, or several as in x,y, but it is {value!r}.")
    return tuple(n.strip() for n in names)


def _coerce_numbers(name: str, value: object, kind: type[float]) -> tuple[float, ...]:
    """A tuple of numbers, from one number or a list."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    whole = kind is int
    if any(type(v) not in ((int,) if whole else (int, float)) for v in values) or not (values or whole):
        raise UserError(f"'{name}' must be a list of {'whole ' if whole else ''}numbers, but it is {value!r}.")
    return tuple(map(kind, values))
