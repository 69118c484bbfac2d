"""`evaluate`: a trained model's predictions, or its features, for a whole split, measured, drawn and written down."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail.charts import figures
from vitrail.config import TrainConfig, load_yaml
from vitrail.data import Data, full_name, open_data
from vitrail.data.targets import WORDS
from vitrail.device import choose_device
from vitrail.errors import UserError, nearest
from vitrail.evaluate.features import run_split, split_features
from vitrail.evaluate.metrics import AnyMetrics, measure_model
from vitrail.evaluate.probes import FewShotMetrics, ProbeMetrics, fewshot, knn, linear
from vitrail.files import atomic_write, write_text
from vitrail.weights import Card, home, open_body, open_card, open_run

Method = Literal["head", "knn", "linear", "fewshot"]

_PROBES: dict[Method, Callable[..., ProbeMetrics | FewShotMetrics]] = {"knn": knn, "linear": linear, "fewshot": fewshot}

# What can be chosen for each method.
_CHOICES: dict[Method, tuple[str, ...]] = {
    "head": (),
    "knn": ("k",),
    "linear": ("seed",),
    "fewshot": ("shots", "draws", "seed"),
}


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    method: Method = "head",
    split: str | None = None,
    k: int | None = None,
    shots: Sequence[int] | None = None,
    draws: int | None = None,
    seed: int | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    out: str | Path | None = None,
) -> AnyMetrics | ProbeMetrics | FewShotMetrics:
    """Measures a run on the images that it was validated on, or on other `data` with the same classes.

    Of other data, the val or test split is taken, or the whole if it has none. Numbers and figures are
    written to `out`, by default `evaluation/<data>-<split>` in the run.

    With a `method` other than "head" it is the model's features that are measured, by a classifier that learns from
    the train split: "knn", "linear" or "fewshot", see `vitrail.evaluate.probes`. The data may have any classes then.
    `k` (20) is for knn, `shots` (1, 5, 10) and `draws` (5) for fewshot, `seed` (0) for what fewshot draws and linear
    holds out. The folder's name ends in the method.
    """
    card = open_card(run)
    where = {"data_dir": data_dir, "image_column": image_column, "label_column": label_column}
    chosen = _chosen(method, {"k": k, "shots": shots, "draws": draws, "seed": seed})
    if method == "head":
        opened = _open(home(run), data, where, card, {"task": card.task, "classes": card.classes})
        return evaluate_on(run, opened, split, batch_size=batch_size, workers=workers, device=device, out=out)
    # Without the seed, so that the same images are held out whatever it is: results compare, and features are kept.
    opened = _open(home(run), data, where, card, {})
    return probe_on(
        run, opened, method, split, batch_size=batch_size, workers=workers, device=device, out=out, **chosen
    )


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
    _check_batch(batch_size)
    name = split_name(data, split)
    device = choose_device(device)
    model, card = open_run(run, device)
    data = data.read_as(card.preprocess.channels, card.preprocess.bits)
    logits, labels = run_split(
        model, data.splits[name], card.preprocess, batch_size=batch_size, workers=workers, device=device
    )
    metrics = measure_model(card, logits, labels)
    folder = Path(out) if out is not None else home(run) / "evaluation" / f"{data.name}-{name}"
    _write(metrics, folder, {"model": card.model, "data": data.name, "split": name})
    return replace(metrics, folder=folder)


def probe_on(
    run: str | Path,
    data: Data,
    method: Literal["knn", "linear", "fewshot"],
    split: str | None = None,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    out: str | Path | None = None,
    **chosen: Any,
) -> ProbeMetrics | FewShotMetrics:
    """`evaluate` by features on data that is open already; `chosen` goes to the method."""
    _check_batch(batch_size)
    name = split_name(data, split)
    if data.task != "multiclass":
        raise UserError(
            f"The method '{method}' tells classes apart, but {data.name} is {WORDS[data.task].title}. "
            "Leave --method out, or give data with one class an image."
        )
    if "train" not in data.splits:
        raise UserError(f"The method '{method}' learns from a train split, and {data.name} has none.")
    if name == "train":
        raise UserError(f"The method '{method}' learns from the train split, so it must be measured on another.")
    device = choose_device(device)
    model, card = open_body(run, device)
    data = data.read_as(card.preprocess.channels, card.preprocess.bits)
    features = {
        part: split_features(
            model,
            data.splits[part],
            card.preprocess,
            home(run) / "features" / f"{data.name}-{part}.npz",
            batch_size=batch_size,
            workers=workers,
            device=device,
        )
        for part in ("train", name)
    }
    metrics = _PROBES[method](
        features["train"],
        data.splits["train"].targets,
        features[name],
        data.splits[name].targets,
        data.classes,
        **chosen,
    )
    folder = Path(out) if out is not None else home(run) / "evaluation" / f"{data.name}-{name}-{method}"
    _write(metrics, folder, {"model": card.model, "data": data.name, "split": name})
    return replace(metrics, folder=folder)


def own_data(run: str | Path, card: Card, data: str | Path | None = None) -> Data:
    """The data that a run was trained on, with the very same splits, or other `data`; read as its model wants it.

    Other data has the classes of the model, in its order, unless it has some that the model does not know.
    """
    where = dict.fromkeys(("data_dir", "image_column", "label_column"))
    try:
        opened = _open(home(run), data, where, card, {"task": card.task, "classes": card.classes})
    except UserError:
        if data is None:
            raise
        opened = _open(home(run), data, where, card, {})
    return opened.read_as(card.preprocess.channels, card.preprocess.bits)


def _chosen(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given for a method; a UserError if it is for another."""
    if method not in get_args(Method):
        raise UserError(f"'method' must be one of {', '.join(get_args(Method))}, but it is '{method}'.")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in _CHOICES[method]:
            methods = [other for other, names in _CHOICES.items() if name in names]
            raise UserError(f"'{name}' is for the method {' or '.join(methods)}, but the method is {method}.")
    return dict(given)


def _check_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"'batch_size' must be 1 or more, but it is {batch_size}.")


def split_name(data: Data, split: str | None = None) -> str:
    """The split that is asked for, or the one that is usually measured."""
    name = split or next(usual for usual in ("val", "test", *data.splits) if usual in data.splits)
    if name not in data.splits:
        raise UserError(
            f"{data.name} has no split '{name}'.{nearest(name, data.splits)} Its splits are {', '.join(data.splits)}."
        )
    return name


def _open(
    home: Path, data: str | Path | None, where: Mapping[str, Any], card: Card, otherwise: Mapping[str, Any]
) -> Data:
    """The data to evaluate; if it is what the run was trained on, with the very same validation split.

    Other data is opened with the settings `otherwise`.
    """
    file, classes = home / "config.yaml", card.classes
    config = load_yaml(TrainConfig, file) if file.exists() else None
    if data is not None and not (config and _same(data, config.data)):
        return open_data(data, **where, **otherwise)
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


def _write(metrics: AnyMetrics | ProbeMetrics | FewShotMetrics, folder: Path, about: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be made: {error.strerror}. Choose another with --out.") from error
    write_text(folder / "metrics.json", json.dumps(about | metrics.to_json(), indent=2, ensure_ascii=False) + "\n")
    for name, rows in metrics.csv().items():
        write_text(folder / f"{name}.csv", _csv(rows))
    for name, draw in figures.drawings(metrics).items():
        with atomic_write(folder / f"{name}.png") as path:
            figures.save(draw(), path)


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
