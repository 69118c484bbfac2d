"""The recipes, and every value of one: `vitrail.recipes("deit", "photos/")` is `vitrail recipes deit photos/`."""

from __future__ import annotations

from pathlib import Path
from typing import overload

import numpy as np

from vitrail.config import TrainConfig, coerce
from vitrail.data import ArraySplit, Data, full_name, open_data
from vitrail.runs.run import split_settings
from vitrail.train.loop import plan
from vitrail.train.recipes import RECIPES


@overload
def recipes(name: None = None, data: None = None) -> dict[str, str]: ...


@overload
def recipes(name: str, data: str | Path | None = None, **settings: object) -> TrainConfig: ...


def recipes(
    name: str | None = None, data: str | Path | None = None, **settings: object
) -> dict[str, str] | TrainConfig:
    """Every recipe with what it is for; or all that one of them chooses for some data, ImageNet if none is given.

    `settings` are those of `vitrail.train`: what they decide, the recipe does not.
    """
    if name is None:
        return {name: recipe.line for name, recipe in RECIPES.items()}
    given = {key: coerce(TrainConfig, key, value) for key, value in {**settings, "recipe": name}.items()}
    if data is None:
        return plan("imagenet", _imagenet(), given)
    return plan(full_name(str(data)), open_data(str(data), **split_settings(given)), given)


def _imagenet() -> Data:
    """As many photographs of the size and classes as ImageNet-1k has, of which none takes memory."""

    def photos(count: int) -> ArraySplit:
        pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (count, 375, 500, 3))
        return ArraySplit(pixels, np.zeros(count, np.int64), "imagenet")

    classes = tuple(str(number) for number in range(1000))
    return Data("imagenet", classes, {"train": photos(1_281_167), "val": photos(50_000)}, (375, 500), 3, ())
