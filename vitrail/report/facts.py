"""The facts of a report: a run with its model, data and validation scores.

Anything missing (a model before the first epoch, the data, scores) becomes a sentence in `notes`, not an error: the
page reports what is available.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.config import TrainConfig
from vitrail.data import Data
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.evaluate.features import measured_targets, split_scores
from vitrail.files import reading
from vitrail.models import Model
from vitrail.runs.predictor import Predictor
from vitrail.runs.run import Row, Run
from vitrail.tasks import Multiclass, Task, task_type
from vitrail.tasks.bootstrap import Samples
from vitrail.tasks.scores import Scores
from vitrail.weights import Card


@dataclass(frozen=True, eq=False)
class RunFacts:
    """A run with everything its report shows."""

    run: Run
    notes: tuple[str, ...] = ()
    card: Card | None = None  # None until the first epoch is finished
    model: Model | None = None
    data: Data | None = None  # None if it cannot be opened
    scores: Scores | None = None
    samples: Samples = field(default_factory=Samples)
    outputs: NDArray[np.float32] | None = None  # for every validation image; None without data
    targets: NDArray[Any] | None = None  # what they are measured against; None without data
    device: str = "cpu"

    @property
    def folder(self) -> Path:
        return self.run.path

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def config(self) -> TrainConfig:
        return self.run.config

    @property
    def rows(self) -> list[Row]:
        return self.run.history

    @property
    def kept(self) -> int | None:
        """The epoch of the model; None if it is not recorded."""
        epoch = self.card.metrics.get("epoch") if self.card is not None else None
        return None if epoch is None or epoch > len(self.rows) else int(epoch)

    @property
    def calibrated(self) -> str:
        """The cross-fitted calibration error as text; empty if there is none."""
        error = self.card.metrics.get("crossfitted_ece") if self.card is not None else None
        return "" if error is None else f"{error:.1%}"

    @property
    def stopped(self) -> bool:
        """Whether training is unfinished."""
        return not self.run.finished

    @property
    def task(self) -> Task:
        """The task of the model or data; if neither is available that of the settings, or multiclass."""
        source = self.card or self.data
        return task_type(self.config.source.task or Multiclass.name)() if source is None else source.task

    @property
    def split(self) -> str:
        """The split that the model was measured on: "test" or "validation"."""
        splits = self.data.splits if self.data is not None else {}
        return "test" if "val" in splits and splits.get("test") is splits["val"] else "validation"


def load_facts(run: str | Path, batch_size: int = 256, workers: int = 2, device: str | None = None) -> RunFacts:
    """Opens a run and its data, and measures its model as far as available."""
    opened = Run.open(run)
    device = choose_device(device)
    if not opened.has_model:
        data, notes = _open_data(opened, None)
        return RunFacts(
            opened, (*notes, "There is no model yet: the first epoch is not finished."), data=data, device=device
        )
    model = opened.model(device)
    card = replace(opened.card, task=opened.card.task.bound(model))
    data, notes = _open_data(opened, card)
    facts = RunFacts(opened, notes, card, model, data, device=device)
    if not card.task.labelled:
        return replace(facts, scores=_recorded(facts))
    if data is not None:
        read = data.read_as(card.preprocess.channels, card.preprocess.bits)
        predictor = Predictor.of(model, card, device)
        targets = measured_targets(predictor, read.splits["val"], workers)
        scores, outputs, _ = split_scores(
            predictor,
            read.splits["val"],
            opened.outputs_file(data.name, "val"),
            cache_gb=opened.config.source.cache_gb,
            batch_size=batch_size,
            workers=workers,
            device=device,
        )
        samples = card.task.sample(scores, outputs, targets)
        return replace(facts, outputs=outputs, targets=targets, scores=scores, samples=samples)
    with reading(opened.path / "evaluation", "a folder of scores"):
        kept = opened.own_scores()
        earlier = None if kept is None else card.task.restore(kept)
    if earlier is not None:
        note = "The scores were measured when the data was available."
        return replace(facts, notes=(*notes, note), scores=earlier, samples=card.task.sample(earlier, None, None))
    return facts


def _recorded(facts: RunFacts) -> Scores:
    """The scores of a self-supervised model as training recorded them: its decoder or head is not part of it."""
    assert facts.card is not None
    row = facts.rows[facts.kept - 1] if facts.kept else {}
    found = {name.removeprefix("val_"): value for name, value in row.items() if name.startswith("val_")}
    return facts.card.task.restore(facts.card.metrics | found | {"features": facts.card.config.features})


def _open_data(run: Run, card: Card | None) -> tuple[Data | None, tuple[str, ...]]:
    """The data of a run with its splits, or None and the reason."""
    try:
        data = run.data(card)
        if card is not None:
            data.read_as(card.preprocess.channels, card.preprocess.bits)
    except UserError as error:
        return None, (f"The data cannot be opened: {error}",)
    return data, ()
