"""Images in, answers out, on PyTorch and ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.errors import UserError
from vitrail.runs.predictor import Prediction, Predictor, source_card
from vitrail.runs.run import Run
from vitrail.tasks import Multilabel, Regression
from vitrail.weights import open_run


@pytest.fixture
def file(exported):
    return exported.file


@pytest.fixture
def files(digits):
    return sorted(digits.rglob("*.png"))[:40]


def test_answers_are_those_of_the_model(trained, files):
    model, card = open_run(trained)
    stored = np.stack([np.asarray(Image.open(file))[:, :, None] for file in files])
    with torch.inference_mode():
        expected = model(card.preprocess.normalise(torch.from_numpy(card.preprocess.pixels(stored))))
        expected = (expected / card.task.temperature).softmax(dim=1)
    answers = list(Predictor(trained)(files, top=1, batch_size=7))
    assert [answer.file for answer in answers] == list(map(str, files))
    assert [answer.labels[0] for answer in answers] == [card.classes[i] for i in expected.argmax(dim=1)]
    np.testing.assert_allclose([a.probabilities[0] for a in answers], expected.max(dim=1).values, rtol=1e-5)


def test_a_run_a_folder_and_a_file_are_the_same_predictor(trained, files):
    answers = [list(Predictor(source)(files)) for source in (trained, Run(trained), trained / "model.safetensors")]
    assert answers[0] == answers[1] == answers[2]


def test_files_arrays_pictures_and_contents_get_the_same_answers(trained, files):
    predict, file = Predictor(trained), files[0]
    (expected,) = predict(file)
    with Image.open(file) as picture:
        kinds = [str(file), file.read_bytes(), picture, np.asarray(picture), np.asarray(picture)[:, :, None]]
        answers = list(predict(kinds, batch_size=1))  # or the answers would differ in the last digit
        assert list(predict(picture)) == [replace(expected, file="image 1")]
    assert [answer.file for answer in answers] == [str(file), "image 2", "image 3", "image 4", "image 5"]
    assert {(answer.labels, answer.probabilities) for answer in answers} == {(expected.labels, expected.probabilities)}


def test_an_unreadable_image_is_an_answer(trained, files, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    first, bad, last = Predictor(trained)([files[0], tmp_path / "bad.png", files[1]])
    assert (first.error, last.error) == (None, None)
    assert bad == Prediction(str(tmp_path / "bad.png"), error="not an image")


def test_an_onnx_file_gives_the_same_answers(trained, file, files):
    one, other = Predictor(trained), Predictor(file)
    assert one.card == other.card
    for ours, theirs in zip(one(files, top=1), other(files, top=1), strict=True):
        assert ours.labels == theirs.labels
        assert ours.probabilities == pytest.approx(theirs.probabilities, rel=1e-4)
    assert one.fingerprint != other.fingerprint
    assert "parameters" in one.size
    assert "MiB" in other.size


def test_predict_takes_an_onnx_file(file, files):
    assert [answer.labels for answer in vitrail.predict(file, files)] == [
        answer.labels for answer in Predictor(file)(files)
    ]


def test_features_are_those_of_the_model(trained, file, files):
    predictor = Predictor(trained)
    pixels = np.stack([predictor.pixels(file) for file in files])
    model, card = open_run(trained)
    with torch.inference_mode():
        expected = model.embed(card.preprocess.normalise(torch.from_numpy(pixels)))
    assert np.array_equal(predictor.features(pixels), expected.numpy())
    with pytest.raises(UserError, match="has no feature vectors"):
        Predictor(file).features(pixels)


@pytest.mark.parametrize("source", ["torch", "onnx"])
def test_outputs_of_arrays_and_tensors_are_the_same(trained, file, files, source):
    predictor = Predictor(trained if source == "torch" else file)
    pixels = np.stack([predictor.pixels(file) for file in files])
    outputs = predictor.outputs(pixels)
    assert (outputs.shape, outputs.dtype) == ((40, 10), np.float32)
    assert np.array_equal(predictor.tensor_outputs(torch.from_numpy(pixels)).numpy(), outputs)


def test_what_outputs_mean(trained):
    card, outputs = source_card(trained), np.random.default_rng(0).normal(size=(5, 10)).astype(np.float32)
    tensor = torch.from_numpy(outputs).double()
    np.testing.assert_allclose(card.task.means(outputs), (tensor / card.task.temperature).softmax(dim=1), rtol=1e-12)
    np.testing.assert_allclose(Multilabel(card.classes).means(outputs), tensor.sigmoid(), rtol=1e-12)
    values = Regression(card.classes, (3.0,) * 10, (2.0,) * 10)
    np.testing.assert_allclose(values.means(outputs), tensor * 2 + 3, rtol=1e-12)


def test_a_model_without_a_head_cannot_answer(tmp_path):
    from safetensors.torch import save_file

    from vitrail.models import build, canonical

    body = {name: value for name, value in build(canonical("vit_ti16")[1]).state_dict().items() if "head" not in name}
    save_file(body, tmp_path / "body.safetensors")
    with pytest.raises(UserError, match="has no classification head, so it cannot predict"):
        source_card(tmp_path / "body.safetensors")


def test_outputs_that_are_not_finite_are_no_answer(trained, files):
    model, card = open_run(trained)
    with torch.no_grad():
        for value in model.parameters():
            value *= 1e30  # finite, so that the file can be read
    predictor = Predictor.of(model, card)
    for compute in (predictor.outputs, predictor.features):
        with pytest.raises(UserError, match="outputs must be finite"):
            list(predictor.run(files, compute))
