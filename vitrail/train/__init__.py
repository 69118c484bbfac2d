"""Supervised training: `vitrail.train("photos/", epochs=30)` is `vitrail train photos/ --epochs 30`."""

from __future__ import annotations

from pathlib import Path

from vitrail.verb import callable_package


def train(
    data: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    **settings: object,
) -> Path:
    """Trains a model on a data set and evaluates it; returns the run folder.

    `settings` are those of `vitrail.config.TrainConfig` and its groups, by their flat names (`model`, `epochs`,
    `lr`, `img_size`, …); whatever is not given, the recipe chooses, prints and saves. With `resume` a run goes on
    exactly where it was; with `overwrite` an older run of the same name is replaced. With `folds` the folder holds
    one run for each, and their mean and standard deviation.
    """
    from vitrail.train import folds, loop

    begin = folds.train if folds.wanted(resume, settings) else loop.train
    return begin(None if data is None else str(data), None if resume is None else str(resume), overwrite, settings)


callable_package(__name__, train)
