"""The figures of every family, drawn by the verb."""

from __future__ import annotations

import numpy as np
import pytest
from families import ATTENTIVE, SIZE, TINY, build_tiny, model_file
from peers import randomise

import vitrail
from vitrail.errors import UserError
from vitrail.explain.figures import attention as attention_figures
from vitrail.explain.figures import windows as windows_figure
from vitrail.models import build, create
from vitrail.models.coatnet import CoAtNetConfig

PLACES = {
    "swin": {"bias-stage1", "bias-stage2"},
    "swin_v2": {"bias-stage1", "bias-stage2"},
    "coatnet": {"bias-stage2"},
    "pvt": {"positions-stage1", "positions-stage2"},
    "mixer": {"mixing"},
    "hybrid": {"positions"},
}


def test_a_coatnet_that_only_convolves_is_drawn_without_attention(digits, tmp_path):
    model = randomise(build(CoAtNetConfig((16, 32), (1, 1), 8, convs=2, shrink=False, **SIZE)))
    files = sorted((digits / "3").glob("*.png"))[:1]
    result = vitrail.explain(model_file(tmp_path, model), files, out=tmp_path / "out")
    assert [file.stem for file in result.files] == ["relevance", "filters"]
    assert any("it has no attention" in note for note in result.notes)


@pytest.mark.parametrize("name", list(TINY))
def test_every_family_is_drawn(name, digits, tmp_path):
    model = build_tiny(name)
    files = sorted((digits / "3").glob("*.png"))[:1]
    result = vitrail.explain(model_file(tmp_path, model), files, out=tmp_path / "out", instead="b")
    drawn = {file.stem for file in result.files}
    assert {"relevance", "filters"} | PLACES.get(name, set()) <= drawn
    assert result.arrays["relevance"]["relevance"].shape == (1, *model.config.grid)
    told = any("no position embeddings or biases" in note for note in result.notes)
    assert told == (name in ("bit", "mixer", "pvt_v2"))


@pytest.mark.parametrize("name", ["hybrid", "swin, padded", "pvt", "pvt_v2, linear", "coatnet"])
def test_attention_of_each_family_is_drawn(name, digits, tmp_path, monkeypatch):
    chosen = (
        attention_figures.rollouts,
        attention_figures.heads,
        attention_figures.patches,
        windows_figure.windows,
        attention_figures.distance,
    )
    monkeypatch.setattr("vitrail.explain.explanation.FIGURES", chosen)
    files = sorted((digits / "3").glob("*.png"))[:1]
    file = model_file(tmp_path, randomise(build(ATTENTIVE[name])))
    result = vitrail.explain(file, files, patch=(1, 2), save_data=True)
    expected = ["rollout", f"heads-1-{files[0].stem}", f"patch-1-{files[0].stem}", "windows", "distance"]
    if not name.startswith("swin"):
        expected.remove("windows")
    assert list(result.arrays) == expected
    assert not result.notes
    layers = len(result.arrays["distance"]["distance"])
    with np.load(tmp_path / "explain" / f"{expected[1]}.npz") as arrays:
        assert list(arrays) == [f"layer{number + 1}" for number in range(layers)]


def test_a_patch_is_counted_in_the_first_stage_that_attends(tmp_path, digits):
    file = model_file(tmp_path, build(ATTENTIVE["swin"]))
    with pytest.raises(UserError, match=r"8 rows and 12 columns of patches, .* The last one is 7,11"):
        vitrail.explain(file, [next(digits.glob("3/*"))], patch=(8, 0))


def test_a_patch_of_a_model_without_attention_raises(tmp_path, digits):
    file = model_file(tmp_path, create("bit_nano", classes=3, channels=1))
    with pytest.raises(UserError, match="Attention cannot be drawn for a bit_nano: it has no attention"):
        vitrail.explain(file, [next(digits.glob("3/*"))], patch=(0, 0))
