"""`vitrail pretrain`: self-supervised pre-training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Method = Literal["masked", "mae", "simmim", "dino", "lejepa"]


def pretrain(
    data: str | Path | None = None,
    *,
    method: Method | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    **settings: object,
) -> Path:
    """Pre-train a model on images without labels. Options that are not given are chosen by the recipe.

    Returns the run folder, whose model has no head: fine-tune it with `vitrail train LABELLED --weights RUN`, or use
    its features with evaluate --method knn, linear or fewshot, embed and explain. Labels in the data are not read.

    Args:
        data: folder of images, .npz or .npy file, CSV/TSV/Parquet table, tar shards, hf:NAME or built-in data set
        method: self-supervised method (default: mae)
        resume (RUN): continue this run from its last checkpoint
        overwrite: replace an existing run of the same name
        **settings: the options of `vitrail.config.TrainConfig` that do not need labels, by their flat names
    """
    from vitrail.train.start import start_pretraining

    source, run = None if data is None else str(data), None if resume is None else str(resume)
    return start_pretraining(source, run, overwrite, method, settings)


def show(run: Path) -> int:
    """Write the report of the run."""
    from vitrail.verbs.train import show as show_report

    return show_report(run)
