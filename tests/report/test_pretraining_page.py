"""The page of a run without labels: what was pre-trained, whether it learnt, what it sees, and what to do next."""

from __future__ import annotations

import csv
import html
import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.config import TrainConfig, load_yaml, override, save_yaml
from vitrail.errors import UserError
from vitrail.report.text import settings
from vitrail.runs.run import Run

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def dino(tiny: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a method that masks nothing, without a probe. Read-only."""
    settings = tiny | {"method": "dino", "epochs": 2, "batch_size": 256, "local_crops": 0, "prototypes": 64}
    return vitrail.pretrain("digits", out=tmp_path_factory.mktemp("runs"), name="dino", **settings)


@pytest.fixture(scope="module")
def page(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.report(pretrained, out=tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def dino_page(dino: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.report(dino, out=tmp_path_factory.mktemp("pages"))


def text_of(page: Path) -> str:
    """What can be read on a page, without scripts and tags, on one line."""
    words = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", page.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(words)).replace("\u2011", "-")  # non-breaking hyphens


def charts_of(page: Path) -> dict[str, Any]:
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', page.read_text())[1])
    return {spec["title"]: spec for spec in specs.values() if "title" in spec}


def changed(run: Path, folder: Path, **columns: float) -> Path:
    """A copy of a run with other values in the last row of its metrics."""
    shutil.copytree(run, folder)
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    rows[-1] |= columns
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


# One run


def test_the_headline_says_what_was_pretrained_and_how_well_its_features_classify(page, pretrained):
    knn = Run(pretrained).history[-1]["val_knn"]
    expected = r"A ViT with \d+ thousand parameters was pre-trained by MAE on 1,707 images of digits without labels: "
    assert re.search(rf"{expected}k-NN accuracy {100 * knn:.1f}% on digits\.", text_of(page))


def test_without_a_probe_the_headline_gives_loss_and_rank(dino_page):
    expected = r"pre-trained by DINO on 1,707 images of digits without labels: loss [\d.]+ , effective rank [\d.]+\."
    assert re.search(expected, text_of(dino_page))
    assert "k-NN accuracy" not in text_of(dino_page)


def test_there_is_nothing_about_predictions(page):
    text = text_of(page)
    for absent in ("Confusion", "Worst predictions", "each class", "top-1", "vitrail predict", "export", "±", "None"):
        assert absent not in text
    for present in ("Masked images", "Attention", "Learning rate", "Attention distance", "Position similarity"):
        assert present in text
    assert "1,707 train, 90 val images" in text
    assert "kept epoch 2, the last" in text
    assert page.read_text().count("data:image/") > 60  # a window, examples, pictures and maps


def test_curves_are_those_of_the_method(page, dino_page):
    measured = {"Loss", "Effective rank", "Spread", "Learning rate"}
    assert set(charts_of(page)) == {*measured, "k-NN accuracy", "Attention distance"}
    assert set(charts_of(dino_page)) == {*measured, "Entropy of the teacher", "Attention distance"}
    assert [line["name"] for line in charts_of(page)["Loss"]["lines"]] == ["training", "validation"]
    entropy, uniform = charts_of(dino_page)["Entropy of the teacher"]["lines"]
    assert (uniform["name"], uniform["dashed"]) == ("uniform: ln 64", True)
    assert uniform["y"] == [pytest.approx(math.log(64), abs=1e-3)] * 2
    assert not entropy["dashed"]


def test_pictures_are_reconstructions_where_there_are_some_and_attention(page, dino_page):
    assert "predicted for the masked parts" in text_of(page)
    assert "predicts for masked parts" not in text_of(dino_page)
    for each in (page, dino_page):
        assert each.read_text().count('alt="attention rollout"') == 8


@pytest.mark.parametrize(("damage", "reason"), [("fifo", "not a regular file"), ("eps", "not an image")])
def test_a_damaged_reconstruction_is_left_out(pretrained, tmp_path, caplog, damage, reason):
    run = shutil.copytree(pretrained, tmp_path / "run")
    file = run / "reconstruction.png"
    file.unlink()
    if damage == "fifo":
        os.mkfifo(file)
    else:
        Image.new("RGB", (4, 4)).save(file, "EPS")
    assert "predicted for the masked parts" not in text_of(vitrail.report(run))
    assert any(f"reconstruction.png is left out of the report: {reason}" in message for message in caplog.messages)


def test_a_model_without_attention_has_a_page_too(tmp_path):
    model = {"model": "mixer_nano", "img_size": 32, "method": "simmim", "epochs": 0.1, "batch_size": 64}
    text = text_of(vitrail.report(vitrail.pretrain("digits", out=tmp_path, name="run", **model)))
    assert "Token mixing" in text
    assert "attention rollout" not in text
    assert "Masked images" in text


@pytest.mark.parametrize(
    ("columns", "healthy", "sentence"),
    [
        ({}, True, r"The features look healthy: they differ between images \(effective rank [\d.]+ of \d+, spread"),
        ({"val_rank": 1.01}, False, r"The features have collapsed: images are mapped to almost the same point \(eff"),
        ({"val_spread": 0.0}, False, r"have collapsed.* Lower --lr, or mask less with --mask-ratio\."),
    ],
)
def test_the_page_says_whether_the_features_are_healthy(pretrained, tmp_path, columns, healthy, sentence):
    page = vitrail.report(changed(pretrained, tmp_path / "run", **columns))
    assert re.search(sentence, text_of(page))
    assert ('class="note good"' in page.read_text()) == healthy


def test_a_teacher_that_collapsed_is_named(dino, tmp_path):
    page = vitrail.report(changed(dino, tmp_path / "run", train_entropy=4.158))
    assert "The teacher has collapsed to the uniform distribution: its entropy is 4.16" in text_of(page)


def test_probes_of_the_features_are_listed(pretrained, tmp_path):
    run = changed(pretrained, tmp_path / "run")
    top1 = vitrail.evaluate(run, "digits", method="knn").top1
    assert f"Features measured with labels data method result digits, val knn top-1 {top1:.1%}" in text_of(
        vitrail.report(run)
    )


def test_every_command_of_the_page_works(pretrained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitrail.explain.subject.PICTURES", 1)
    image = tmp_path / "one.png"
    Image.new("L", (8, 8), 99).save(image)
    run = changed(pretrained, tmp_path / "run")
    commands = [
        html.unescape(text) for text in re.findall(r"<code>(vitrail .*?)</code>", vitrail.report(run).read_text())
    ]
    assert f"vitrail train LABELLED --weights {run}" in commands
    assert {command.split()[1] for command in commands} == {
        "train",
        "evaluate",
        "embed",
        "explain",
        "convert",
        "report",
    }
    for command in commands:
        words = [{"IMAGES": str(image), "LABELLED": "digits"}.get(word, word) for word in shlex.split(command)[1:]]
        words += ["--epochs", "0.1", "--name", "tuned"] if words[0] == "train" else []
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 0, f"{command}: {capsys.readouterr().err}"


def test_a_run_without_an_epoch_and_one_without_its_data(pretrained, tmp_path):
    (tmp_path / "young").mkdir()
    shutil.copy(pretrained / "config.yaml", tmp_path / "young")
    text = text_of(vitrail.report(tmp_path / "young"))
    assert "A ViT is learning to read digits without labels." in text
    assert "vitrail pretrain --resume" in text
    run = changed(pretrained, tmp_path / "moved")
    save_yaml(override(load_yaml(TrainConfig, run / "config.yaml"), {"data": "/gone"}), run / "config.yaml")
    page = vitrail.report(run)
    assert "The data cannot be opened" in text_of(page)
    assert "was pre-trained by MAE on gone without labels: k-NN accuracy" in text_of(page)
    assert 'alt="attention rollout"' not in page.read_text()
    assert "vitrail train LABELLED" in text_of(page)


def test_settings_are_those_of_the_verb_and_the_method(pretrained, trained):
    listed = [name for _, group in settings(Run(pretrained).config, "pretrain") for name, _, _ in group]
    assert {"task", "probe", "mask_ratio", "decoder_width", "lr"} <= set(listed)
    assert not {"prototypes", "smoothing", "teacher", "class_weights", "head"} & set(listed)
    assert "Self-supervision" not in dict(settings(Run(trained).config, "train"))


def test_the_log_and_the_curves_name_the_measures_of_the_method(pretrained, dino):
    log = (pretrained / "train.log").read_text()
    assert re.search(r"epoch 2/2  train loss \d.*  effective rank [\d.]+  spread [\d.]+  k-NN accuracy [\d.]+%", log)
    assert re.search(
        r"train loss [\d.]+  teacher entropy [\d.]+ \(uniform 4.16\)  val loss", (dino / "train.log").read_text()
    )
    assert "top-1" not in log
    with Image.open(pretrained / "curves.png") as image:
        assert image.width < 2000 < 2.2 * image.height  # five charts in two rows


# Several runs


def test_methods_are_compared_and_only_k_nn_ranks_them(pretrained, dino, tmp_path):
    page = vitrail.report([pretrained, dino])
    text = text_of(page)
    assert "2 runs side by side." in text  # one has no probe
    assert "k-NN accuracy on the same data does" in text
    assert "measured on different images" not in text
    assert "task mae dino" in text
    assert {"Loss", "Effective rank", "Spread", "k-NN accuracy"} == set(charts_of(page))
    assert 'class="score best"' in page.read_text()
    other = changed(pretrained, tmp_path / "other", val_knn=0.99)
    text = text_of(vitrail.report([pretrained, other], out=tmp_path / "probed.html"))
    assert "Best of 2 runs: other with 99.0% k-NN accuracy." in text


def test_runs_with_and_without_labels_are_not_compared(pretrained, trained, vitrail_says):
    with pytest.raises(UserError, match="different tasks cannot be compared: MAE and multi-class"):
        vitrail.report([pretrained, trained])
    code, _, error = vitrail_says("report", trained, pretrained)
    assert code == 2
    assert error.count("\n") == 1
