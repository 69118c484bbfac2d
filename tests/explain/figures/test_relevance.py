"""Figures of class relevance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vitrail.explain import relevance
from vitrail.explain.figures.relevance import relevances
from vitrail.explain.subject import Subject, open_subject
from vitrail.tasks import Regression


def images_of(subject: Subject) -> torch.Tensor:
    return torch.cat(list(subject.batches()))


def test_relevance_of_the_predicted_class_and_the_runner_up(own):
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


def test_one_class_is_contrasted_with_another(trained, given):
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
