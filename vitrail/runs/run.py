"""Run: the folder written by training, as an object.

| file or folder                       | content                                                        |
|--------------------------------------|----------------------------------------------------------------|
| `config.yaml`                        | every setting, resolved                                        |
| `model.safetensors`, `model.json`    | the kept model so far, and its card                            |
| `metrics.csv`                        | one row per epoch                                              |
| `last/state.pt`, `last/shards-…/`    | the checkpoint from which training resumes; what is sharded    |
| `train.log`, `curves.png`, `tensorboard/` | the log, the curves, the events                            |
| `.lock`                              | held by the process that trains the run                        |
| `.launch`                            | of a run under torchrun: the name of its command               |
| `trackers.json`                      | with --log: the names of the run in wandb and mlflow           |
| `evaluation/<data>-<split>/`         | metrics, tables, figures and outputs of `evaluate`             |
| `features/<data>-<split>.npz`        | feature vectors                                                |
| `explain/`, `report.html`            | figures of `explain`, the page of `report`                     |
| `reconstruction.png`, `attention.png` | of a self-supervised run: its predictions, or its attention   |
| `decoder.safetensors`                | of a self-supervised run: its decoder or projection head       |
| `folds.json`, `folds.csv`, `fold1/`, …  | of a cross-validation: its scores, and one run per fold     |

Only this module knows these file names.
"""

from __future__ import annotations

import csv
import io
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from vitrail.config import CONFIG_FILE, TrainConfig, flat, load_yaml, save_yaml
from vitrail.config.splits import split_settings
from vitrail.data import Data, Source, full_name, is_object, is_there, open_data
from vitrail.errors import UserError
from vitrail.files import atomic_folder, locked, read_json, read_text, reading
from vitrail.progress import without_info
from vitrail.runs.exported import is_exported
from vitrail.tasks import METHODS
from vitrail.weights.card import DECODER_FILE, WEIGHTS_FILE, Card, read_card

if TYPE_CHECKING:
    from vitrail.models import Model

Row = dict[str, float]

# The data of runs that were trained on Python objects in this process, by folder.
_GIVEN: WeakValueDictionary[Path, Data] = WeakValueDictionary()


class Run:
    """A run folder. Files are read on access, so a Run may refer to a folder that is still incomplete.

    It can be used as a path: `open(run / "metrics.csv")`, `shutil.copytree(run, "copy")`.
    """

    def __init__(self, path: str | PathLike[str]):
        self.path = Path(path)
        self.holds: tuple[object, ...] = (_GIVEN.get(self.path.resolve()),)  # what `remember` keeps alive

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str | PathLike[str]) -> Path:
        return self.path / name

    def __eq__(self, other: object) -> bool:
        return self.path == (other.path if isinstance(other, Run) else other)

    def __hash__(self) -> int:
        return hash(self.path)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in a folder; raises UserError if the folder holds none."""
        run = cls(path)
        if not run.exists:
            raise UserError(
                f"{path} is not a run: it has no {CONFIG_FILE}. Use a folder made by `vitrail train` or `pretrain`."
            )
        return run

    @classmethod
    def of(cls, source: str | Path) -> Run:
        """The folder for results of a model: its own, or the current one for hub models."""
        if is_exported(source):
            return cls(Path(source).parent)
        from vitrail.weights import home

        return cls(home(source))

    @classmethod
    def create(cls, config: TrainConfig, overwrite: bool = False, launch: str = "") -> Run:
        """Creates the folder of a new run with its configuration; `overwrite` replaces one, `launch` is its command."""
        run = cls(Path(config.run.out) / config.run.name)
        for what, source in (("weights", config.weights), ("teacher", config.distillation.teacher)):
            if source is not None and Path(source).resolve().is_relative_to(run.path.resolve()):
                raise UserError(f"--{what} {source} is in {run.path}, the run to create. Choose another --name.")
        replace = run.stillborn or (overwrite and run.path.exists())
        if replace and not run.stillborn:
            if not run.exists:
                rule = "is not a vitrail run, so --overwrite does not replace it"
                raise UserError(f"{run.path} exists and {rule}. Choose another --name.")
            with locked(run.path):  # not while another process trains it
                pass
        try:
            with atomic_folder(run.path, replace) as folder:
                save_yaml(config, folder / CONFIG_FILE, run.origin(config))
                if launch:
                    (folder / ".launch").write_text(launch, encoding="utf-8")
        except FileExistsError:
            raise UserError(
                f"The run {run.path} exists. Choose another --name, continue it with "
                f"`{run.resume_command}`, or replace it with --overwrite."
            ) from None
        except OSError as error:
            why = f"{error.strerror}. Choose another --out."
            raise UserError(f"The run folder {run.path} cannot be created: {why}") from error
        return run

    # Paths

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def weights_file(self) -> Path:
        return self.path / WEIGHTS_FILE

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "last" / "state.pt"

    @property
    def log_file(self) -> Path:
        return self.path / "train.log"

    @property
    def curves_file(self) -> Path:
        return self.path / "curves.png"

    @property
    def reconstruction_file(self) -> Path:
        return self.path / "reconstruction.png"

    @property
    def attention_file(self) -> Path:
        return self.path / "attention.png"

    @property
    def decoder_file(self) -> Path:
        return self.path / DECODER_FILE

    @property
    def events_folder(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers_file(self) -> Path:
        """The names of the run in wandb and mlflow."""
        return self.path / "trackers.json"

    @property
    def explain_folder(self) -> Path:
        return self.path / "explain"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def folds_file(self) -> Path:
        return self.path / "folds.json"

    @property
    def launch(self) -> str:
        """The name of the torchrun command that made the run; empty for others."""
        file = self.path / ".launch"
        return read_text(file) if file.exists() else ""

    def evaluation(self, data: str, split: str, method: str = "head") -> Path:
        """The folder of `evaluate`'s metrics for a split."""
        return self.path / "evaluation" / (f"{data}-{split}" if method == "head" else f"{data}-{split}-{method}")

    def outputs_file(self, data: str, split: str) -> Path:
        """The file of the model's outputs for a split."""
        return self.evaluation(data, split) / "outputs.npz"

    def features_file(self, data: str, split: str) -> Path:
        """The file of the feature vectors of a split."""
        return self.path / "features" / f"{data}-{split}.npz"

    # Contents

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def exists(self) -> bool:
        """Whether the folder is a run, complete or not."""
        return self.config_file.is_file() and not self.stillborn

    @property
    def stillborn(self) -> bool:
        """Whether the folder has at most an empty configuration: earlier versions could be killed at that point."""
        files = list(self.path.iterdir()) if self.path.is_dir() else [self.path]
        return all(file == self.config_file and not file.stat().st_size for file in files)

    @cached_property
    def config(self) -> TrainConfig:
        return load_yaml(TrainConfig, self.config_file)

    @property
    def has_model(self) -> bool:
        """Whether the first epoch is complete."""
        return self.weights_file.exists()

    @cached_property
    def card(self) -> Card:
        """The card of the run's model; reading it does not need torch."""
        return read_card(self.weights_file.with_suffix(".json"))

    def model(self, device: str = "cpu") -> Model:
        """The run's model, in evaluation mode; without a head if it was pre-trained."""
        from vitrail.weights import open_run

        return open_run(self.path, device, headless=True)[0]

    def data(self, card: Card | None = None, **columns: Any) -> Data:
        """The data that the run was trained on, with the same splits; raises UserError if it has changed since.

        The data must have the classes of `card`. `columns` override the run's `data_dir`, `image_dir`, `image_column`
        and `label_column`.
        """
        if not self.exists:
            raise UserError(f"{self.path} has no {CONFIG_FILE}, so its training data is unknown. Give the data set.")
        if (given := _GIVEN.get(self.path.resolve())) is not None:
            return given
        if {"data", "val"} & {*(self.config.python or ())}:
            raise UserError(
                f"The data of {self.path} was given as a Python object, which is not stored. Give it again: "
                f"vitrail.evaluate(run, data), or to resume {self.resume_command}."
            )
        settings = split_settings(flat(self.config)) | {name: value for name, value in columns.items() if value}
        if card is not None:
            settings |= {"task": card.task.name}
        with without_info():  # which columns were chosen, and why: the run has logged it
            try:
                data = open_data(self.config.data, **settings)
            except UserError as error:
                if is_there(self.config.data):
                    raise
                raise UserError(
                    f"The data of this run, {self.config.data}, is no longer there. If it has moved, give its new "
                    f"place: vitrail evaluate {self.path} DATA"
                ) from error
        if card is None:
            return data
        if data.classes != card.classes:
            changed = sorted(set(data.classes) ^ set(card.classes))
            raise UserError(
                f"{self.config.data} had {len(card.classes)} classes when the run was trained, and has "
                f"{len(data.classes)}: {', '.join(changed[:5])} were added or removed. Restore them, or give other "
                "data."
            )
        return data

    def remember(self, data: Data) -> Run:
        """Lets `data` return this, in any `Run` of the folder, as long as one of them exists in this process."""
        _GIVEN[self.path.resolve()] = data
        self.holds = (*self.holds, data)
        return self

    def is_own(self, source: Source) -> bool:
        """Whether the run was trained on the data of this name."""
        return self.exists and not is_object(source) and full_name(source) == full_name(self.config.data)

    @property
    def history(self) -> list[Row]:
        """The rows of `metrics.csv`, one per epoch."""
        if not self.metrics_file.exists():
            return []
        with reading(self.metrics_file, "a table of epochs"):
            reader = csv.DictReader(io.StringIO(read_text(self.metrics_file), newline=""))
            rows = [{name: float(value) for name, value in row.items()} for row in reader]
            if not all({"epoch", "step", "lr", "seconds"} <= row.keys() for row in rows):
                raise ValueError("a column is missing")
            return rows

    @property
    def verb(self) -> Literal["train", "pretrain"]:
        """The verb that made the run."""
        return "pretrain" if self.config.source.task in METHODS else "train"

    @staticmethod
    def origin(config: TrainConfig) -> str:
        """What of a run was given as Python objects, and how to give it again; empty if nothing was."""
        if not config.python:
            return ""
        path = str(Path(config.run.out) / config.run.name)
        return f"Given as Python objects: {', '.join(config.python)}. To resume: {_python_call(config, path)}"

    @property
    def resume_command(self) -> str:
        """What continues the run: a command, or a call if it needs Python objects."""
        if self.exists and self.config.python:
            return _python_call(self.config, str(self.path))
        return f"vitrail {self.verb if self.exists else 'train'} --resume {self.path}"

    @property
    def finished(self) -> bool:
        """Whether training is complete, or was stopped early by --patience."""
        return self.used_up or self._stalled

    @property
    def _stalled(self) -> bool:
        """Whether the score has not improved for --patience epochs."""
        stop, rows = self.config.stop, self.history
        if not stop.patience or not rows or not self.has_model:
            return False
        measure = self.card.task.chosen(stop.best)
        scores = [row[f"val_{measure.name}"] for row in rows]
        leader = scores.index(measure.best(scores)) + 1
        return len(rows) - max([leader, *(stop.restarts or ())]) >= stop.patience

    @property
    def used_up(self) -> bool:
        """Whether the run has taken all its steps, or all its time."""
        optim, rows = self.config.optim, self.history
        if not rows:
            return False
        if optim.time_budget is not None:
            decayed = rows[-1]["lr"] <= optim.lr * (optim.min_lr + 0.1)
            return decayed and rows[-1]["seconds"] >= optim.time_budget / 2
        # The first row has the steps per epoch. The last epoch may be partial, if it has at least half a step.
        return rows[-1]["step"] >= round(rows[0]["step"] * optim.epochs)

    @property
    def scores(self) -> dict[str, float]:
        """The scores on the run's own validation images, such as "top1" and "loss"; their means over folds."""
        if not self.has_folds:
            return dict(self.card.metrics)
        with reading(self.folds_file, "the scores of folds"):
            means = read_json(self.folds_file)["mean"].items()
            return {name.removeprefix("val_"): float(value) for name, value in means}

    @property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """The content of every `metrics.json` that `evaluate` wrote, by folder name."""
        found = {}
        for file in sorted(self.path.glob("evaluation/*/metrics.json")):
            with reading(file, "a file of scores", "Delete it."):
                found[file.parent.name] = {**read_json(file)}
        return found

    def own_scores(self) -> dict[str, Any] | None:
        """The metrics of `evaluate` on the run's own validation images, or None."""
        metrics, found = self.card.metrics, []
        for name, document in self.evaluations.items():
            if name.endswith("-val") and document["images"] == metrics.get("images"):
                shared = [name for name, value in metrics.items() if isinstance(value, float) and name in document]
                found.append((sum(abs(document[name] - metrics[name]) for name in shared), document))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    # Cross-validation

    @property
    def has_folds(self) -> bool:
        """Whether the folder is a cross-validation, with one run per fold."""
        return self.exists and self.config.source.folds > 0 and self.config.source.fold == 0

    def fold(self, number: int) -> Run:
        """The run of a fold, counted from 1."""
        return Run(self.path / f"fold{number}")

    @property
    def folds(self) -> list[Run]:
        """The runs of the folds started so far, in order; empty for an ordinary run."""
        count = self.config.source.folds if self.has_folds else 0
        return [fold for fold in map(self.fold, range(1, count + 1)) if fold.exists]


def _python_call(config: TrainConfig, path: str) -> str:
    """The call that resumes a run with Python objects."""
    given = ["data" if name == "data" else f"{name}={name}" for name in config.python or ()]
    verb = "pretrain" if config.source.task in METHODS else "train"
    return f"vitrail.{verb}({', '.join([*given, f'resume={path!r}'])})"
