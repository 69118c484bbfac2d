"""Supervised training: `vitrail.train("photos/", epochs=30)` is `vitrail train photos/ --epochs 30`."""

from __future__ import annotations

from pathlib import Path

from vitrail.verb import callable_package


def train(
    data: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    find_lr: bool = False,
    **settings: object,
) -> Path:
    """Trains a model on a data set and evaluates it; returns the run folder.

    `settings` are those of `vitrail.config.TrainConfig` and its groups, by their flat names (`model`, `epochs`,
    `lr`, `img_size`, …); whatever is not given, the recipe chooses, prints and saves. With `resume` a run goes on
    exactly where it was; with `overwrite` an older run of the same name is replaced. With `find_lr` nothing is
    trained for good: a short run of growing learning rates finds a good one, and the folder returned holds the
    curve, `lr.png`, and in `lr.json` the suggestion. With `folds` the folder holds one run for each, and their mean
    and standard deviation.
    """
    from vitrail.train import folds, loop

    source, run = None if data is None else str(data), None if resume is None else str(resume)
    if folds.wanted(resume, settings) and not find_lr:
        return folds.train(source, run, overwrite, settings)
    return loop.train(source, run, overwrite, find_lr, settings)


callable_package(__name__, train)
