"""A class of few images is learnt when it is weighed or sampled as much as the others, and a run says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import vitrail
from vitrail.errors import UserError
from vitrail.train.objectives import weigh

RARE = "3"


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Digits, of one of which train has five images only."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    train = np.concatenate([np.flatnonzero(labels[:800] == c)[: 5 if str(c) == RARE else None] for c in range(10)])
    path = tmp_path_factory.mktemp("data") / "uneven.npz"
    np.savez(path, x_train=pixels[train], y_train=labels[train], x_val=pixels[1000:1300], y_val=labels[1000:1300])
    return path


@pytest.fixture(scope="module")
def train(uneven, tmp_path_factory):
    """Trains on them for a few seconds, and returns the recall of every class and the log."""

    def run(**settings):
        out = tmp_path_factory.mktemp("runs")
        settings |= {"model": "vit_nano4", "img_size": 8, "stem": "patch", "epochs": 4, "batch_size": 64}
        run = vitrail.train(uneven, out=out, **settings)
        metrics = json.loads((run / "evaluation/uneven-val/metrics.json").read_text())
        return {score["name"]: score["recall"] for score in metrics["per_class"]}, (run / "train.log").read_text()

    return run


@pytest.fixture(scope="module")
def plain(train):
    return train()


@pytest.mark.parametrize("setting", ["class_weights", "balanced_sampling"])
def test_the_rare_class_is_recognised_more_often(train, plain, setting):
    recall, said = train(**{setting: True})
    assert recall[RARE] > plain[0][RARE] + 0.2
    assert np.mean(list(recall.values())) > np.mean(list(plain[0].values()))
    assert "times as many images" not in said


def test_a_run_on_uneven_classes_says_what_to_do(plain, trained):
    assert f"times as many images as '{RARE}' (" in plain[1]
    assert "try --balanced-sampling" in plain[1]
    assert "--balanced-sampling" not in (trained / "train.log").read_text()


def test_one_way_is_enough(uneven):
    with pytest.raises(UserError, match="Choose one"):
        vitrail.train(uneven, class_weights=True, balanced_sampling=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_are_weighed_before_they_are_smoothed(smoothing):
    mixed = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0.7, 0, 0.3]])
    weights = torch.tensor([0.5, 1.0, 40.0])
    weighed = weigh(mixed * (1 - smoothing) + smoothing / 3, weights, smoothing)
    assert torch.allclose(weighed.sum(dim=1), mixed @ weights)  # an image weighs what its classes do
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    alone = [F.cross_entropy(logits[:1], torch.tensor([c]), label_smoothing=smoothing) * weights[c] for c in range(3)]
    first, last = (F.cross_entropy(logits[:1], weighed[i : i + 1]) for i in (0, 2))
    assert torch.allclose(first, alone[0])
    assert torch.allclose(last, 0.7 * alone[0] + 0.3 * alone[2])
