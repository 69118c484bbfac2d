"""What every family's configuration and model refuse, in the same words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.errors import UserError


def check_counts(config: Any, *names: str) -> None:
    """Every named number of a configuration, and each of a list of numbers, is at least 1; no classes are no head."""
    if config.classes < 0:
        raise UserError(f"'classes' must be at least 0, but it is {config.classes}.")
    for name in (*names, "channels", "img_size"):
        value = getattr(config, name)
        if min(value if isinstance(value, tuple) else (value,), default=0) < 1:
            raise UserError(f"'{name}' must be at least 1, but it is {value}.")


def check_rates(config: Any) -> None:
    """Dropout and stochastic depth are shares."""
    for name in ("drop", "drop_path"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"'{name}' must be at least 0 and below 1, but it is {getattr(config, name)}.")


def check_stages(config: Any, *names: str) -> None:
    """Every named list of a configuration has a number for each stage."""
    stages = len(config.widths)
    for name in names:
        if len(getattr(config, name)) != stages:
            raise UserError(
                f"'{name}' must have a number for each of {stages} widths, but it is {getattr(config, name)}."
            )


def check_multiple(config: Any, stride: int, what: str) -> None:
    """The sides of the images are multiples of a stride."""
    h, w = config.img_size
    if h % stride or w % stride:
        fit = [max(round(side / stride), 1) * stride for side in (h, w)]
        raise UserError(
            f"The image size must be a multiple of {what}, {stride}, but it is {h}x{w}. "
            f"The nearest that fits is {fit[0]}x{fit[1]}."
        )


def check_heads(widths: tuple[int, ...], heads: tuple[int, ...]) -> None:
    """Every width is cut into as many heads."""
    for width, count in zip(widths, heads, strict=True):
        if width % count:
            raise UserError(f"The width, {width}, must be a multiple of the number of heads, {count}.")


def check_images(images: Tensor, config: Any) -> None:
    """A batch has the channels and the size that a model is made for."""
    h, w = config.img_size
    if images.shape[1:] != (config.channels, h, w):
        raise UserError(
            f"The model reads batches of shape (B, {config.channels}, {h}, {w}), but got {tuple(images.shape)}. "
            "Preprocess them alike, or let vitrail.models.resize(model, img_size) adapt the model."
        )
