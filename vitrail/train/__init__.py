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
    `lr`, `img_size`, …); the recipe chooses, logs and saves the others. `resume` continues a run exactly where it
    stopped; `overwrite` replaces an earlier run of the same name. `find_lr` runs a learning-rate range test instead:
    the folder returned holds the curve, `lr.png`, and the suggestion, in `lr.json`. With `folds` it holds a run for
    each fold, and the mean and standard deviation of their scores.
    """
    from vitrail.train import folds
    from vitrail.train.start import start

    source, run = None if data is None else str(data), None if resume is None else str(resume)
    if folds.wanted(resume, settings) and not find_lr:
        return folds.train(source, run, overwrite, settings)
    return start(source, run, overwrite, find_lr, settings)


callable_package(__name__, train)
