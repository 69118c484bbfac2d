"""Draws the figures of docs/explain.md about classes and the data set, and prints the faithfulness scores it quotes.

vitrail train fashion-mnist --model vit_nano4 --img-size 28 --stem patch --pool cls --time-budget 40m
python docs/explain_data.py runs/fashion-mnist-vit_nano4
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from vitrail.charts.style import save
from vitrail.explain.attention import rollout
from vitrail.explain.faithfulness import Faithfulness, faithfulness
from vitrail.explain.figures import data as data_figures
from vitrail.explain.figures.relevance import relevances
from vitrail.explain.relevance import relevance
from vitrail.explain.subject import Subject, open_subject

IMAGES = Path(__file__).parent / "images"
EVERY = 4  # every fourth of the 256 sampled images is scored


def scores(subject: Subject) -> None:
    """Mean faithfulness of the maps, for the predicted class and for the runner-up."""
    images = torch.cat(list(subject.sample()))[::EVERY]  # they are sorted by class
    with torch.inference_mode():
        answer, runner_up = subject.model(images).argsort(dim=1, descending=True)[:, :2].T.cpu().numpy()
    maps = {
        "rollout": rollout(subject.model, images),
        "relevance for the answer": relevance(subject.model, images, answer),
        "relevance for the runner-up": relevance(subject.model, images, runner_up),
        "for the runner-up over the answer": relevance(subject.model, images, runner_up, instead=answer),
    }
    for name, classes in (("answer", answer), ("runner-up", runner_up)):
        print(f"probability of the {name}, mean over {len(images)} images")
        for title, each in maps.items():
            report(title, faithfulness(subject.model, images, each, classes))


def report(name: str, measured: Faithfulness) -> None:
    areas = {
        "deletion": (measured.deletion, measured.random_deletion),
        "insertion": (measured.insertion, measured.random_insertion),
    }
    words = [f"{k} {measured.area(a).mean():.3f} (random {measured.area(b).mean():.3f})" for k, (a, b) in areas.items()]
    better = np.mean(measured.score > 0)
    print(f"  {name}: score {measured.score.mean():+.3f}, above 0 for {better:.0%}; {', '.join(words)}", flush=True)


def main(run: str) -> None:
    subject = open_subject(run)
    scores(subject)
    some = replace(subject, pictures=subject.pictures[1::2][::2])  # one of every second class
    of_the_data = (data_figures.wrong, data_figures.uncertain, data_figures.nearest, data_figures.embedding)
    for drawing in chain(relevances(some), *(draw(subject) for draw in of_the_data)):
        save(drawing.figure, IMAGES / f"explain-fashion-{drawing.name}.png")
        print(drawing.name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
