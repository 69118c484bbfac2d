"""Draws the figures of docs/explain.md for families other than the ViT, and prints the scores it quotes.

    python docs/explain_families.py RUN…

Draws the token mixing of a Mixer, the windows and attention distances of a Swin, the attention maps of a PVT and the
relevance maps of a BiT. Scores the relevance maps of BiT and Swin against maps of the second-to-last stage. The page
has the commands that trained the runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.charts.figures import save
from vitrail.explain import drawings, relative_drawings
from vitrail.explain.faithfulness import faithfulness
from vitrail.explain.relevance import relevance
from vitrail.explain.subject import Drawing, Subject, open_subject
from vitrail.models import family
from vitrail.models.bit import BiT
from vitrail.models.mixer import Mixer
from vitrail.models.pvt import PVT
from vitrail.models.swin import Swin

IMAGES = Path(__file__).parent / "images"
EVERY = 16  # every sixteenth of the 256 sampled images is scored


def draw(subject: Subject) -> Iterator[Drawing]:
    if isinstance(subject.model, Mixer):
        yield from relative_drawings.mixing(subject)
    elif isinstance(subject.model, Swin):
        yield from drawings.windows(replace(subject, pictures=subject.pictures[4:10:2]))  # of three classes
        yield from drawings.distance(subject)
    elif isinstance(subject.model, PVT):
        yield from drawings.heads(replace(subject, pictures=subject.pictures[6:7]))
    else:
        yield from drawings.relevances(replace(subject, pictures=subject.pictures[1::4]))  # of every second class


def scores(subject: Subject, model: BiT | Swin) -> None:
    """Faithfulness of relevance maps of the last stage, also on the finer grid, and of the stage before."""
    images = torch.cat(list(subject.sample()))[::EVERY]  # they are sorted by class
    with torch.inference_mode():
        answer = model(images).argmax(dim=1).numpy()
    last, before = relevance(model, images, answer), stage_before(model, images, answer)
    finer = last.repeat(2, axis=1).repeat(2, axis=2)[:, : before.shape[1], : before.shape[2]]
    for name, maps in (("last stage", last), ("last stage, finer grid", finer), ("stage before", before)):
        measured = faithfulness(model, images, maps, answer)
        better = np.mean(measured.score > 0)
        print(f"  {name} {maps.shape[1:]}: score {measured.score.mean():+.3f}, above 0 for {better:.0%}", flush=True)


def stage_before(model: BiT | Swin, images: Tensor, classes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Gradient times activation of the second-to-last stage: (B, h, w)."""
    found: list[Tensor] = []

    def keep(_: object, __: object, output: Tensor) -> None:
        output.retain_grad()
        found.append(output)

    with model.layers[-2].blocks[-1].register_forward_hook(keep):
        logits = model(images)
    logits[torch.arange(len(images)), torch.from_numpy(classes)].sum().backward()
    return (found[0] * found[0].grad).sum(dim=1 if isinstance(model, BiT) else 3).detach().numpy()


def main(*runs: str) -> None:
    for run in runs:
        subject = open_subject(run)
        name = family(subject.model.config)
        print(f"{name}: {subject.card.metrics}", flush=True)
        for drawing in draw(subject):
            save(drawing.figure, IMAGES / f"explain-{name}-{drawing.name.split('-')[0]}.png")
        if isinstance(subject.model, BiT | Swin):
            scores(subject, subject.model)


if __name__ == "__main__":
    main(*sys.argv[1:])
