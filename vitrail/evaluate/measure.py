"""Measures predictions or features on a split, and writes metrics, tables and figures to a folder."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vitrail.charts.draw import save_charts
from vitrail.charts.kinds import Chart
from vitrail.config import Size
from vitrail.data import Data, Source, open_data
from vitrail.errors import UserError, nearest
from vitrail.evaluate.features import split_features, split_scores
from vitrail.evaluate.probes import FewShotMetrics, ProbeMetrics, fewshot, knn, linear
from vitrail.files import write_text
from vitrail.runs import EngineName
from vitrail.runs.predictor import Predictor
from vitrail.runs.run import Run
from vitrail.runs.words import classify_by, warn_of_cut
from vitrail.tasks.scores import Scores
from vitrail.weights import Card
from vitrail.world import world

TEMPLATE = "a photo of a {}."
Probe = Literal["knn", "linear", "fewshot"]

_PROBES: dict[Probe, Callable[..., ProbeMetrics | FewShotMetrics]] = {"knn": knn, "linear": linear, "fewshot": fewshot}


def evaluate_on(
    run: str | Path,
    data: Data,
    split: str | None = None,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
    out: str | Path | None = None,
    img_size: Size | None = None,
) -> Scores:
    """Measures a run's predictions on a split of opened data; writes to `out` or the run's `evaluation` folder."""
    check_batch(batch_size)
    name = split_name(data, split)
    predictor = Predictor(run, device, engine=engine, img_size=img_size)
    card, size = predictor.card, _size_name(img_size)
    data = data.read_as(card.preprocess.channels, card.preprocess.bits)
    scores, _, used = split_scores(
        predictor,
        data.splits[name],
        Run.of(run).outputs_file(data.name, name),
        keep=out is None and img_size is None,
        batch_size=batch_size,
        workers=workers,
        device=predictor.device,
        engine=engine,
    )
    kind = Path(run).suffix[1:] if predictor.exported else "head"  # an exported file beside its run has its own folder
    folder = Path(out) if out is not None else Run.of(run).evaluation(data.name, name, size or kind)
    about = {"model": card.model, "data": data.name, "split": name, "engine": used}
    about |= {"img_size": size} if size else {}
    write_scores(scores, card.task.charts(scores), folder, about)
    return replace(scores, folder=folder)


def classify_on(
    run: str | Path,
    data: Data,
    split: str | None = None,
    *,
    templates: Sequence[str] = (TEMPLATE,),
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
    out: str | Path | None = None,
    img_size: Size | None = None,
) -> Scores:
    """Measures how well a model trained on captions classifies images by the names of their classes, never trained."""
    check_batch(batch_size)
    name = split_name(data, split)
    if not data.task.single:
        raise UserError(f"--method zeroshot needs one class per image, but {data.name} is {data.task.title}.")
    whole = Predictor(run, device, engine=engine, img_size=img_size)
    warn_of_cut(whole.card, data.classes, templates)
    predictor = classify_by(whole, data.classes, templates)
    card = predictor.card
    data = data.read_as(card.preprocess.channels, card.preprocess.bits)
    folder = Path(out) if out is not None else Run.of(run).evaluation(data.name, name, "zeroshot")
    scores, _, used = split_scores(
        predictor,
        data.splits[name],
        folder / "outputs.npz",
        keep=False,
        batch_size=batch_size,
        workers=workers,
        device=predictor.device,
    )
    about = {"model": card.model, "data": data.name, "split": name, "engine": used, "templates": " | ".join(templates)}
    write_scores(scores, card.task.charts(scores), folder, about)
    return replace(scores, folder=folder)


def probe_on(
    run: str | Path,
    data: Data,
    method: Probe,
    split: str | None = None,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
    out: str | Path | None = None,
    img_size: Size | None = None,
    **chosen: Any,
) -> ProbeMetrics | FewShotMetrics:
    """Measures a run's features by a probe fitted to the train split; `chosen` are the probe's own settings."""
    from vitrail.device import choose_device
    from vitrail.runs.engine import check_engine
    from vitrail.weights import open_run

    check_batch(batch_size)
    name = split_name(data, split)
    if not data.task.single:
        raise UserError(
            f"--method {method} needs one class per image, but {data.name} is {data.task.title}. "
            "Remove --method, or use multi-class data."
        )
    if "train" not in data.splits:
        raise UserError(f"--method {method} needs a train split, but {data.name} has none.")
    if name == "train":
        raise UserError(f"--method {method} is fitted to the train split. Use another --split.")
    device = choose_device(device)
    check_engine(engine, device)
    model, card = open_run(run, device, headless=True, img_size=img_size)
    size = _size_name(img_size)
    data = data.read_as(card.preprocess.channels, card.preprocess.bits)
    features = {
        part: split_features(
            model,
            data.splits[part],
            card.preprocess,
            Run.of(run).features_file(data.name, f"{part}-{size}" if size else part),
            batch_size=batch_size,
            workers=workers,
            device=device,
            engine=engine,
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
    title = f"{method}-{size}" if size else method
    folder = Path(out) if out is not None else Run.of(run).evaluation(data.name, name, title)
    write_scores(metrics, metrics.charts(), folder, {"model": card.model, "data": data.name, "split": name})
    return replace(metrics, folder=folder)


def own_data(run: str | Path, card: Card, data: Source | None = None) -> Data:
    """The data that a run was trained on, with the same splits, or other `data`; read as the model needs it.

    Other data has the model's classes, in its order, or its own classes if the model does not know some of them; for a
    pre-trained model its own classes, or none if it has no labels.
    """
    where = dict.fromkeys(("data_dir", "image_column", "label_column"))
    ways: list[dict[str, Any]] = [{"model": card.task}, {}]
    first, second = ways if card.task.labelled else reversed(ways)
    try:
        opened = run_data(Run.of(run).path, data, where, card, first)
    except UserError:
        if data is None:
            raise
        opened = run_data(Run.of(run).path, data, where, card, second)
    return opened.read_as(card.preprocess.channels, card.preprocess.bits)


def _size_name(img_size: Size | None) -> str:
    """A given image size in a file name: "192x256"; empty for the model's own."""
    return "" if img_size is None else "{}x{}".format(*img_size)


def check_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"'batch_size' must be at least 1, but it is {batch_size}.")


def split_name(data: Data, split: str | None = None) -> str:
    """The requested split, by default val, else test, else the only one."""
    name = split or next(usual for usual in ("val", "test", *data.splits) if usual in data.splits)
    if name not in data.splits:
        raise UserError(
            f"{data.name} has no split '{name}'.{nearest(name, data.splits)} Its splits are {', '.join(data.splits)}."
        )
    return name


def run_data(
    home: Path, data: Source | None, where: Mapping[str, Any], card: Card, otherwise: Mapping[str, Any]
) -> Data:
    """The data to evaluate a run on: its own, with the same splits, or other data, opened with `otherwise`.

    Data that a pre-trained model has read without its labels is other data, if it is given: it is wanted with them.
    """
    run = Run(home)
    if data is not None and not (run.is_own(data) and card.task.labelled):
        return open_data(data, **where, **otherwise)
    return run.data(card, **where)


def write_scores(
    metrics: Scores | ProbeMetrics | FewShotMetrics, charts: Sequence[Chart], folder: Path, about: dict[str, str]
) -> None:
    if not world().first():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be created: {error.strerror}. Choose another --out.") from error
    write_text(folder / "metrics.json", json.dumps(about | metrics.to_json(), indent=2, ensure_ascii=False) + "\n")
    for name, rows in metrics.csv().items():
        write_text(folder / f"{name}.csv", _csv(rows))
    save_charts(charts, folder)


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
