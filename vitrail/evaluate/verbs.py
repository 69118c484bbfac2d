"""`evaluate`: a trained model's predictions for a whole split, measured, drawn and written down."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.config import TrainConfig, load_yaml
from vitrail.data import Data, Split, open_data
from vitrail.data.loader import batches
from vitrail.data.preprocess import Preprocess
from vitrail.device import Precision, choose_device
from vitrail.errors import UserError, nearest
from vitrail.evaluate import figures
from vitrail.evaluate.metrics import Metrics, measure
from vitrail.models import Model
from vitrail.progress import track
from vitrail.weights import locate, open_card, open_run
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
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Logits, (N, K) float32, and labels, (N,), of every image of a split, in its order."""
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
    label_column: str | None = None,
    out: str | Path | None = None,
) -> Metrics:
    """Measures a run on the images that it was validated on, or on other `data` with the same classes.

    Of other data, the val or test split is taken, or the whole if it has none. Numbers and figures are
    written to `out`, by default `evaluation/<data>-<split>` in the run.
    """
    where = {"data_dir": data_dir, "image_column": image_column, "label_column": label_column}
    opened = _open(locate(run).parent, data, where, open_card(run).classes)
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
) -> Metrics:
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
    metrics = measure(logits, labels, card.classes)
    folder = Path(out) if out is not None else locate(run).parent / "evaluation" / f"{data.name}-{name}"
    _write(metrics, folder, {"model": card.model, "data": data.name, "split": name})
    return replace(metrics, folder=folder)


def _open(home: Path, data: str | Path | None, where: Mapping[str, Any], classes: tuple[str, ...]) -> Data:
    """The data to evaluate; if it is what the run was trained on, with the very same validation split."""
    file = home / "config.yaml"
    config = load_yaml(TrainConfig, file) if file.exists() else None
    if data is not None and not (config and _same(data, config.data)):
        return open_data(data, **where, classes=classes)
    if config is None:
        raise UserError(f"{home} does not say what its model was trained on ({file.name} is missing): give the data.")
    opened = open_data(
        config.data,
        val_fraction=config.input.val_fraction,
        seed=config.run.seed,
        **{name: value or getattr(config.input, name) for name, value in where.items()},
    )
    if opened.classes != classes:
        changed = sorted(set(opened.classes) ^ set(classes))
        raise UserError(
            f"{config.data} had {len(classes)} classes when the run was trained, and has {len(opened.classes)}: "
            f"{', '.join(changed[:5])} came or went. Restore them, or give other data."
        )
    return opened


def _same(data: str | Path, other: str) -> bool:
    return str(data) == other or (Path(data).exists() and Path(data).resolve() == Path(other).resolve())


def _write(metrics: Metrics, folder: Path, about: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be made: {error.strerror}. Choose another with --out.") from error
    names = [score.name for score in metrics.per_class]
    confusion = [[name, *row] for name, row in zip(names, metrics.confusion.tolist(), strict=True)]
    scores = [[s.name, f"{s.precision:.6f}", f"{s.recall:.6f}", f"{s.f1:.6f}", s.support] for s in metrics.per_class]
    write_text(folder / "metrics.json", json.dumps(about | metrics.to_json(), indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "confusion.csv", _csv([["true \\ predicted", *names], *confusion]))
    write_text(folder / "per_class.csv", _csv([["class", "precision", "recall", "f1", "support"], *scores]))
    for name, figure in (("confusion", figures.confusion), ("reliability", figures.reliability)):
        with replacing(folder / f"{name}.png") as path:
            figures.save(figure(metrics), path)


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
