"""Suspicious labels: images whose label a trained model contradicts with confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.data.audit.findings import Finding, Item
from vitrail.data.dataset import Numbers, Split
from vitrail.data.images import Pixels
from vitrail.errors import UserError, shortlist
from vitrail.evaluate.stream import run_split
from vitrail.models import Model
from vitrail.progress import log
from vitrail.weights import Card

# A label is contradicted if the model's class has a probability above 1/2, and at least 19 times that of the label. A
# threshold on the probability alone would not do: label smoothing and mixup keep models below 95 %.
LIKELY, SURE = 0.5, 0.95
_MOST = 100


def suspicious_labels(model: Model, card: Card, items: Sequence[Item], workers: int, device: str) -> list[Finding]:
    """Images that the model confidently assigns to a class other than their label, most confident first."""
    if not card.task.single:
        raise UserError(f"--run needs a model with one class per image; this one is {card.task.title}.")
    numbers = {name: number for number, name in enumerate(card.classes)}
    known = [item for item in items if item.label in numbers]
    strange = sorted({item.label for item in items} - set(numbers))
    if not known:
        raise UserError(
            f"The run and the data have no class in common: the data has {shortlist(strange, 5)}, the run "
            f"{shortlist(card.classes, 5)}. Use a run trained on similar data."
        )
    if strange:
        log.warning("The run lacks the classes %s: images with these labels are not checked.", shortlist(strange, 5))
    seen = card.preprocess
    split = _Items(known, np.array([numbers[item.label] for item in known], np.int64), seen.channels, seen.bits)
    logits, labels = run_split(model, split, card.preprocess, workers=workers, device=device, title="checking labels")
    chances = card.task.means(logits)
    said = chances.argmax(axis=1)
    own, given = (chances[np.arange(len(known)), which] for which in (said, labels))
    doubted = np.flatnonzero((own >= LIKELY) & (own >= SURE * (own + given)) & (said != labels))
    doubted = doubted[np.argsort(given[doubted] / own[doubted], kind="stable")]
    if len(doubted) > _MOST:
        log.info("The run contradicts %d labels; the %d most confident are listed.", len(doubted), _MOST)
    findings = []
    for i in doubted[:_MOST].tolist():
        label, other = card.classes[labels[i]], card.classes[said[i]]
        detail = f"labelled '{label}' ({given[i]:.1%}), the model says '{other}' ({own[i]:.1%})"
        findings.append(Finding("suspicious", "note", detail, (known[i].name,)))
    return findings


@dataclass(frozen=True, eq=False)
class _Items(Split):
    """Audited images as a split."""

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
