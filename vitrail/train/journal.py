"""What a run tells people: bars and log lines, train.log, metrics.csv, TensorBoard events, curves."""

from __future__ import annotations

import csv
import io
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tensorboardX import SummaryWriter
from tqdm import tqdm

from vitrail.charts import figures
from vitrail.config import Duration
from vitrail.errors import UserError
from vitrail.evaluate.metrics import shown
from vitrail.files import atomic_write, write_text
from vitrail.progress import log
from vitrail.train.run import Progress
from vitrail.train.schedule import Schedule

_LINE_EVERY = 30.0  # seconds between log lines within an epoch where there is no terminal
_DRAW_EVERY = 10.0  # seconds between drawings of the curves, which take a quarter of a second


class Journal:
    """Used as a context, around everything that happens in the run folder."""

    def __init__(self, run: Path):
        self._run = run
        self._file = logging.FileHandler(run / "train.log", encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
        self._terminal = sys.stderr.isatty()
        self._spoke = time.monotonic()
        self._drew = -math.inf

    def __enter__(self) -> Journal:
        log.addHandler(self._file)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, UserError):
            self._file.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, str(error), (), None))
        log.removeHandler(self._file)
        self._file.close()

    def steps(self, progress: Progress, schedule: Schedule) -> Iterator[int]:
        """The numbers of the steps that are left of this epoch, with bars or lines that show how it goes."""
        optim, per_epoch, total = schedule.optim, schedule.per_epoch, schedule.steps
        epoch, done = divmod(progress.step, per_epoch)
        images = optim.batch_size * optim.grad_accum_steps
        quiet = not self._terminal
        with (
            tqdm(total=total, initial=progress.step, desc="run", unit="step", leave=False, disable=quiet) as whole,
            tqdm(
                total=per_epoch,
                initial=done,
                desc=f"epoch {epoch + 1}/{schedule.epochs}",
                unit="step",
                leave=False,
                disable=quiet,
            ) as bar,
        ):
            progress.tick()
            for step in range(progress.step, (epoch + 1) * per_epoch):
                yield step
                seconds = progress.tick()
                progress.trained += seconds
                top1 = f"  top1 {progress.mean('top1'):.1%}" if "top1" in progress.sums else ""
                agree = f"  agree {progress.mean('agree'):.1%}" if "agree" in progress.sums else ""
                status = f"loss {progress.mean('loss'):.3f}{top1}{agree}  {images / seconds:,.0f} img/s"
                bar.set_postfix_str(status, refresh=False)
                bar.update()
                whole.update()
                if quiet and time.monotonic() - self._spoke > _LINE_EVERY:
                    self._spoke = time.monotonic()
                    left = Duration(schedule.seconds_left(progress))
                    log.info(f"epoch {epoch + 1}  step {step + 1}/{total}  {status}  {left} left")

    def epoch(self, rows: Sequence[dict[str, float]], schedule: Schedule, over: bool) -> None:
        """Writes down all epochs so far; the last one is new, and the end of the run if that is `over`."""
        epochs = schedule.epochs
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._run / "metrics.csv", text.getvalue())
        row = rows[-1]
        if over or time.monotonic() - self._drew > _DRAW_EVERY:
            with atomic_write(self._run / "curves.png") as path:
                figures.save(figures.curves(rows), path)
            self._drew = time.monotonic()
        with SummaryWriter(
            str(self._run / "tensorboard"), purge_step=int(row["epoch"]), filename_suffix=f".{row['epoch']:06}"
        ) as events:
            for name, value in row.items():
                if name not in ("epoch", "step"):
                    events.add_scalar(name, value, int(row["epoch"]))
        scores = {name.removeprefix("val_"): value for name, value in row.items() if name.startswith("val_")}
        loss = scores.pop("loss")
        agree = f"  agree {row['train_agree']:.1%}" if "train_agree" in row else ""
        teacher = f"  teacher {row['teach']:.0%}" if "teach" in row else ""
        log.info(
            f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}  train loss {row['train_loss']:.3f}{agree}  "
            f"val loss {loss:.3f}  {'  '.join(f'{name} {shown(name, value)}' for name, value in scores.items())}  "
            f"{Duration(row['seconds'])}  waited for data {row['wait']:.0%}{teacher}"
        )
