"""The logs of a run: progress bars, log lines, train.log, metrics.csv, TensorBoard events, curves.png."""

from __future__ import annotations

import csv
import io
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm

from vitrail.charts.draw import save_charts
from vitrail.charts.measure import number
from vitrail.config import Duration
from vitrail.errors import UserError
from vitrail.files import open_to_append, write_text
from vitrail.progress import LINE_EVERY, log
from vitrail.runs.run import Run
from vitrail.tasks import Task
from vitrail.train.loggers import Trackers
from vitrail.train.progress import Progress
from vitrail.train.schedule import Schedule

_DRAW_EVERY = 10.0  # seconds between drawings of the curves; one takes a quarter of a second


def _loss(value: float) -> str:
    """A loss with three decimals, or two significant digits if it is small."""
    return f"{value:.3f}" if abs(value) >= 0.01 else number(value, 2)


class _LogFile(logging.FileHandler):
    def _open(self) -> io.TextIOWrapper:
        return open_to_append(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:
        """Loses a line on a full disk, which the next checkpoint reports; the default prints a traceback."""


@contextmanager
def _errors_of_threads() -> Iterator[None]:
    """Raises the first error of a thread that ended in this context, instead of printing its traceback."""
    errors: list[BaseException] = []
    before = threading.excepthook
    threading.excepthook = lambda ended: errors.append(ended.exc_value or SystemExit())
    try:
        yield
    finally:
        threading.excepthook = before
    if errors:
        raise errors[0]


class Silence:
    """The journal of a process that writes nothing."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def step(self, progress: Progress, schedule: Schedule) -> None: ...

    def epoch(self, progress: Progress, schedule: Schedule, task: Task, over: bool) -> None: ...


class Journal(Silence):
    """A context that logs everything in the run folder."""

    def __init__(self, run: Path):
        self._run = Run(run)
        try:
            self._file = _LogFile(self._run.log_file)
        except OSError as error:
            raise UserError(
                f"{self._run.log_file} cannot be written: {error.strerror}. Check its permissions."
            ) from error
        self._file.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
        self._terminal = sys.stderr.isatty()
        self._bars: list[tqdm[Any]] = []  # of this epoch and of the run, on a terminal
        self._trackers = Trackers(self._run, self._run.config)
        self._spoke = time.monotonic()
        self._drew = -math.inf

    def __enter__(self) -> Journal:
        log.addHandler(self._file)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close_bars()
        self._trackers.close(failed=error is not None)
        if isinstance(error, UserError):
            self._file.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, str(error), (), None))
        log.removeHandler(self._file)
        self._file.close()

    def step(self, progress: Progress, schedule: Schedule) -> None:
        """Shows the last step: bars on a terminal, otherwise a line every half minute."""
        optim, total, taken = schedule.optim, schedule.steps, progress.step
        epoch, done = divmod(taken - 1, schedule.per_epoch)
        shares = [f"  {name} {progress.mean(name):.1%}" for name in ("top1", "agree") if name in progress.sums]
        speed = optim.batch_size / progress.took
        status = f"loss {progress.mean('loss'):.3f}{''.join(shares)}  {speed:,.0f} img/s"
        if self._terminal:
            if not self._bars:
                title = f"epoch {epoch + 1}/{schedule.title(epoch + 1)}"
                for name, length, initial in (("run", total, taken - 1), (title, schedule.per_epoch, done)):
                    self._bars.append(tqdm(total=length, initial=initial, desc=name, unit="step", leave=False))
            self._bars[-1].set_postfix_str(status, refresh=False)
            for bar in self._bars:
                bar.update()
            if done + 1 == schedule.per_epoch or schedule.over(progress):
                self._close_bars()
        elif time.monotonic() - self._spoke > LINE_EVERY:
            self._spoke = time.monotonic()
            left = Duration(schedule.seconds_left(progress))
            log.info(f"epoch {epoch + 1}  step {taken}/{total}  {status}  {left} left")

    def _close_bars(self) -> None:
        while self._bars:
            self._bars.pop().close()

    def epoch(self, progress: Progress, schedule: Schedule, task: Task, over: bool) -> None:
        """Writes metrics.csv, curves and events after an epoch; `over` marks the end of the run."""
        rows, epochs, config = progress.rows, schedule.title(len(progress.rows)), self._run.config
        text = io.StringIO()
        names = dict.fromkeys(name for row in rows for name in row)  # an earlier version may have begun the run
        writer = csv.DictWriter(text, fieldnames=list(names), restval="nan")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._run.metrics_file, text.getvalue())
        row = rows[-1]
        if over or time.monotonic() - self._drew > _DRAW_EVERY:
            save_charts(task.curves(rows, config, progress.kept or None), self._run.path)
            self._drew = time.monotonic()
        values = {name: value for name, value in row.items() if name not in ("epoch", "step")}
        folder, suffix = str(self._run.events_folder), f".{row['epoch']:06}"
        room = len(values) + 8  # the writer's thread ends with its first error, and a full queue would wait for it
        try:
            with (
                _errors_of_threads(),
                SummaryWriter(folder, purge_step=int(row["epoch"]), max_queue=room, filename_suffix=suffix) as events,
            ):
                for name, value in values.items():
                    events.add_scalar(name, value, int(row["epoch"]))
        except OSError as error:  # a copy of metrics.csv for TensorBoard: the run goes on without it
            log.warning(f"TensorBoard's events cannot be written to {folder}: {error.strerror or error}.")
        self._trackers.epoch(int(row["epoch"]), values)
        scores = {name.removeprefix("val_"): value for name, value in row.items() if name.startswith("val_")}
        titles = {measure.name: measure.title for measure in task.measures}
        loss = f"val {titles.get('loss', 'loss')} {_loss(scores.pop('loss'))}  " if "loss" in scores else ""
        chosen = task.chosen(schedule.stop.best).name
        details = {measure.name for measure in task.measures if measure.detail and measure.name != chosen}
        shown = "  ".join(
            f"{titles.get(name, name)} {task.text(name, value, 2)}"
            for name, value in scores.items()
            if task.telling(name) and name not in details
        )
        levels = {name: f" ({what.partition(':')[0]} {at:.3g})" for name, (what, at) in task.levels(config).items()}
        learnt = [(measure, row.get(f"train_{measure.name}")) for measure in task.logged]
        logged = "".join(
            f"  {measure.title} {measure.text(value, 2)}{levels.get(measure.name, '')}"
            for measure, value in learnt
            if value is not None
        )
        agree = f"  agree {row['train_agree']:.1%}" if "train_agree" in row else ""
        teacher = f"  teacher {row['teach']:.0%}" if "teach" in row else ""
        log.info(
            f"epoch {row['epoch']:>{len(epochs)}}/{epochs}  train loss {_loss(row['train_loss'])}{logged}{agree}  "
            f"{loss}{shown}  "
            f"{Duration(row['seconds'])}  waited for data {row['wait']:.0%}{teacher}"
        )
