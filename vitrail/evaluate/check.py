"""`check`: an audit of a data set, with the labels that a trained model contradicts and a sheet of the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import softmax

from vitrail.charts.figures import save
from vitrail.data.audit import audit
from vitrail.data.audit.contact_sheet import contact_sheet, sections
from vitrail.data.audit.findings import Audit, Finding, Item, worst_first
from vitrail.data.dataset import Numbers, Task
from vitrail.data.images import Pixels
from vitrail.device import choose_device
from vitrail.errors import UserError, shortlist
from vitrail.evaluate.features import run_split
from vitrail.files import atomic_write
from vitrail.models import Model
from vitrail.progress import log
from vitrail.weights import Card, open_run

# A model contradicts a label if its own choice is likelier than not, and 19 times in 20 if only the two are to choose
# from. The probability alone would not do: label smoothing and mixup teach a model never to be 95 % sure.
LIKELY, SURE = 0.5, 0.95
_MOST = 100


def check(
    data: str | Path,
    *,
    run: str | Path | None = None,
    out: str | Path | None = None,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: Task | None = None,
    workers: int = 2,
    device: str | None = None,
) -> Audit:
    """Finds what is wrong with a data set; with a trained `run`, labels that its model contradicts too.

    If there are pictures to look at, they are drawn to `check.png` in `out`, by default `check-<data>`.
    """
    if workers < 1:
        raise UserError(f"'workers' must be 1 or more, but it is {workers}.")
    device = choose_device(device)
    opened = None if run is None else open_run(run, device)  # before the images are read, which takes longer
    result = audit(data, data_dir, workers, image_column, label_column, task)
    if opened is not None:
        mixed = {name for finding in result.findings if finding.kind == "mixed" for name in finding.files}
        doubts = suspicious(*opened, [item for item in result.items if item.name not in mixed], workers, device)
        result = replace(result, findings=worst_first([*result.findings, *doubts]))
    if not sections(result):
        return result
    folder = Path(out) if out is not None else Path(f"check-{result.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be made: {error.strerror}. Choose another with --out.") from error
    with atomic_write(folder / "check.png") as path:
        save(contact_sheet(result), path)
    return replace(result, sheet=folder / "check.png")


def suspicious(model: Model, card: Card, items: Sequence[Item], workers: int, device: str) -> list[Finding]:
    """Images that the model is sure to be of another class than their label says, the surest first."""
    if card.task != "multiclass":
        raise UserError("Labels are checked by a run that tells classes apart, but this one was trained otherwise.")
    numbers = {name: number for number, name in enumerate(card.classes)}
    known = [item for item in items if item.label in numbers]
    strange = sorted({item.label for item in items} - set(numbers))
    if not known:
        raise UserError(
            f"The run knows none of the classes of the data, {shortlist(strange, 5)}: its classes are "
            f"{shortlist(card.classes, 5)}. Give a run that was trained on data like this."
        )
    if strange:
        log.warning("The run does not know %s: the labels of these images are not checked.", shortlist(strange, 5))
    seen = card.preprocess
    split = _Items(known, np.array([numbers[item.label] for item in known], np.int64), seen.channels, seen.bits)
    logits, labels = run_split(model, split, card.preprocess, workers=workers, device=device, title="checking labels")
    chances = softmax(logits, axis=1)
    said = chances.argmax(axis=1)
    own, given = (chances[np.arange(len(known)), which] for which in (said, labels))
    doubted = np.flatnonzero((own >= LIKELY) & (own >= SURE * (own + given)) & (said != labels))
    doubted = doubted[np.argsort(given[doubted] / own[doubted], kind="stable")]
    if len(doubted) > _MOST:
        log.info("The run contradicts %d labels; the %d of which it is surest are listed.", len(doubted), _MOST)
    findings = []
    for i in doubted[:_MOST].tolist():
        label, other = card.classes[labels[i]], card.classes[said[i]]
        detail = f"labelled '{label}' ({given[i]:.1%}), the model says '{other}' ({own[i]:.1%})"
        findings.append(Finding("suspicious", "note", detail, (known[i].name,)))
    return findings


@dataclass(frozen=True, eq=False)
class _Items:
    """Audited images as a split that a model can predict."""

    items: Sequence[Item]
    targets: Numbers
    channels: int
    bits: int

    def __len__(self) -> int:
        return len(self.items)

    def image(self, i: int) -> Pixels:
        return self.items[i].read(self.channels, self.bits)

    def name(self, i: int) -> str:
        return self.items[i].name
