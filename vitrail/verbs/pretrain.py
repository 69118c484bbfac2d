"""`vitrail pretrain`: self-supervised pre-training."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from vitrail.data import Source
    from vitrail.train.progress import Progress
    from vitrail.verbs.run import Run

Method = Literal["masked", "mae", "simmim", "dino", "lejepa"]


def pretrain(
    data: str | Path | Source | None = None,
    *,
    method: Method | None = None,
    resume: str | PathLike[str] | None = None,
    overwrite: bool = False,
    data_changed: bool = False,
    augment: Callable[[Tensor], Tensor] | None = None,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    schedule: Callable[[float], float] | None = None,
    on_epoch: Callable[[Progress], object] | None = None,
    **settings: object,
) -> Run:
    """Pre-train a model on images without labels. Options that are not given are chosen by the recipe.

    Returns the run, which can be used as the path of its folder. Its model has no head: fine-tune it with `vitrail
    train LABELLED --weights RUN`, or use its features with evaluate --method knn, linear or fewshot, embed and explain.
    Labels in the data are not read. In Python, `data` and `val` may also be objects, `model` a module, and `augment`,
    `optimizer`, `schedule` and `on_epoch` functions, see docs/extend.md.

    Args:
        data: folder of images, .npz or .npy file, CSV/TSV/Parquet table, tar shards, hf:NAME or built-in data set
        method: self-supervised method (default: mae)
        resume (RUN): continue this run from its last checkpoint
        overwrite: replace an existing run of the same name
        data_changed: with --resume, continue although the data has changed since the run began
        **settings: the options of `vitrail.config.TrainConfig` that do not need labels, by their flat names
    """
    from torch import nn

    from vitrail.train.custom import Custom
    from vitrail.train.start import start_pretraining
    from vitrail.verbs.train import reported

    module = settings.pop("model") if isinstance(settings.get("model"), nn.Module) else None
    custom = Custom(module, augment, None, optimizer, schedule, on_epoch)  # type: ignore[arg-type]
    folder = None if resume is None else str(resume)
    run = reported(start_pretraining(data, folder, overwrite, method, settings, custom, data_changed))
    _draw_attention(run)
    return run


def _draw_attention(run: Run) -> None:
    """Saves attention maps of validation images of a run that has no pictures of reconstructions."""
    from vitrail.charts.style import save
    from vitrail.explain.figures.attention import rollouts
    from vitrail.explain.geometry import attends
    from vitrail.explain.subject import open_subject
    from vitrail.files import atomic_write
    from vitrail.progress import log
    from vitrail.world import alone, world

    if not world().first() or run.reconstruction_file.exists():
        return
    try:
        with alone():
            subject = open_subject(run.path, workers=run.config.source.workers, device=run.config.run.device)
            if attends(subject.model):
                with atomic_write(run.attention_file) as path:
                    save(next(rollouts(subject)).figure, path)
    except Exception as error:
        why = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}."
        log.warning(f"The run is complete, but its attention could not be drawn: {why}")


def show(run: Run) -> int:  # noqa: ARG001  # training has logged everything
    """The run has been logged."""
    return 0
