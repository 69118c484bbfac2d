"""All that a run has left behind, and what its model says of every validation image.

Whatever is missing (a first epoch, the data, a measurement) is a sentence in `notes`, not an error: a page tells what
there is to tell.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.config import TrainConfig, flat, load_yaml
from vitrail.data import Data, open_data
from vitrail.data.cache import once
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.evaluate.bootstrap import Samples, sample
from vitrail.evaluate.features import run_split
from vitrail.evaluate.metrics import (
    AnyMetrics,
    Bin,
    ClassScore,
    LabelMetrics,
    LabelScore,
    Metrics,
    ValueMetrics,
    ValueScore,
    measure_model,
)
from vitrail.models import Model
from vitrail.train.run import CONFIG_FILE, split_settings
from vitrail.weights import WEIGHTS_FILE, Card, open_run

Row = dict[str, float]


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of a run."""

    folder: Path
    config: TrainConfig
    rows: list[Row]  # of metrics.csv
    notes: tuple[str, ...]
    card: Card | None = None  # None until the first epoch is finished
    model: Model | None = None
    data: Data | None = None  # None if it is gone
    metrics: AnyMetrics | None = None
    samples: Samples = field(default_factory=Samples)
    outputs: NDArray[np.float32] | None = None  # of every validation image; None if the data is gone
    device: str = "cpu"

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def split(self) -> str:
        """What the images that the model is measured on are called."""
        splits = self.data.splits if self.data is not None else {}
        return "test" if "val" in splits and splits.get("test") is splits["val"] else "validation"

    @property
    def stopped(self) -> bool:
        """Whether training has not come to its end."""
        optim, last = self.config.optim, self.rows[-1] if self.rows else {}
        if optim.time_budget is not None:
            decayed = last.get("lr", optim.lr) <= optim.lr * (optim.min_lr + 0.1)
            return not (decayed and last["seconds"] >= optim.time_budget / 2)
        # The first row tells the steps of an epoch. Of the last there may be a part; one below half a step is none.
        return not self.rows or last["step"] < round(self.rows[0]["step"] * optim.epochs)


def gather(run: str | Path, batch_size: int = 256, workers: int = 2, device: str | None = None) -> Facts:
    """Reads a run, opens its data and measures its model, as far as they are there."""
    folder = Path(run)
    if not (folder / CONFIG_FILE).exists():
        raise UserError(
            f"{folder} is no run: it has no {CONFIG_FILE}. A report is made of the folder that training made."
        )
    config = load_yaml(TrainConfig, folder / CONFIG_FILE)
    device = choose_device(device)
    notes: list[str] = []
    model, card = open_run(folder, device) if (folder / WEIGHTS_FILE).exists() else (None, None)
    data = _open_data(config, card, notes)
    facts = Facts(folder, config, _rows(folder), (), card, model, data, device=device)
    if model is None or card is None:
        notes.append("There is no model to look at yet.")
    elif data is not None:
        data = data.read_as(card.preprocess.channels, card.preprocess.bits)
        split = once(data.splits["val"], card.preprocess, False, config.source.cache_gb, workers)
        outputs, targets = run_split(
            model, split, card.preprocess, batch_size=batch_size, workers=workers, device=device
        )
        metrics = measure_model(card, outputs, targets)
        facts = replace(facts, outputs=outputs, metrics=metrics, samples=sample(metrics, outputs, targets))
    elif (kept := _kept(folder, card)) is not None:
        notes.append("The numbers are those that were measured when the data was there.")
        facts = replace(facts, metrics=kept, samples=sample(kept, None, None))
    return replace(facts, notes=tuple(notes))


def _open_data(config: TrainConfig, card: Card | None, notes: list[str]) -> Data | None:
    """The data of a run with its very splits, or None and a note why it cannot be had."""
    settings = split_settings(flat(config)) | ({"task": card.task} if card is not None else {})
    try:
        data = open_data(config.data, **settings)
        if card is not None:
            if data.classes != card.classes:
                raise UserError(f"{config.data} has other classes than when the run was trained.")
            data.read_as(card.preprocess.channels, card.preprocess.bits)
    except UserError as error:
        notes.append(f"The data cannot be shown: {error}")
        return None
    return data


def _rows(folder: Path) -> list[Row]:
    file = folder / "metrics.csv"
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]


def _kept(folder: Path, card: Card) -> AnyMetrics | None:
    """What `vitrail evaluate` wrote down of the run's own validation images, if it did."""
    found = []
    for file in folder.glob("evaluation/*-val/metrics.json"):
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["images"] == card.metrics.get("images"):
            found.append((abs(document["loss"] - card.metrics["loss"]), document))
    if not found:
        return None
    return _restore(card, min(found, key=lambda pair: pair[0])[1])


def _restore(card: Card, document: dict[str, Any]) -> AnyMetrics:
    """The inverse of `to_json`, without what every image by itself was taken for."""
    none = np.zeros((0, len(card.classes)))
    if card.task == "multiclass":
        names = ("images", "top1", "top5", "loss", "ece")
        return Metrics(
            **{name: document[name] for name in names},
            per_class=[ClassScore(**score) for score in document["per_class"]],
            confusion=np.array(document["confusion"], np.int64),
            bins=[Bin(**bin) for bin in document["bins"]],
        )
    if card.task == "multilabel":
        return LabelMetrics(
            **{name: document[name] for name in ("images", "map", "macro_f1", "micro_f1", "loss")},
            per_label=[LabelScore(**score) for score in document["per_label"]],
            probabilities=none,
            targets=none.astype(np.float32),
            chosen_here=document["thresholds_chosen_on_these_images"],
        )
    return ValueMetrics(
        **{name: document[name] for name in ("images", "mae", "rmse", "r2", "loss")},
        per_value=[ValueScore(**score) for score in document["per_value"]],
        predicted=none,
        targets=none,
    )
