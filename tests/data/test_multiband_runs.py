"""Runs on images of many bands, of 16 bits and of floats."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from bands import BANDS, DEEP, folder_of, npy, tiff
from PIL import Image

import vitrail
from vitrail.cli import main
from vitrail.data import open_data
from vitrail.data.images import survey_image
from vitrail.data.pixels import to_pil
from vitrail.errors import UserError
from vitrail.verbs.check import check

pytestmark = pytest.mark.usefixtures("plain_runs")

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def quick(small) -> dict[str, Any]:
    """Settings with which a run on two dozen images takes a second."""
    return small | {"epochs": 8, "batch_size": 8, "val_fraction": 0.25}


@pytest.fixture(scope="module")
def deep_run(tmp_path_factory, quick) -> tuple[Path, Path]:
    """A folder of 16-bit images with 5 bands, and a run that was trained on it."""
    root = tmp_path_factory.mktemp("deep")
    data = folder_of(root / "satellite", count=20)
    return data, vitrail.train(data, out=root / "runs", name="deep", randaug=1, **quick).path


def test_bands_are_trained_on_and_what_they_need_is_kept_with_the_model(deep_run):
    data, run = deep_run
    seen = json.loads((run / "model.json").read_text())["preprocess"]
    assert (seen["channels"], seen["bits"]) == (5, 16)
    values = np.stack([np.load(path) for path in data.rglob("*.npy")]) / 65535
    np.testing.assert_allclose(seen["mean"], values.mean(axis=(0, 1, 2)), rtol=0.1)
    assert len(seen["std"]) == 5
    config = yaml.safe_load((run / "config.yaml").read_text())["input"]
    assert (config["normalize"], config["mean"], config["std"]) == ("dataset", seen["mean"], seen["std"])
    assert "5 channels of 16 bits; mean 0.0" in (run / "train.log").read_text()


def test_a_run_on_bands_is_evaluated(deep_run):
    _, run = deep_run
    assert vitrail.evaluate(run).top1 > 0.8  # bright and dark differ by much more than a grey level of 8 bits
    with pytest.raises(UserError, match="'channels' must be 4"):
        vitrail.evaluate(run, folder_of(run.parent / "other", channels=4, count=2))


def test_a_run_on_bands_predicts_files_and_says_which_do_not_fit(deep_run, tmp_path):
    data, run = deep_run
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    found = list(vitrail.predict(run, [data / "dark", data / "bright" / "3.npy", tmp_path / "photo.png"], top=1))
    assert [p.labels for p in found[:20]].count(("dark",)) > 15
    assert found[20].labels == ("bright",)
    assert found[21].error == "3 channels, which cannot be converted to 5"


def test_a_run_on_bands_resumes_with_the_numbers_it_measured(deep_run):
    _, run = deep_run
    before = (run / "model.json").read_text()
    vitrail.train(resume=run)
    assert (run / "model.json").read_text() == before
    with pytest.raises(UserError, match="normalize half instead of dataset"):
        vitrail.train(resume=run, normalize="half")


def test_bands_are_checked_and_drawn(deep_run, tmp_path):
    _, run = deep_run
    folder = folder_of(tmp_path / "satellite", count=6)
    (folder / "dark" / "twin.npy").write_bytes((folder / "dark" / "1.npy").read_bytes())
    tiff(folder / "dark" / "pages.tif", DEEP[:8, :8, :4], **BANDS)
    audit = check(folder, run=run, out=tmp_path / "out")
    assert audit.modes == {"16-bit 5 bands": 13, "16-bit 4 bands": 1}
    kinds = {finding.kind: finding for finding in audit.findings}
    assert kinds["duplicate"].files == (str(folder / "dark" / "1.npy"), str(folder / "dark" / "twin.npy"))
    assert (kinds["mixed"].severity, kinds["mixed"].detail) == ("error", "4 bands, not 5 bands")
    assert audit.sheet is not None
    assert audit.sheet.exists()


def test_a_picture_of_bands_shows_the_first_three():
    shown = np.asarray(to_pil((DEEP // 16).astype(np.uint16)))
    assert (shown.shape, shown.min(), shown.max()) == ((12, 16, 3), 0, 255)
    assert to_pil(DEEP[:, :, :2]).mode == "L"
    assert np.asarray(to_pil(np.full((2, 2, 1), 5.0, np.float32))).tolist() == [[0, 0], [0, 0]]


def test_a_survey_names_the_format_and_the_bands(tmp_path):
    survey, small = survey_image(npy(tmp_path / "a.npy", DEEP))
    assert (survey.format, survey.mode, small.shape) == ("NPY", "16-bit 5 bands", (16, 16))
    survey, _ = survey_image(tiff(tmp_path / "a.tif", DEEP[:, :, :3].astype(np.float32), photometric="rgb"))
    assert (survey.format, survey.mode) == ("TIFF", "floating-point colour")


def test_floats_of_any_range_are_trained_on(tmp_path, quick):
    data = folder_of(tmp_path / "floats", channels=2, dtype=np.float32)
    for path in data.rglob("*.npy"):
        np.save(path, -np.load(path))
    run = vitrail.train(data, out=tmp_path / "runs", **quick)
    seen = json.loads((run / "model.json").read_text())["preprocess"]
    assert seen["bits"] == 32
    assert all(-3600 < mean < -100 for mean in seen["mean"])
    with pytest.raises(UserError, match="'bits' must be 32"):
        vitrail.train(data, out=tmp_path / "runs", bits=8, **quick)


def test_transparency_is_a_channel_if_it_is_asked_for(tmp_path, quick):
    for label, alpha in (("clear", 10), ("solid", 250)):
        (tmp_path / "icons" / label).mkdir(parents=True)
        for number in range(10):
            values = RNG.integers(0, 256, (8, 8, 4), dtype=np.uint8)
            values[..., 3] = alpha
            Image.fromarray(values).save(tmp_path / "icons" / label / f"{number}.png")
    run = vitrail.train(tmp_path / "icons", out=tmp_path / "runs", channels=4, normalize="dataset", **quick)
    seen = json.loads((run / "model.json").read_text())["preprocess"]
    assert (seen["channels"], seen["bits"]) == (4, 8)
    assert seen["mean"][3] == pytest.approx(130 / 255, abs=1e-3)
    assert vitrail.evaluate(run).top1 == 1
    assert open_data(tmp_path / "icons").channels == 3


def test_the_command_line_takes_the_numbers(tmp_path, small):
    data = folder_of(tmp_path / "deep", channels=2, count=4)
    words = f"--weights {small['weights']} --epochs 1 --mean 0.02 0.03 --std 0.01"
    with pytest.raises(SystemExit) as caught:
        main(["train", str(data), "--out", str(tmp_path), "--name", "run", *words.split()])
    assert caught.value.code == 0
    assert re.search(r"mean 0\.02, 0\.03, std 0\.01 ", (tmp_path / "run" / "train.log").read_text())
