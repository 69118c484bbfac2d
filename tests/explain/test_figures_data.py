"""Relevance, the map, neighbours and galleries, as the verb draws them of a run and its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.errors import UserError
from vitrail.explain import neighbours, relevance
from vitrail.explain.figures import data as data_figures
from vitrail.explain.figures.relevance import relevances
from vitrail.explain.subject import Subject, open_subject
from vitrail.tasks import Regression
from vitrail.verbs.evaluate import evaluate


@pytest.fixture(scope="module", autouse=True)
def _small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.explain.subject.PICTURES", 4)
        patch.setattr("vitrail.explain.figures.relevance.OWN", 2)
        yield


@pytest.fixture(scope="module")
def own(trained: Path) -> Subject:
    return open_subject(trained)


@pytest.fixture(scope="module")
def given(trained: Path, digits: Path) -> Subject:
    return open_subject(trained, sorted((digits / "3").glob("*.png"))[:2], data=digits)


def images_of(subject: Subject) -> torch.Tensor:
    return torch.cat(list(subject.batches()))


def test_relevance_is_that_of_what_the_model_says_and_of_the_runner_up(own):
    (drawing,) = relevances(own)
    images = images_of(own)[[0, 3]]  # two of the four, taken evenly
    with torch.no_grad():
        order = own.model(images).argsort(dim=1, descending=True).numpy()
    assert drawing.name == "relevance"
    assert drawing.arrays["classes"].tolist() == order[:, 0].tolist()
    assert drawing.arrays["others"].tolist() == order[:, 1].tolist()
    np.testing.assert_allclose(drawing.arrays["relevance"], relevance(own.model, images, order[:, 0]), rtol=1e-5)
    np.testing.assert_allclose(drawing.arrays["other"], relevance(own.model, images, order[:, 1]), rtol=1e-5)
    assert drawing.arrays["deletion"].shape == (2, 5)  # four patches
    titles = [axes.get_title(loc="left") for axes in drawing.figure.axes]
    assert titles[2:4] == [f"for {order[0, 0]}", f"for {order[0, 1]}"]


def test_one_class_is_set_against_another(trained, given):
    files = [picture.name for picture in given.pictures]
    subject = open_subject(trained, files, target="5", instead="3")
    (drawing,) = relevances(subject)
    np.testing.assert_allclose(
        drawing.arrays["relevance"], relevance(subject.model, images_of(subject), 5, instead=3), rtol=1e-5
    )
    titles = [axes.get_title(loc="left") for axes in drawing.figure.axes]
    assert titles[2:4] == ["5 over 3", "3 over 5"]


def test_against_its_own_answer_the_runner_up_is_explained(given):
    with torch.no_grad():
        order = given.model(images_of(given)).argsort(dim=1, descending=True).numpy()
    (drawing,) = relevances(replace(given, instead=int(order[0, 0])))
    assert drawing.arrays["classes"][0] == order[0, 1]
    assert drawing.arrays["others"][0] == order[0, 0]


def test_of_numbers_the_first_is_explained_in_its_units_of_output(given):
    task = Regression(given.card.classes, (5.0,) * 10, (2.0,) * 10)
    (drawing,) = relevances(replace(given, card=replace(given.card, task=task)))
    assert drawing.arrays["classes"].tolist() == [0, 0]
    assert drawing.arrays["others"].tolist() == [1, 1]
    with torch.no_grad():
        outputs = given.model(images_of(given))[:, 0]
    np.testing.assert_allclose(drawing.arrays["deletion"][:, 0], outputs, rtol=1e-5)


def test_many_pictures_go_on_several_pages(given, monkeypatch):
    monkeypatch.setattr("vitrail.explain.figures.relevance.ROWS", 1)
    assert [drawing.name for drawing in relevances(given)] == ["relevance", "relevance-2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "11"}, "knows no class '11'"),
        ({"instead": "cat"}, "knows no class 'cat'"),
        ({"target": "1", "instead": "1"}, "cannot be set against itself"),
    ],
)
def test_classes_that_do_not_exist_are_told(trained, settings, message):
    with pytest.raises(UserError, match=message):
        open_subject(trained, **settings)


def test_the_data_of_a_run_are_its_validation_images(own, trained, tmp_path):
    assert own.with_data
    assert len(own.split) == len(own.features) == len(own.outputs)
    right = (own.outputs.argmax(axis=1) == own.split.targets).mean()
    assert right == pytest.approx(evaluate(trained, out=tmp_path).top1)


def test_galleries_show_wrong_and_uncertain_predictions(own):
    (drawing,) = data_figures.wrong(own)
    numbers = drawing.arrays["numbers"]
    assert (own.outputs[numbers].argmax(axis=1) != own.split.targets[numbers]).all()
    assert drawing.arrays["files"].tolist() == [own.split.name(int(i)) for i in numbers]
    assert len(drawing.figure.axes) == len(numbers) == 24
    (drawing,) = data_figures.uncertain(own)
    chances = torch.from_numpy(own.outputs).softmax(dim=1).topk(2).values
    margins = (chances[:, 0] - chances[:, 1]).numpy()
    assert drawing.arrays["numbers"][0] == margins.argmin()


def test_neighbours_are_those_of_the_most_wrong_predictions_or_of_the_pictures_that_are_given(own, given):
    (drawing,) = data_figures.nearest(own)
    wrong = own.card.task.worst(own.outputs, own.split.targets, 6)
    expected = neighbours(own.features[wrong], own.features, 7, own=wrong)[0]
    np.testing.assert_array_equal(drawing.arrays["numbers"], expected)
    (drawing,) = data_figures.nearest(given)
    assert drawing.arrays["numbers"].shape == (2, 7)
    files = [given.split.name(int(i)) for i in drawing.arrays["numbers"][:, 0]]
    assert files == [picture.name for picture in given.pictures]  # they are among the data
    np.testing.assert_allclose(drawing.arrays["cosines"][:, 0], 1, rtol=1e-4)


def test_neighbours_of_many_pictures_go_on_several_pages(given, monkeypatch):
    monkeypatch.setattr(data_figures, "_PAGE", 1)
    pages = list(data_figures.nearest(given))
    assert [page.name for page in pages] == ["neighbours", "neighbours-2"]
    assert [page.arrays["numbers"].shape for page in pages] == [(1, 7), (1, 7)]


def test_the_map_has_a_place_for_every_image_up_to_a_number(given, monkeypatch):
    monkeypatch.setattr(data_figures, "MOST", 40)
    (drawing,) = data_figures.embedding(given)
    assert drawing.arrays["places"].shape == (40, 2)
    assert "40 of 240 images of digits" in drawing.figure.texts[1].get_text()


def test_pictures_without_data_get_no_figures_of_data(trained, given):
    alone = open_subject(trained, [picture.name for picture in given.pictures])
    for draw in (data_figures.embedding, data_figures.nearest, data_figures.wrong, data_figures.uncertain):
        assert not list(draw(alone))


def test_data_of_other_classes_has_a_map_and_neighbours_but_no_wrong_predictions(trained, digits, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i, file in enumerate(sorted((digits / "3").glob("*.png"))[:10]):
            (tmp_path / name / f"{i}.png").write_bytes(file.read_bytes())
    subject = open_subject(trained, sorted((digits / "3").glob("*.png"))[:2], data=tmp_path)
    assert subject.data.classes == ("cat", "dog")
    (drawing,) = data_figures.nearest(subject)
    assert "of another class" not in drawing.figure.texts[1].get_text()
    with pytest.raises(UserError, match="has other classes than the model"):
        list(data_figures.wrong(subject))


def test_of_a_large_data_set_a_sample_is_read(trained, monkeypatch):
    monkeypatch.setattr("vitrail.explain.subject.MOST", 30)
    subject = open_subject(trained)
    whole = subject.data.splits["val"]
    assert len(whole) > len(subject.split) == len(subject.outputs) == len(subject.features) == 30
    numbers = subject.split.numbers
    assert subject.split.targets.tolist() == whole.targets[numbers].tolist()
    assert [subject.split.name(i) for i in range(30)] == [whole.name(int(i)) for i in numbers]
    for draw in (data_figures.embedding, data_figures.nearest, data_figures.wrong, data_figures.uncertain):
        for drawing in draw(subject):
            assert set(drawing.arrays.get("files", ())) <= {subject.split.name(i) for i in range(30)}
