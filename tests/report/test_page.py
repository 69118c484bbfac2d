"""Every run gets a page, whatever it lacks; and nothing else is touched."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from families import ATTENTIVE, TINY
from PIL import Image

import vitrail
from vitrail.config import TrainConfig, load_yaml, options, override, save_yaml
from vitrail.data.pixels import thumbnail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build, create
from vitrail.report.facts import RunFacts
from vitrail.report.images import Album, overlay, similarities, tiles
from vitrail.report.tables import Cell, Line, Table
from vitrail.report.text import settings
from vitrail.runs.run import Run
from vitrail.tasks import Multiclass
from vitrail.weights import Card, save

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def text_of(page: Path) -> str:
    """What can be read on a page, without scripts and tags, on one line."""
    words = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", page.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(words))


def untrained(folder: Path, like: Path, data: Path, classes: tuple[str, ...], **preprocess: int) -> Path:
    """A run whose model knows nothing: the configuration of another, on other data."""
    torch.manual_seed(0)
    read = Preprocess((8, 8), **({"channels": 1} | preprocess))
    model = create("vit_nano4", img_size=8, channels=read.channels, classes=len(classes), depth=1, stem="patch")
    torch.nn.init.normal_(model.head.weight)
    folder.mkdir()
    config = load_yaml(TrainConfig, like / "config.yaml")
    changes = {"data": str(data), "channels": read.channels, "bits": read.bits, "stem": "patch"}
    save_yaml(override(config, changes), folder / "config.yaml")
    card = Card(model="vit_nano4", config=model.config, task=Multiclass(classes), preprocess=read)
    save(folder / "model.safetensors", model, card)
    return folder


def copy(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder)
    return folder


# One run


def test_a_run_says_what_it_came_to(trained, tmp_path):
    page = vitrail.report(copy(trained, tmp_path / "run"))
    assert page == tmp_path / "run" / "report.html"
    assert 1_000_000 < page.stat().st_size < 5_000_000
    text = text_of(page)
    top1 = vitrail.evaluate(trained, out=tmp_path / "out").top1
    assert re.search(rf"classifies digits into 10 classes: {100 * top1:.1f}% ± \d\.\d of 359 validation", text)
    assert "1,438 train, 359 val images" in text
    assert re.search(r"hardware .+ \d+ threads?", text)
    assert re.search(r"throughput [\d,]+ images per second", text)
    for heading in ("Confusion matrix", "Reliability", "Worst predictions", "Best predictions", "Learning rate"):
        assert heading in text
    for heading in ("Attention distance", "Position similarity", "Patch filters", "Images of each class"):
        assert heading in text
    assert "weight_decay" in text
    assert "Training is not finished" not in text
    assert re.search(r"kept epoch \d of 2: top-1 \d", text)
    assert re.search(r"Logits are divided by a temperature of \d\.\d\d; before: calibration error", page.read_text())


def test_the_policy_allows_the_scripts_and_styles_of_the_page_alone(trained):
    page = (trained / "report.html").read_text(encoding="utf-8")
    policy = html.unescape(re.search('<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)[1])
    assert "unsafe" not in policy
    own = re.findall(r"<script>(.*?)</script>", page, flags=re.S), re.findall(r"<style>(.*?)</style>", page, flags=re.S)
    for kind, texts in zip(("script-src", "style-src"), own, strict=True):
        hashes = {f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts}
        assert set(re.search(f"{kind} (.*?);", policy)[1].split()) == hashes


def test_a_run_without_an_epoch_says_so(trained, tmp_path):
    run = tmp_path / "young"
    run.mkdir()
    shutil.copy(trained / "config.yaml", run)
    text = text_of(vitrail.report(run))
    assert "A ViT is learning to classify digits into 10 classes." in text
    assert "Training is not finished: the first epoch is not finished" in text
    assert "vitrail train --resume" in text
    assert "vitrail predict" not in text


def test_a_run_that_was_stopped_says_how_far_it_came(trained, tmp_path):
    run = copy(trained, tmp_path / "run")
    save_yaml(override(load_yaml(TrainConfig, run / "config.yaml"), {"epochs": 9}), run / "config.yaml")
    shutil.rmtree(run / "evaluation")
    text = text_of(vitrail.report(run))
    assert "Training is not finished: this is the state after 2 of 9 epochs" in text
    assert f"vitrail train --resume {run}" in text


@pytest.mark.parametrize(
    ("epochs", "steps", "stopped"),
    [(2.0, [], True), (2.01, [14, 28], False), (2.5, [14, 28], True), (2.5, [14, 28, 35], False), (0.5, [7], False)],
)
def test_a_run_may_come_to_its_end_within_an_epoch(tmp_path, epochs, steps, stopped):
    config = vitrail.recipes("small", "digits", epochs=epochs)
    run = Run.create(override(config, {"out": str(tmp_path), "name": "run"}))
    rows = [f"{epoch},{step},0.1,1" for epoch, step in enumerate(steps, start=1)]
    run.metrics_file.write_text("\n".join(["epoch,step,lr,seconds", *rows]))
    assert RunFacts(run).stopped == stopped


def test_a_run_whose_data_has_changed_or_is_gone_keeps_its_numbers(digits, tiny, tmp_path):
    data = copy(digits, tmp_path / "data")
    run = vitrail.train(data, out=tmp_path, name="run", **tiny)
    whole = text_of(vitrail.report(run))
    (data / "9").rename(data / "nine")
    assert "had 10 classes when the run was trained" in text_of(vitrail.report(run))
    shutil.rmtree(data)
    gone = text_of(vitrail.report(run))
    assert "The data cannot be opened" in gone
    score = re.search(r"classes: ([\d.]+%) ±", whole)[1]
    assert f"{score} ±" in gone  # the interval, too, from the confusion matrix
    assert "Confusion matrix" in gone
    assert "Worst predictions" not in gone
    assert f"vitrail evaluate {run} DATA" in gone
    shutil.rmtree(run / "evaluation")
    assert "is learning to classify" in text_of(vitrail.report(run))


def table(folder: Path, columns: dict[str, list[object]]) -> Path:
    """A table of noise: 40 pictures and some columns of labels."""
    random = np.random.default_rng(0)
    rows = len(next(iter(columns.values())))
    for i in range(rows):
        Image.fromarray(random.integers(0, 256, (8, 8), np.uint8)).save(folder / f"{i}.png")
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *columns])
        writer.writerows([f"{i}.png", *row] for i, row in enumerate(zip(*columns.values(), strict=True)))
    return folder / "table.csv"


def test_labels_have_a_page(tiny, tmp_path):
    kinds = ["red|blue", "blue", "red", "", "green|red"]
    data = table(tmp_path, {"labels": [kinds[i % 5] for i in range(60)]})
    text = text_of(vitrail.report(vitrail.train(data, out=tmp_path, name="run", **tiny)))
    assert re.search(r"labels table with 3 labels: a mean average precision of [\d.]+% ± [\d.]+ on \d+ val", text)
    for heading in ("Average precision", "Precision and recall", "Reliability", "threshold", "Worst predictions"):
        assert heading in text


def test_numbers_have_a_page(tiny, tmp_path):
    data = table(tmp_path, {"x": [i / 7 for i in range(60)], "y": [i % 13 / 3 for i in range(60)]})
    run = vitrail.train(data, out=tmp_path, name="run", label_column="x,y", **tiny)
    text = text_of(vitrail.report(run))
    assert re.search(r"predicts x, y from table: an R² of -?[\d.]+ ± [\d.]+ on \d+ validation images", text)
    for heading in (
        "Points on the line are perfect predictions",
        "Scores of each value",
        "minimum",
        "Worst predictions",
    ):
        assert heading in text


def test_hundreds_of_classes_fit(trained, tmp_path):
    classes = tuple(f"class {i:03}" for i in range(400))
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (1600, 8, 8), np.uint8), np.arange(1600) % 400
    np.savez(tmp_path / "many.npz", images=images, labels=np.array(classes)[labels])
    page = vitrail.report(untrained(tmp_path / "run", trained, tmp_path / "many.npz", classes))
    assert page.stat().st_size < 5_000_000
    text = text_of(page)
    assert "The 50 most confused of 400 classes." in text
    assert text.count("class 399") >= 2  # the tables are whole
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', page.read_text())[1])
    matrix = next(spec for spec in specs.values() if spec["kind"] == "matrix")
    assert len(matrix["names"]) == len(matrix["totals"]) == 50


@pytest.mark.parametrize(("channels", "bits"), [(1, 16), (5, 8), (2, 32)])
def test_deep_and_many_band_images_are_shown(trained, tmp_path, channels, bits):
    random = np.random.default_rng(0)
    kind = {8: np.uint8, 16: np.uint16, 32: np.float32}[bits]
    images = (random.random((40, 8, 8, channels)) * (1 if bits == 32 else 2**bits - 1)).astype(kind)
    for i, image in enumerate(images):
        file = tmp_path / "deep" / "ab"[i % 2] / f"{i}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, image)
    run = untrained(tmp_path / "run", trained, tmp_path / "deep", ("a", "b"), channels=channels, bits=bits)
    page = vitrail.report(run)
    assert "Patch filters" in text_of(page)
    assert page.read_text().count("data:image/") > 20


def test_streamed_data_is_shown(trained, tmp_path):
    pytest.importorskip("datasets")
    import datasets

    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (8, 8), np.uint8)) for _ in range(60)]
    labels = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [i % 2 for i in range(60)]}, features=features)
    rows.to_parquet(tmp_path / "stream.parquet")
    run = untrained(tmp_path / "run", trained, tmp_path / "stream.parquet", ("a", "b"))
    save_yaml(override(load_yaml(TrainConfig, run / "config.yaml"), {"streaming": True}), run / "config.yaml")
    page = vitrail.report(run)
    assert "Worst predictions" in text_of(page)
    assert page.read_text().count("data:image/") > 20


def test_other_positions_and_stems_get_what_makes_sense(trained, tmp_path):
    run = copy(trained, tmp_path / "run")
    for changes, present, absent in (
        ({"pos": "relative"}, "Relative position biases", "Position similarity"),
        ({"pos": "none"}, "has no positions", "Relative position biases"),
        ({"stem": "conv"}, "Filters of the first convolution", "principal components"),
    ):
        model = create("vit_nano4", img_size=8, channels=1, classes=10, depth=2, **({"stem": "patch"} | changes))
        task = Multiclass(tuple("0123456789"))
        card = Card(model="vit_nano4", config=model.config, task=task, preprocess=Preprocess((8, 8), 1))
        save(run / "model.safetensors", model, card)
        text = text_of(vitrail.report(run))
        assert present in text
        assert absent not in text


@pytest.mark.parametrize(
    ("config", "headings"),
    [
        (ATTENTIVE["swin"], ["Relative position biases, stage 1", "Relative position biases, stage 2"]),
        (ATTENTIVE["coatnet"], ["Relative position biases, stage 2", "Relative position biases, stage 3"]),
        (ATTENTIVE["pvt"], ["Position similarity, stage 1", "Position similarity, stage 2"]),
        (TINY["mixer"], ["Token mixing, layer 1", "Token mixing, layer 5"]),
        (TINY["bit"], []),
    ],
    ids=["swin", "coatnet", "pvt", "mixer", "bit"],
)
def test_places_are_shown_of_every_stage(trained, tmp_path, config, headings):
    run = copy(trained, tmp_path / "run")
    config = replace(config, classes=10)
    task = Multiclass(tuple("0123456789"))
    card = Card(model="tiny", config=config, task=task, preprocess=Preprocess(config.img_size, 1))
    save(run / "model.safetensors", build(config), card)
    text = text_of(vitrail.report(run))
    found = re.findall(r"(?:Relative position biases|Position similarity|Token mixing), (?:stage|layer) \d", text)
    assert set(headings) <= set(found)
    assert bool(found) == bool(headings)


# Several runs


def test_runs_are_compared(trained, tmp_path):
    other = untrained(tmp_path / "other", trained, Path("digits"), tuple("0123456789"))
    save_yaml(
        override(load_yaml(TrainConfig, other / "config.yaml"), {"data": "digits", "lr": 0.5}), other / "config.yaml"
    )
    page = vitrail.report([trained, other])
    assert page == Path("report.html")
    text = text_of(page)
    assert "Best of 2 runs: trained with" in text
    assert re.search(r"lr [\d.e-]+ 0.5", text)
    assert "measured on the same images" in text
    assert re.search(r"−[\d.]+% \(−[\d.]+ to −[\d.]+%\)", text)  # far apart: the interval leaves out zero
    assert "F1 of each class" in text
    assert vitrail.report([trained, other]) == page  # the same report may be made again
    with pytest.raises(UserError, match="is the report of other runs: trained, other"):
        vitrail.report([other, trained])


def test_runs_of_different_tasks_are_not(trained, tiny, tmp_path):
    data = table(tmp_path, {"x": [i / 7 for i in range(60)]})
    run = vitrail.train(data, out=tmp_path, name="numbers", **tiny)
    with pytest.raises(UserError, match="different tasks"):
        vitrail.report([trained, run])


def test_folds_are_compared_in_their_folder(small, tmp_path):
    run = vitrail.train("digits", out=tmp_path, name="cv", folds=2, **small)
    page = vitrail.report(run)
    assert page == run / "report.html"
    text = text_of(page)
    assert "2 runs compared" in text
    assert "measured on different images" in text


# Files


def test_no_other_file_is_replaced(trained, tmp_path):
    mine = tmp_path / "mine.html"
    mine.write_text("my own")
    with pytest.raises(UserError, match="is not a vitrail report"):
        vitrail.report(trained, out=mine)
    assert mine.read_text() == "my own"
    page = vitrail.report(trained, out=tmp_path / "new")
    assert page == tmp_path / "new" / "report.html"
    assert vitrail.report(trained, out=page) == page


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run: it has no config\.yaml"):
        vitrail.report(tmp_path)
    with pytest.raises(UserError, match="No run was given"):
        vitrail.report([])


# Parts


def test_an_album_stops_when_it_is_full():
    album = Album(room=20_000)
    random = np.random.default_rng(0)
    added = [album.add(Image.fromarray(random.integers(0, 256, (80, 80, 3), np.uint8))) for _ in range(20)]
    assert added[0] is not None
    assert added[-1] is None
    assert sum(len(picture.src) for picture in added if picture) <= 20_000


def test_pictures_have_the_shape_of_what_they_show():
    assert similarities(np.zeros((4, 6, 4, 6))).size == (6 * 24 + 5 * 2, 4 * 16 + 3 * 2)
    assert similarities(np.zeros((40, 40, 40, 40))).size[0] < 800
    sheet = np.asarray(tiles(np.random.default_rng(0).normal(size=(10, 8, 8, 1)), 7))
    assert sheet.shape == (2 * 24 + 2, 7 * 24 + 6 * 2, 4)
    assert not sheet[-1, -1].any()  # the last places are empty
    assert thumbnail(np.zeros((300, 100, 3), np.uint8), 80).size == (27, 80)


def test_a_table_of_very_many_lines_keeps_the_lowest():
    lines = [Line(f"class {i}", [Cell(str(i % 7), i % 7)]) for i in range(30)]
    whole = Table("Scores", ["class", "F1"], lines)
    assert whole.lowest() is whole
    cut = whole.lowest(most=5)
    assert [line.name for line in cut.lines] == ["class 0", "class 7", "class 14", "class 21", "class 28"]
    assert cut.caption == "Scores: the 5 of 30 with the lowest F1"


def test_attention_glows_where_it_is():
    attention = np.zeros((4, 4), np.float32)
    attention[0, 0] = 1
    glow = np.asarray(overlay(Image.new("RGB", (64, 64), "grey"), attention), np.int64).sum(axis=-1)
    assert glow[4, 4] > 3 * glow[60, 60]


def test_every_setting_is_on_the_page(trained):
    config = load_yaml(TrainConfig, trained / "config.yaml")
    listed = [name for _, group in settings(config, "train") for name, _, _ in group]
    known = options(TrainConfig).items()
    assert sorted(listed) == sorted(name for name, option in known if option.only not in ("pretrain", "python"))
