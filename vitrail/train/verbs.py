"""The recipes and their values: `vitrail.recipes("deit", "photos/")` is `vitrail recipes deit photos/`."""

from __future__ import annotations

from pathlib import Path
from typing import overload

import numpy as np

from vitrail.config import TrainConfig
from vitrail.data import ArraySplit, Data, full_name, open_data
from vitrail.train.recipes import RECIPES
from vitrail.train.resolve import plan, typed
from vitrail.train.run import split_settings


@overload
def recipes(name: None = None, data: None = None) -> dict[str, str]: ...


@overload
def recipes(name: str, data: str | Path | None = None, **settings: object) -> TrainConfig: ...


def recipes(
    name: str | None = None, data: str | Path | None = None, **settings: object
) -> dict[str, str] | TrainConfig:
    """Every recipe with a line on its use; or, for one of them, every value it chooses for `data` (default: ImageNet).

    `settings` are those of `vitrail.train` and override the recipe.
    """
    if name is None:
        return {name: recipe.line for name, recipe in RECIPES.items()}
    given = typed({**settings, "recipe": name})
    if data is None:
        return plan("imagenet", _imagenet(), given)
    return plan(full_name(str(data)), open_data(str(data), **split_settings(given)), given)


def _imagenet() -> Data:
    """A stand-in for ImageNet-1k: its number of images, size and classes, without its memory."""

    def photos(count: int) -> ArraySplit:
        pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (count, 375, 500, 3))
        return ArraySplit(pixels, np.zeros(count, np.int64), "imagenet")

    classes = tuple(str(number) for number in range(1000))
    return Data("imagenet", classes, {"train": photos(1_281_167), "val": photos(50_000)}, (375, 500), 3, ())
