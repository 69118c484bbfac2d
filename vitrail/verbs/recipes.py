"""`vitrail recipes`: lists the training recipes, or all values of one."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import overload

from vitrail.config import TrainConfig, to_plain, to_yaml
from vitrail.verbs.pretrain import Method


@overload
def recipes(recipe: None = None, data: None = None) -> dict[str, str]: ...


@overload
def recipes(
    recipe: str, data: str | Path | None = None, *, method: Method | None = None, **settings: object
) -> TrainConfig: ...


def recipes(
    recipe: str | None = None, data: str | Path | None = None, *, method: Method | None = None, **settings: object
) -> dict[str, str] | TrainConfig:
    """List the training recipes, or print every value that one resolves to, as a run's config.yaml.

    Args:
        recipe (NAME): recipe to resolve (default: list them all)
        data: data set to resolve it for (default: a stand-in of ImageNet-1k's size)
        method: self-supervised method of a pre-training recipe (default: mae, or the recipe's own)
        **settings: every option of `vitrail.config.TrainConfig`, by its flat name
    """
    from vitrail.config.splits import split_settings
    from vitrail.data import full_name, open_data
    from vitrail.data.blank import blank
    from vitrail.train.recipes import RECIPES, method_of
    from vitrail.train.resolve import plan, typed
    from vitrail.train.start import HELD_OUT

    if recipe is None:
        return {name: known.line for name, known in RECIPES.items()}
    given = typed({**settings, "recipe": recipe})
    methods = RECIPES[recipe].methods if recipe in RECIPES else ()
    if method is not None or methods:
        given["task"] = method or method_of(recipe)
        given.setdefault("val_fraction", HELD_OUT)
    if data is None:
        return plan("imagenet", blank(task=given.get("task")), given)
    return plan(full_name(str(data)), open_data(str(data), **split_settings(given)), given)


def show(result: dict[str, str] | TrainConfig, *, data: str | None = None, json: bool = False) -> int:
    """Print the list, or the configuration.

    Args:
        json: print JSON
    """
    if isinstance(result, dict):
        print(dumps(result, indent=2) if json else "\n".join(f"{name:<16}{line}" for name, line in result.items()))
    elif json:
        print(dumps(to_plain(result), indent=2))
    else:
        stand_in = "" if data else " (no data was given, so these are the values for data of its size)"
        print(f"# {recipes()[result.recipe]}\n# For {result.data}{stand_in}.\n{to_yaml(result)}", end="")
    return 0
