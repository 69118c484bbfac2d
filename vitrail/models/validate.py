"""Checks that all model configurations share, with one wording."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.config import LARGEST_SIDE
from vitrail.errors import UserError, shown

# The largest values that any model has, with a wide margin. A file may claim any number, and building a model of a
# million layers takes hours before its first tensor is compared with the file's.
DEEPEST, LARGEST, MOST_CLASSES, _MOST_STAGES = 1000, 2**17, 2**24, 100


def check_counts(config: Any, *names: str) -> None:
    """Checks that the named fields, numbers or tuples of them, are at least 1; `classes` may be 0, a headless model.

    Values beyond those of any real model are refused, too.
    """
    check_classes(config)
    for name in (*names, "channels", "img_size"):
        value = getattr(config, name)
        values = value if isinstance(value, tuple) else (value,)
        if min(values, default=0) < 1:
            raise UserError(f"'{name}' must be at least 1, but it is {value}.")
        most = {"img_size": LARGEST_SIDE, "depth": DEEPEST, "depths": DEEPEST}.get(name, LARGEST)
        if max(values) > most:
            raise UserError(f"'{name}' must be at most {most:,}, but it is {shown(value)}.")
        if len(values) > _MOST_STAGES:
            raise UserError(f"'{name}' must have at most {_MOST_STAGES} values, but it has {len(values):,}.")


def check_classes(config: Any) -> None:
    """Checks that the number of outputs is that of a real model; 0 is a headless one."""
    if config.classes < 0:
        raise UserError(f"'classes' must be at least 0, but it is {config.classes}.")
    if config.classes > MOST_CLASSES:
        raise UserError(f"'classes' must be at most {MOST_CLASSES:,}, but it is {config.classes}.")


def check_rates(config: Any) -> None:
    """Checks that dropout and stochastic depth rates are in [0, 1)."""
    for name in ("drop", "drop_path"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"'{name}' must be at least 0 and below 1, but it is {getattr(config, name)}.")


def check_stages(config: Any, *names: str) -> None:
    """Checks that the named fields have one value per stage."""
    stages = len(config.widths)
    for name in names:
        if len(getattr(config, name)) != stages:
            raise UserError(
                f"'{name}' must have one value for each of {stages} widths, but it is {getattr(config, name)}."
            )


def check_multiple(config: Any, stride: int, what: str) -> None:
    """Checks that the image sides are multiples of `stride`, called `what` in the error."""
    h, w = config.img_size
    if h % stride or w % stride:
        fit = [max(round(side / stride), 1) * stride for side in (h, w)]
        raise UserError(
            f"The image size must be a multiple of {what}, {stride}, but it is {h}x{w}. "
            f"The nearest that fits is {fit[0]}x{fit[1]}."
        )


def check_heads(widths: tuple[int, ...], heads: tuple[int, ...]) -> None:
    """Checks that each width is a multiple of its number of heads."""
    for width, count in zip(widths, heads, strict=True):
        if width % count:
            raise UserError(f"The width, {width}, must be a multiple of the number of heads, {count}.")


def check_images(images: Tensor, config: Any) -> None:
    """Checks that a batch has the model's channels and image size."""
    h, w = config.img_size
    if images.shape[1:] != (config.channels, h, w):
        raise UserError(
            f"The model expects batches of shape (B, {config.channels}, {h}, {w}), but got {tuple(images.shape)}. "
            "Preprocess the images accordingly, or adapt the model with vitrail.models.resize(model, img_size)."
        )


def check_all(tokens: Tensor, config: Any, why: str = "") -> None:
    """Checks that all tokens are given, if blocks need to know their places: for an attention pattern, or for `why`."""
    why = why or (f"the attention pattern '{config.attention}'" if config.attention != "global" else "")
    if why and tokens.shape[1] != config.length:
        raise UserError(
            f"Got {tokens.shape[1]} tokens, but with {why} 'encode' needs all {config.length}. Pass all of them, and "
            "the indices of those to encode as 'keep'."
        )
