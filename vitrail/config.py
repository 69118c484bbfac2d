"""Typed, frozen configuration: the one source of every option's name, type, default and help text.

The command line, the Python call and the `config.yaml` of a run all come from the dataclasses below. A field
without a default is one that the recipe must choose, so a `TrainConfig` that exists is complete: nothing in it
is left to be worked out later.
"""

from __future__ import annotations

import dataclasses
import re
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from vitrail.errors import UserError, nearest

Size = tuple[int, int]
Names = tuple[str, ...]
Floats = tuple[float, ...]
Ints = tuple[int, ...]
Task = Literal["multiclass", "multilabel", "regression"]
Freeze = Literal["all"] | int  # all but the head, or the first blocks and what enters them


class Duration(float):
    """A time in seconds that people write as 90s, 10m or 1h30m."""

    def __str__(self) -> str:
        hours, seconds = divmod(round(self), 3600)
        minutes, seconds = divmod(seconds, 60)
        parts = [(hours, "h"), (minutes, "m"), (seconds, "s")]
        return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def option(help: str, default: Any = dataclasses.MISSING, alias: str = "") -> Any:
    """A field with its help text, and the other flag that people type for it."""
    return field(default=default, metadata={"help": help, "alias": alias})


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """How the data set is read, split and weighted."""

    val_fraction: float = option("share held out for validation where the data has no split of its own", 0.2)
    folds: int = option("number of cross-validation folds (0 = none)", 0)
    fold: int = option("train only this fold, from 1 (0 = all of them)", 0)
    data_dir: str | None = option("where built-in data sets lie (else $VITRAIL_DATA and the usual places)", None)
    image_column: str | None = option("column of a table or hf: data set that holds the images (else found)", None)
    label_column: Names | None = option("column of a table or hf: data set with the labels, or x,y (else found)", None)
    task: Task | None = option("what is learnt: one class, any labels, or numbers (else seen from the data)", None)
    streaming: bool = option("read an hf: data set or Parquet files as a stream, storing nothing", False)
    class_weights: bool = option("weigh the loss of every class by the inverse of its frequency", False)
    balanced_sampling: bool = option("show every class equally often", False)
    workers: int = option("threads that read images", 2, alias="-j")
    cache_gb: float = option("GiB of disk for decoded images, so that they are decoded once (0 = off)", 10.0)


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    img_size: Size = option("height and width that the model sees: 224 or 192x256", alias="--imgsz")
    channels: int = option("channels that the model sees: 1, 3, 4 to keep transparency, or the bands of the images")
    bits: int = option("bits of a pixel's value: 16 if the images have as many, 32 if they are floats", 8)
    normalize: Literal["half", "imagenet", "dataset", "weights"] = option(
        "mean and std: 0.5, ImageNet's, measured on the training images, as --weights had it; above 8 bits measured",
        "half",
    )
    mean: Floats = option("mean of every channel, or one for all, in place of what --normalize says", (0.5,))
    std: Floats = option("standard deviation of every channel, or one for all, likewise", (0.5,))
    crop: float = option("share of the image kept by the centre crop when evaluating", 1.0)
    interpolation: Literal["bicubic", "bilinear", "lanczos"] = option(
        "how images are resized; bicubic, or as --weights had it", "bicubic"
    )


@dataclass(frozen=True, kw_only=True)
class ArchConfig:
    """Changes to the named model. What its family does not have is None."""

    pool: Literal["cls", "cls_dist", "cls_gap", "gap", "gap_norm", "mae", "map"] | None = option(
        "how tokens become one vector: class token (beside a distillation token or the average), average "
        "(before the last norm, or so with a class token), attention"
    )
    pos: Literal["learned", "patches", "learned2d", "relative", "sincos2d", "none"] | None = option(
        "position embeddings"
    )
    head: Literal["linear", "tanh"] | None = option("a single linear layer, or the paper's hidden tanh layer before it")
    stem: Literal["patch", "conv"] | None = option("the paper's patch projection, or overlapping convolutions")
    registers: int | None = option("register tokens")
    layer_scale: float | None = option("first value of LayerScale (0 = none)")
    drop: float = option("dropout")
    drop_path: float = option("stochastic depth of the last block, growing linearly to it")


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """How trained weights are used, with --weights."""

    freeze: Freeze | None = option("keep as it is: all but the head, or the first N blocks and what enters them", None)
    lora_rank: int = option("learn only the head and adapters of this rank in the attention (0 = all learns)", 0)
    lora_alpha: float = option("strength of the adapters, divided by their rank; twice the rank if not given", 0.0)
    pos_resample: Literal["bicubic", "bilinear", "linear"] = option(
        "how positions are resampled at another size; linear is the paper's", "bicubic"
    )
    partial: bool = option("take of the weights what fits the model, and say what does not", False)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """What is learnt from a teacher, with --teacher."""

    teacher: str | None = option("run, weights file, timm:NAME, hf:REPO or .onnx file of a model to learn from", None)
    teacher_model: str | None = option("name of the teacher's model, where its weights do not show it", None)
    distill: Literal["hard", "soft"] = option("learn the teacher's choice, or its probabilities", "hard")
    distill_alpha: float = option("weight of the teacher in the loss; the rest is that of the labels", 0.5)
    distill_tau: float = option("temperature of soft probabilities", 1.0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    epochs: float = option("passes over the training images; 0.5 is half of them")
    time_budget: Duration | None = option("train for so long instead, as 10m or 1h30m: the decay ends then", None)
    batch_size: int = option("images per forward pass", alias="-b")
    grad_accum_steps: int = option("forward passes per optimiser step", 1)
    opt: Literal["adamw", "sgd", "muon", "lamb"] = option("muon serves the weight matrices, with AdamW for the rest")
    loss: Literal["ce", "bce"] = option("cross-entropy over the classes, or binary of each class by itself", "ce")
    lr: float = option("peak learning rate; taken as it is, never scaled by the batch size")
    weight_decay: float = option("decoupled weight decay, not on norms, biases, tokens and positions", alias="--wd")
    sched: Literal["cosine", "linear", "constant"] = option("shape of the decay; constant decays over --cooldown")
    warmup_epochs: float = option("epochs of linear warm-up")
    min_lr: float = option("learning rate at the end, as a share of the peak", 0.0)
    cooldown: float = option("share of the run over which 'constant' decays at its end", 0.2)
    clip_grad: float = option("largest norm of the whole gradient (0 = any)", 1.0)
    layer_decay: float = option("factor on the learning rate for each stage further from the head", 1.0)
    body_lr: float = option("factor on the learning rate of everything but the head, with --weights", 0.1)
    model_ema: float = option("decay of the moving average of the weights that is evaluated and kept (0 = off)", 0.0)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    crop_scale: float = option("smallest share of the area that a random crop keeps (1 = no random crop)", 1.0)
    shift: int = option("largest random shift in pixels", 0)
    hflip: float = option("probability of a mirror image", 0.0)
    randaug: int = option("RandAugment operations per image", 0)
    magnitude: float = option("strength of RandAugment, 0 to 10", 9.0)
    three_augment: float = option("probability of 3-Augment: each image turns grey, solarized or blurred", 0.0)
    color_jitter: float = option("largest change of brightness, contrast and saturation, as a share", 0.0)
    reprob: float = option("probability of erasing a random rectangle", 0.0)
    mixup: float = option("alpha of mixup (0 = off)", 0.0)
    cutmix: float = option("alpha of CutMix (0 = off)", 0.0)
    mix_prob: float = option("share of batches that are mixed at all", 1.0)
    smoothing: float = option("label smoothing", 0.0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = option("name of the run folder")
    out: str = option("folder that holds the runs", "runs", alias="--output")
    seed: int = option("seed of everything random", 0)
    device: str = option("cpu, cuda, cuda:1 or mps")
    amp: Literal["off", "bf16", "fp16"] = option("autocast precision")
    compile: bool = option("compile the model with torch.compile", False)
    grad_checkpointing: bool = option("recompute activations in the backward pass to save memory", False)
    save_minutes: float = option("minutes between checkpoints within an epoch", 5.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run."""

    data: str = option("folder, .npz, .npy, CSV/TSV/Parquet table, tar shards, hf:NAME, or a built-in name")
    recipe: str = option("chooses what is not given: see `vitrail recipes`; small, or finetune with --weights")
    model: str = option("name of a model or of a family: `vitrail models` lists them")
    weights: str | None = option("run, file, timm:NAME or hf:REPO whose weights training starts from", None)
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
    """One setting of a configuration, found under its flat name whatever group it is in."""

    name: str
    group: str
    type: Any
    default: Any
    help: str
    alias: str


def options(cls: type[Any] = TrainConfig) -> dict[str, Option]:
    """Every setting of a configuration class and its groups, by flat name."""
    found: dict[str, Option] = {}
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if _is_group(hints[f.name]):
            inner = options(hints[f.name])
            found |= {name: dataclasses.replace(o, group=f.name) for name, o in inner.items()}
        else:
            meta = f.metadata
            found[f.name] = Option(f.name, "", hints[f.name], f.default, meta.get("help", ""), meta.get("alias", ""))
    return found


def coerce(cls: type[Any], name: str, value: object) -> Any:
    """`value` as the type that a configuration's setting of this flat name has, or a UserError with the rule."""
    known = options(cls)
    unknown_setting([name], known)
    return _coerce(name, known[name].type, value)


def override(config: C, changes: dict[str, object]) -> C:
    """A copy of a configuration with some settings changed by their flat names."""
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
    """Raises for the first name in `given` that is not `known`."""
    for name in given:
        if name not in known:
            raise UserError(f"There is no setting '{name}'.{nearest(name, known)}")


def flat(config: Any) -> dict[str, Any]:
    """Every setting of a configuration by its flat name."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {f.name: value}
    return found


def to_plain(config: Any) -> dict[str, Any]:
    """The inverse of `from_plain`: dictionaries, lists and plain values, sizes as `[height, width]`."""
    return dataclasses.asdict(config, dict_factory=lambda items: {k: _plain(v) for k, v in items})


def to_yaml(config: Any) -> str:
    """A configuration as the text of its `config.yaml`."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def save_yaml(config: Any, path: Path) -> None:
    """Writes a configuration as YAML."""
    path.write_text(to_yaml(config), encoding="utf-8")


def load_yaml(cls: type[C], path: Path) -> C:
    """Reads what `save_yaml` wrote; anything unknown, missing or ill-typed is a UserError that names the file."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        return from_plain(cls, document)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a YAML file: {str(error).splitlines()[0]}.") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def from_plain(cls: type[C], document: object, where: str = "") -> C:
    """A configuration from dictionaries, lists and plain values, checked; what YAML and JSON hold."""
    if not isinstance(document, dict):
        raise UserError(f"{where or 'The file'} must hold settings, but it holds {document!r}.")
    hints = get_type_hints(cls)
    unknown_setting(document, hints)
    values = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # configurations are dataclasses
        if f.name in document:
            hint, value = hints[f.name], document[f.name]
            values[f.name] = from_plain(hint, value, f.name) if _is_group(hint) else _coerce(f.name, hint, value)
        elif f.default is f.default_factory is dataclasses.MISSING:
            raise UserError(f"The setting '{f.name}' is missing.")
    return cls(**values)


def _is_group(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


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
    if hint == Floats:
        return _coerce_floats(name, value)
    if hint == Ints:
        return _coerce_ints(name, value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, Path):
        return str(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    raise UserError(f"'{name}' must be {kind}, but it is {value!r}.")


def _coerce_size(name: str, value: object) -> Size:
    """224, (192, 256), "224" and "192x256" are sizes."""
    try:
        parts = value.lower().replace(",", "x").split("x") if isinstance(value, str) else value
        sides = [int(side) for side in parts] if isinstance(parts, (list, tuple)) else [int(parts)]  # type: ignore[call-overload]
    except (TypeError, ValueError):
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"'{name}' must be a size like 224 or 192x256, but it is {value!r}.")
    return sides[0], sides[-1]


def _coerce_duration(name: str, value: object) -> Duration:
    """90s, 10m, 1h30m and 1.5h are durations; so is a `Duration`."""
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
        raise UserError(f"'{name}' must be a time of a second or more like 90s, 10m or 1h30m, but it is {value!r}.")
    return Duration(total)


def _coerce_freeze(name: str, value: object) -> Freeze:
    """3, "3" and "all" say what is frozen."""
    if value == "all":
        return "all"
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise UserError(f"'{name}' must be all, or a number of blocks from 0, but it is {value!r}.")
    return int(text)


def coerce_names(name: str, value: object) -> Names:
    """ "x", "x,y" and ["x", "y"] are names."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise UserError(f"'{name}' must be a name, or several as in x,y, but it is {value!r}.")
    return tuple(n.strip() for n in names)


def _coerce_floats(name: str, value: object) -> Floats:
    """A number, or a list of some, is a tuple of them."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values or any(type(v) not in (int, float) for v in values):
        raise UserError(f"'{name}' must be a list of numbers, but it is {value!r}.")
    return tuple(float(v) for v in values)


def _coerce_ints(name: str, value: object) -> Ints:
    """A list of whole numbers is a tuple of them."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    if any(type(v) is not int for v in values):
        raise UserError(f"'{name}' must be a list of whole numbers, but it is {value!r}.")
    return tuple(values)
