"""Measurements of a finished run: test accuracy, probes of its features, and looks into its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data import Data, open_data
from vitrail.data.loader import batches
from vitrail.evaluate.features import split_features, split_scores
from vitrail.evaluate.probes import fewshot, knn, linear
from vitrail.explain import attention_distance, position_similarity
from vitrail.runs.predictor import Predictor
from vitrail.runs.run import Run
from vitrail.studies.sets import SHOTS
from vitrail.studies.study import Job, Scores
from vitrail.weights import open_run

_DRAWS = 5  # of few-shot images
WATCHED = 128  # images in whose attention a look is taken


def measured(job: Job, run: Path, device: str) -> Scores:
    """Every score of a run, rounded. The engine is torch's, so that scores do not depend on what was the fastest."""
    scores: Scores = {}
    if not job.method:
        data = open_data(job.data)
        predictor = Predictor(run, device, engine="torch")
        data = data.read_as(predictor.card.preprocess.channels, predictor.card.preprocess.bits)
        for split, name in (("val", "held_out"), ("test", "top1"))[: 1 if job.tuning else 2]:
            file = Run(run).outputs_file(data.name, split)
            found, _, _ = split_scores(predictor, data.splits[split], file, keep=False, device=device, engine="torch")
            scores |= {name: found.summary()["top1"], f"{name}_loss": found.summary()["loss"]}
        scores["last"] = Run(run).history[-1]["val_top1"]  # of the last epoch, on held-out images
    for source, method in job.probes:
        scores |= _probed(run, open_data(source), method, Path(source).stem, device)
    if job.look:
        scores |= LOOKS[job.look](run, open_data(job.data), device)
    return {name: _rounded(value) for name, value in scores.items()}


def _probed(run: Path, data: Data, method: str, name: str, device: str) -> Scores:
    model, card = open_run(run, device, headless=True)
    data = data.read_as(card.preprocess.channels, card.preprocess.bits)
    features = [
        split_features(
            model,
            data.splits[part],
            card.preprocess,
            Run(run).features_file(name, part),
            device=device,
            engine="torch",
        )
        for part in ("train", "test")
    ]
    given = (features[0], data.splits["train"].targets, features[1], data.splits["test"].targets, data.classes)
    if method == "fewshot":
        found = fewshot(*given, shots=SHOTS, draws=_DRAWS)
        return {f"{shots.shots}-shot:{name}": shots.mean for shots in found.shots}
    probe = knn if method == "knn" else linear
    return {f"{method}:{name}": probe(*given).top1}


def _attention(run: Path, data: Data, device: str) -> Scores:
    """Mean attention distance of each head, as a share of the image, and the similarity of positions by distance."""
    model, card = open_run(run, device, headless=True)
    split = data.read_as(card.preprocess.channels, card.preprocess.bits).splits["test"]

    def images() -> Iterator[Tensor]:
        seen = 0
        for pixels, _ in batches(split, card.preprocess, 64, 1):
            yield card.preprocess.normalise(pixels.to(device))
            seen += len(pixels)
            if seen >= WATCHED:
                return

    with torch.inference_mode():
        distances = attention_distance(model, images()) / max(card.preprocess.img_size)
    similar = position_similarity(model)
    h, w = similar.shape[:2]
    rows, columns = np.mgrid[:h, :w]
    apart = np.abs(rows[:, :, None, None] - rows) + np.abs(columns[:, :, None, None] - columns)
    near, far = similar[apart == 1].mean(), similar[apart >= max(h, w) - 1].mean()
    line = (rows[:, :, None, None] == rows) | (columns[:, :, None, None] == columns)
    # At equal distances: places in the same line are nearer on average, and near places are similar anyway.
    steps = range(2, max(h, w))
    aligned = np.mean([similar[line & (apart == d)].mean() - similar[~line & (apart == d)].mean() for d in steps])
    return {
        "map_distance": distances.tolist(),
        "first_layer": float(np.nanmean(distances[0])),
        "last_layer": float(np.nanmean(distances[-1])),
        "first_layer_spread": float(np.nanmax(distances[0]) - np.nanmin(distances[0])),
        "last_layer_spread": float(np.nanmax(distances[-1]) - np.nanmin(distances[-1])),
        "near_minus_far": float(near - far),
        "aligned": float(aligned),
    }


LOOKS: dict[str, Callable[[Path, Data, str], Scores]] = {"attention": _attention}


def _rounded(value: Any) -> Any:
    return [_rounded(each) for each in value] if isinstance(value, list) else round(float(value), 6)
