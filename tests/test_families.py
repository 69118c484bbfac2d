"""Every family goes the whole way: it trains, resumes, explains, converts and reports with the same commands.

That every family exports is tested in verbs/test_export.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from stopping import copied

import vitrail
from vitrail import models
from vitrail.errors import UserError
from vitrail.weights import load, open_run, recognise

pytestmark = pytest.mark.usefixtures("plain_runs")

FAMILIES = [*dict.fromkeys(map(models.family, models.CONFIGS.values())), "deit"]  # but for towers and heads


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 of the digits."""
    images, labels = load_digits(return_X_y=True)
    path = tmp_path_factory.mktemp("few") / "few.npz"
    np.savez(path, x_train=(images[:600].reshape(-1, 8, 8) * 15).astype(np.uint8), y_train=labels[:600])
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def finished(
    request: pytest.FixtureRequest, few: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """A family, its run of two epochs, and what a kill after the first epoch would have left of that."""
    folder = tmp_path_factory.mktemp(request.param)
    killed = folder / "killed"
    with copied(folder / "run", killed, "last/state.pt"):
        run = vitrail.train(few, model=request.param, epochs=2, batch_size=32, out=folder, name="run")
    return request.param, run, killed


def test_it_is_what_was_asked_for(finished):
    family, run, _ = finished
    _, card = open_run(run)
    assert models.is_meant(card.model, family)
    assert card.metrics["top1"] > 0.15  # chance is a tenth


def test_it_resumes_to_the_bit(finished):
    _, run, killed = finished
    assert len((killed / "metrics.csv").read_text().splitlines()) == 2
    vitrail.train(resume=killed)
    assert (killed / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


# Figures that are drawn of the model itself; those of its data do not depend on the family.
ATTENTION = {"rollout", "heads", "distance"}
FIGURES = {
    "vit": ATTENTION | {"positions"},
    "deit": ATTENTION | {"positions"},
    "hybrid": ATTENTION | {"positions"},
    "swin": ATTENTION | {"windows", "bias"},
    "swin_v2": ATTENTION | {"windows", "bias"},
    "coatnet": ATTENTION | {"bias"},
    "pvt": ATTENTION | {"positions"},
    "pvt_v2": ATTENTION,
    "mixer": {"mixing"},
    "bit": set(),
}


def test_it_is_explained(finished, few, digits):
    family, run, _ = finished
    of_data = {"map", "neighbours", "wrong", "uncertain"} if family == "vit" else set()
    explained = vitrail.explain(run, [digits / "0" / "0.png"], data=few if of_data else None)
    drawn = {file.stem.partition("-")[0] for file in explained.files}
    assert drawn == FIGURES[family] | {"relevance", "filters"} | of_data


@torch.no_grad()
def test_it_is_converted_to_what_has_a_place_for_it(finished, tmp_path):
    _, run, _ = finished
    model, card = open_run(run)
    images = torch.randn(2, card.config.channels, *card.config.img_size, generator=torch.Generator().manual_seed(1))
    names = {
        "vitrail": "model.safetensors",
        "timm": "model.safetensors",
        "npz": "model.npz",
        "big_vision": "model.npz",
        "hf": "",
    }
    layouts = recognise.formats_of(models.family(card.config))
    for format in ["vitrail", *(format for format, layout in layouts.items() if layout.write)]:
        path = tmp_path / format / names.get(format, "model.safetensors")
        if format != "vitrail" and layouts[format].unsupported(card.config):
            with pytest.raises(UserError, match=f"which {format} does not support"):
                vitrail.convert(run, path, to=format)
        else:
            again = load(vitrail.convert(run, path, to=format))
            assert torch.allclose(again(images), model(images), atol=1e-5), format


def test_its_report_shows_maps_and_filters(finished):
    family, run, _ = finished
    page = vitrail.report(run).read_text(encoding="utf-8")
    rolled = family in ("vit", "deit", "hybrid")
    assert ("attention rollout over all layers" if rolled else "evidence for the prediction") in page
    patches = family in ("mixer", "swin", "swin_v2", "pvt")  # the small ViTs have a convolutional stem
    assert ("Patch filters" if patches else "Filters of the first convolution") in page
