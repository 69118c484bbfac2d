"""Figures of a data set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.errors import UserError
from vitrail.explain import neighbours
from vitrail.explain.figures import data as data_figures
from vitrail.explain.subject import open_subject
from vitrail.verbs.evaluate import evaluate


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
    chances = (torch.from_numpy(own.outputs) / own.card.task.temperature).softmax(dim=1).topk(2).values
    margins = (chances[:, 0] - chances[:, 1]).numpy()
    assert drawing.arrays["numbers"][0] == margins.argmin()


def test_neighbours_of_the_worst_predictions_or_of_given_pictures(own, given):
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


def test_a_pretrained_model_maps_its_data_without_colours_and_labelled_data_by_class(pretrained, digits, tmp_path):
    def drawn(**settings: object) -> tuple[str, str, int]:
        subject = open_subject(pretrained, **settings)
        (places,), (nearest,) = data_figures.embedding(subject), data_figures.nearest(subject)
        return places.figure.texts[1].get_text(), nearest.figure.texts[1].get_text(), len(subject.split)

    note, nearest, images = drawn()
    assert (note, images) == ("t-SNE of the features of 90 images of digits", 90)
    assert "another class" not in nearest
    for labelled in ("digits", digits):  # also that which it has read without labels
        note, nearest, _ = drawn(data=labelled)
        assert note.endswith("coloured by class")
        assert nearest.endswith("orange: another class")
    for file in sorted((digits / "3").glob("*.png")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    note, _, images = drawn(data=tmp_path)
    assert "coloured" not in note
    assert images == len(list(tmp_path.iterdir()))  # all of them: nothing is held out
