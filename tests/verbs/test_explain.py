"""The verb: what is drawn of a run, and what is said of the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from vitrail.cli import main
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.explain import attention_distance, patch_filters, rollout
from vitrail.explain.explanation import Explanation
from vitrail.explain.positions import NO_POSITIONS
from vitrail.explain.subject import Picture, open_subject
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.tasks.multilabel import LabelsAnswer
from vitrail.tasks.regression import ValuesAnswer
from vitrail.tasks.task import Answer
from vitrail.weights import Card, open_run, save


@pytest.fixture(scope="module", autouse=True)
def _few_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.explain.subject.PICTURES", 3)
        yield


@pytest.fixture(scope="module")
def files(digits: Path) -> list[Path]:
    return sorted((digits / "3").glob("*.png"))[:2]


@pytest.fixture(scope="module")
def explained(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    out = tmp_path_factory.mktemp("explained") / "there"
    return vitrail.explain(trained, out=out, save_data=True)


def model_file(folder: Path, **changes: object) -> Path:
    config = ViTConfig(
        **({"width": 16, "depth": 2, "heads": 2, "mlp": 16, "patch": 4, "img_size": (8, 8), "classes": 2} | changes)
    )
    preprocess = Preprocess((8, 8), config.channels)
    card = Card(model="none", config=config, task=Multiclass(("a", "b")), preprocess=preprocess)
    torch.manual_seed(0)
    save(folder / "model.safetensors", build(config), card)
    return folder / "model.safetensors"


def test_everything_is_drawn_of_a_run_with_its_own_images(explained):
    names = [path.name for path in explained.files if path.suffix == ".png"]
    assert names[:2] == ["rollout.png", "relevance.png"]
    assert [name.split("-")[:2] for name in names[2:5]] == [["heads", "1"], ["heads", "2"], ["heads", "3"]]
    assert names[5:8] == ["distance.png", "positions.png", "filters.png"]
    assert names[8:] == ["map.png", "neighbours.png", "wrong.png", "uncertain.png"]
    assert not explained.notes
    assert not explained.unreadable
    assert all(path.exists() for path in explained.files)


def test_arrays_are_those_of_the_functions_and_lie_beside_the_figures(explained, trained):
    subject = open_subject(trained)
    model = subject.model
    images = torch.cat(list(subject.batches()))
    assert images.shape == (3, 1, 8, 8)
    expected = {
        ("rollout", "rollout"): rollout(model, images),
        ("distance", "distance"): attention_distance(model, subject.sample()),
        ("filters", "filters"): patch_filters(model),
    }
    folder = explained.files[0].parent
    for (figure, name), array in expected.items():
        np.testing.assert_array_equal(explained.arrays[figure][name], array)
        with np.load(folder / f"{figure}.npz") as kept:
            np.testing.assert_array_equal(kept[name], array)
    assert explained.arrays["distance"]["images"] == 256
    assert len(explained.files) == 2 * len(explained.arrays)


def test_own_images_are_of_different_classes_and_follow_the_seed(trained):
    first, again, other = (open_subject(trained, seed=seed) for seed in (0, 0, 1))
    names = [[picture.name for picture in subject.pictures] for subject in (first, again, other)]
    assert names[0] == names[1] != names[2]
    assert len({picture.true for picture in first.pictures}) == 3
    assert all(picture.answer is not None and picture.answer.labels for picture in first.pictures)


def test_given_images_are_explained_and_bad_ones_are_named(trained, files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.png").write_text("no picture")
    with pytest.raises(SystemExit) as exit:
        main(["explain", str(trained), str(files[0]), "bad.png", str(files[1]), "--out", "out", "--patch", "1,0"])
    assert exit.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bad.png  — unreadable: ")
    stems = [file.stem for file in files]
    expected = ["rollout", "relevance", *(f"heads-{i}-{stem}" for i, stem in enumerate(stems, 1))]
    expected += [*(f"patch-{i}-{stem}" for i, stem in enumerate(stems, 1)), "distance", "positions", "filters"]
    assert lines[1:] == [str(Path("out") / f"{name}.png") for name in expected]
    assert {path.name for path in Path("out").iterdir()} == {f"{name}.png" for name in expected}


def test_figures_go_into_the_run_by_default(small, digits, tmp_path):
    shutil.copytree(Path(small["weights"]).parent, tmp_path / "run")
    result = vitrail.explain(tmp_path / "run", [next(digits.glob("3/*"))])
    assert {path.parent for path in result.files} == {tmp_path / "run" / "explain"}


@pytest.mark.parametrize(("format", "begins"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_other_formats(trained, files, tmp_path, format, begins):
    result = vitrail.explain(trained, files[:1], out=tmp_path, format=format)
    assert {path.suffix for path in result.files} == {f".{format}"}
    assert all(path.read_bytes().startswith(begins) for path in result.files)


def test_missing_figures_are_noted_and_the_rest_is_drawn(tmp_path, files):
    result = vitrail.explain(model_file(tmp_path, stem="conv", pos="none", channels=1), files, out=tmp_path / "out")
    drawn = [path.stem.split("-")[0] for path in result.files]
    assert drawn == ["rollout", "relevance", "heads", "heads", "distance", "filters"]
    assert result.notes == (NO_POSITIONS,)


def test_relative_positions_are_drawn_as_tables(tmp_path, files):
    result = vitrail.explain(model_file(tmp_path, pos="relative", channels=1), files, out=tmp_path / "out")
    assert result.arrays["bias"]["bias"].shape == (2, 2, 3, 3)
    assert "positions" not in result.arrays


def test_weights_without_a_head_are_explained(tmp_path, files):
    state = load_file(model_file(tmp_path, channels=1, width=192, heads=3))  # of a width that tells the heads
    headless = {name: value for name, value in state.items() if not name.startswith("head.")}
    (tmp_path / "bare").mkdir()
    save_file(headless, tmp_path / "bare" / "backbone.safetensors")
    result = vitrail.explain(tmp_path / "bare" / "backbone.safetensors", files)
    assert "rollout" in result.arrays
    assert open_subject(tmp_path / "bare" / "backbone.safetensors", files).pictures[0].caption == files[0].stem


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": (2, 0)}, "The last one is 1,1"),
        ({"format": "gif"}, "must be one of png, svg, pdf, but it is 'gif'"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"images": ["nowhere.png"]}, "nowhere.png does not exist"),
    ],
)
def test_errors_are_raised_before_anything_is_written(trained, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        vitrail.explain(trained, **({"out": tmp_path / "out"} | settings))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("patch", ["1", "1;2", "a,b", "1,2,3", "-1,0"])
def test_a_patch_that_is_no_pair_is_told(trained, capsys, patch):
    with pytest.raises(SystemExit) as exit:
        main(["explain", str(trained), f"--patch={patch}"])
    assert exit.value.code == 2
    assert "must be a row and a column" in capsys.readouterr().err


def test_no_picture_that_can_be_read(trained, tmp_path):
    (tmp_path / "bad.png").write_text("no picture")
    with pytest.raises(UserError, match=r"No image could be read: .*bad\.png"):
        vitrail.explain(trained, [tmp_path / "bad.png"], out=tmp_path)


def test_a_model_without_data_or_pictures_is_told(tmp_path):
    with pytest.raises(UserError, match="so its training data is unknown"):
        vitrail.explain(model_file(tmp_path))


@pytest.mark.parametrize("words", [[], ["--img-size", "16x12"]])
def test_another_size_is_explained_with_its_own_patches(trained, files, tmp_path, words):
    with pytest.raises(SystemExit) as exit:
        main(["explain", str(trained), str(files[0]), "--out", str(tmp_path), "--save-data", *words])
    assert exit.value.code == 0
    grid = (4, 3) if words else (2, 2)
    with np.load(tmp_path / "rollout.npz") as kept:
        assert kept["rollout"].shape == (1, *grid)
    with np.load(tmp_path / "positions.npz") as kept:
        assert kept["similarity"].shape == (*grid, *grid)


def test_captions_follow_the_task():
    pixels = np.zeros((1, 2, 2), np.uint8)
    one, several = Answer(("cat",), (0.913,)), LabelsAnswer(("cat", "dog"), (0.9, 0.8))
    value = ValuesAnswer(("age",), values=(31.25,))
    assert Picture("a.png", pixels, one).caption == "cat 91%"
    assert Picture("a.png", pixels, one, "cat").caption == "cat 91%"
    assert Picture("a.png", pixels, one, "dog", wrong=True).caption == "cat 91%, not dog"
    assert Picture("a.png", pixels, several, "cat").caption == "cat 90%, dog 80%"
    assert Picture("a.png", pixels, LabelsAnswer()).caption == "(no label)"
    assert Picture("a.png", pixels, value, "30").caption == "age 31.2"


def test_the_model_is_the_one_that_predicts(trained, files):
    subject = open_subject(trained, files)
    model, card = open_run(trained)
    expected = [prediction.labels[0] for prediction in vitrail.predict(trained, files)]
    assert [picture.answer.labels[0] for picture in subject.pictures] == expected
    assert subject.card == card
    assert torch.equal(subject.model.head.weight, model.head.weight)


def test_a_pretrained_model_is_explained_with_its_own_images_and_with_others(pretrained, files, tmp_path):
    own = vitrail.explain(pretrained, out=tmp_path / "own")
    drawn = [path.stem.split("-")[0] for path in own.files]
    assert drawn == ["rollout", *["heads"] * 3, "distance", "positions", "filters", "map", "neighbours"]
    assert own.notes == (
        "Class relevance cannot be drawn: the model has no head.",
        "There are no predictions: the model has no head.",
    )
    assert own.arrays["neighbours"]["numbers"].shape == (6, 7)
    given = vitrail.explain(pretrained, files, out=tmp_path / "given")
    assert [path.stem.split("-")[0] for path in given.files] == drawn[:1] + drawn[2:-2]
    with pytest.raises(UserError, match="has no head, so there are no classes to explain"):
        vitrail.explain(pretrained, files, target="3")


def test_a_folder_of_many_images_is_drawn_on_one_sheet_per_kind(trained, digits, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.explain.subject.SHEET", 3)
    monkeypatch.setattr("vitrail.explain.figures.relevance.OWN", 2)
    folder, count = digits / "0", len(list((digits / "0").iterdir()))
    explanation = vitrail.explain(trained, [folder], out=tmp_path / "sheets")
    names = [path.stem.split("-")[0] for path in explanation.files]
    assert names.count("rollout") == names.count("relevance") == names.count("heads") == 1
    assert len(explanation.arrays["rollout"]["files"]) == 3
    assert len(explanation.arrays["relevance"]["files"]) == 2
    assert f"Drawn for 3 of {count} images, a sheet per kind. --pictures {count} draws them all." in explanation.notes
    asked = vitrail.explain(trained, [folder], out=tmp_path / "asked", pictures=4)
    assert [path.stem.split("-")[0] for path in asked.files].count("heads") == 4
    assert not any("Drawn for" in note for note in asked.notes)
    with pytest.raises(UserError, match="'pictures' must be from 1 to 256, but it is 300"):
        vitrail.explain(trained, [folder], pictures=300)
