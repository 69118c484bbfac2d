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

from vitrail.charts.style import save
from vitrail.explain.faithfulness import faithfulness
from vitrail.explain.figures import attention, weights
from vitrail.explain.figures.relevance import relevances
from vitrail.explain.figures.windows import windows
from vitrail.explain.relevance import relevance
from vitrail.explain.subject import Drawing, Subject, open_subject
from vitrail.models import Model, family

IMAGES = Path(__file__).parent / "images"
EVERY = 16  # every sixteenth of the 256 sampled images is scored


def draw(subject: Subject, name: str) -> Iterator[Drawing]:
    if name == "mixer":
        yield from weights.mixing(subject)
    elif name == "swin":
        yield from windows(replace(subject, pictures=subject.pictures[4:10:2]))  # of three classes
        yield from attention.distance(subject)
    elif name == "pvt":
        yield from attention.heads(replace(subject, pictures=subject.pictures[6:7]))
    else:
        yield from relevances(replace(subject, pictures=subject.pictures[1::4]))  # of every second class


def scores(subject: Subject, model: Model) -> None:
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


def stage_before(model: Model, images: Tensor, classes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Gradient times activation of the second-to-last stage: (B, h, w)."""
    found: list[Tensor] = []

    def keep(_: object, __: object, output: Tensor) -> None:
        output.retain_grad()
        found.append(output)

    with model.get_submodule(f"layers.{len(model.config.grids) - 2}.blocks")[-1].register_forward_hook(keep):
        logits = model(images)
    logits[torch.arange(len(images)), torch.from_numpy(classes)].sum().backward()
    return (found[0] * found[0].grad).sum(dim=1 if family(model.config) == "bit" else 3).detach().numpy()


def main(*runs: str) -> None:
    for run in runs:
        subject = open_subject(run)
        name = family(subject.model.config)
        print(f"{name}: {subject.card.metrics}", flush=True)
        for drawing in draw(subject, name):
            save(drawing.figure, IMAGES / f"explain-{name}-{drawing.name.split('-')[0]}.png")
        if name in ("bit", "swin"):
            scores(subject, subject.model)


if __name__ == "__main__":
    main(*sys.argv[1:])
