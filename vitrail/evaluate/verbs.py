"""`evaluate`: a trained model's predictions for a whole split, measured, drawn and written down."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.config import TrainConfig, load_yaml
from vitrail.data import Data, Split, full_name, open_data
from vitrail.data.loader import batches
from vitrail.data.preprocess import Preprocess
from vitrail.device import Precision, choose_device
from vitrail.errors import UserError, nearest
from vitrail.evaluate import figures
from vitrail.evaluate.metrics import AnyMetrics, measure_model
from vitrail.models import Model
from vitrail.progress import track
from vitrail.weights import Card, home, open_card, open_run
from vitrail.weights.files import replacing, write_text


def predict_split(
    model: Model,
    split: Split,
    preprocess: Preprocess,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    amp: Precision = "off",
    title: str = "evaluating",
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Outputs, (N, K) float32, and targets of every image of a split, in its order."""
    precision = torch.float16 if amp == "fp16" else torch.bfloat16
    autocast = torch.autocast(torch.device(device).type, precision, enabled=amp != "off")
    loader = track(batches(split, preprocess, batch_size, workers), title, math.ceil(len(split) / batch_size), "batch")
    logits, labels = [], []
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), autocast:
            for images, targets in loader:
                logits.append(model(preprocess.normalise(images.to(device))).float().cpu().numpy())
                labels.append(targets.numpy())
    finally:
        model.train(training)
    return np.concatenate(logits), np.concatenate(labels)


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    out: str | Path | None = None,
) -> AnyMetrics:
    """Measures a run on the images that it was validated on, or on other `data` with the same classes.

    Of other data, the val or test split is taken, or the whole if it has none. Numbers and figures are
    written to `out`, by default `evaluation/<data>-<split>` in the run.
    """
    where = {"data_dir": data_dir, "image_column": image_column, "label_column": label_column}
    opened = _open(home(run), data, where, open_card(run))
    return evaluate_on(run, opened, split, batch_size=batch_size, workers=workers, device=device, out=out)


def evaluate_on(
    run: str | Path,
    data: Data,
    split: str | None = None,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    out: str | Path | None = None,
) -> AnyMetrics:
    """`evaluate` on data that is open already."""
    if batch_size < 1:
        raise UserError(f"'batch_size' must be 1 or more, but it is {batch_size}.")
    name = split or next(usual for usual in ("val", "test", *data.splits) if usual in data.splits)
    if name not in data.splits:
        raise UserError(
            f"{data.name} has no split '{name}'.{nearest(name, data.splits)} Its splits are {', '.join(data.splits)}."
        )
    device = choose_device(device)
    model, card = open_run(run, device)
    data = data.read_as(card.preprocess.channels, card.preprocess.bits)
    logits, labels = predict_split(
        model, data.splits[name], card.preprocess, batch_size=batch_size, workers=workers, device=device
    )
    metrics = measure_model(card, logits, labels)
    folder = Path(out) if out is not None else home(run) / "evaluation" / f"{data.name}-{name}"
    _write(metrics, folder, {"model": card.model, "data": data.name, "split": name})
    return replace(metrics, folder=folder)


def _open(home: Path, data: str | Path | None, where: Mapping[str, Any], card: Card) -> Data:
    """The data to evaluate; if it is what the run was trained on, with the very same validation split."""
    file, classes = home / "config.yaml", card.classes
    config = load_yaml(TrainConfig, file) if file.exists() else None
    if data is not None and not (config and _same(data, config.data)):
        return open_data(data, **where, task=card.task, classes=classes)
    if config is None:
        raise UserError(f"{home} does not say what its model was trained on ({file.name} is missing): give the data.")
    opened = open_data(
        config.data,
        val_fraction=config.source.val_fraction,
        folds=config.source.folds,
        fold=config.source.fold,
        seed=config.run.seed,
        task=card.task,
        streaming=config.source.streaming,
        **{name: value or getattr(config.source, name) for name, value in where.items()},
    )
    if opened.classes != classes:
        changed = sorted(set(opened.classes) ^ set(classes))
        raise UserError(
            f"{config.data} had {len(classes)} classes when the run was trained, and has {len(opened.classes)}: "
            f"{', '.join(changed[:5])} came or went. Restore them, or give other data."
        )
    return opened


def _same(data: str | Path, other: str) -> bool:
    return full_name(data) == full_name(other)


def _write(metrics: AnyMetrics, folder: Path, about: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be made: {error.strerror}. Choose another with --out.") from error
    write_text(folder / "metrics.json", json.dumps(about | metrics.to_json(), indent=2, ensure_ascii=False) + "\n")
    for name, rows in metrics.csv().items():
        write_text(folder / f"{name}.csv", _csv(rows))
    for name, draw in figures.drawings(metrics).items():
        with replacing(folder / f"{name}.png") as path:
            figures.save(draw(), path)


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
