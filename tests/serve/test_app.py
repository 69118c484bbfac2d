"""The routes, asked by a real client: the answers are those of the library."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.explain import attention_maps, patch_attention, relevance, rollout
from vitrail.weights import open_run

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"


def test_answers_are_those_of_predict_however_an_image_is_sent(service, trained, files, photo):
    file = files[7]
    (expected,) = vitrail.predict(trained, [file], engine="torch")
    content = file.read_bytes()
    sent = [
        service.post("/predict", content, headers={"Content-Type": "image/png"}),
        service.post("/predict", content),
        service.post("/predict", files={"anything": (file.name, content, "image/png")}),
        service.post("/predict", json={"images": [base64.b64encode(content).decode()]}),
        service.post("/predict", json={"images": ["data:image/png;base64," + base64.encodebytes(content).decode()]}),
    ]
    for answer in sent:
        assert answer.status_code == 200
        (found,) = answer.json()["predictions"]
        assert tuple(found["labels"]) == expected.labels
        assert found["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)
    assert sent[2].json()["predictions"][0]["file"] == file.name
    (of_photo,) = vitrail.Predictor(trained)(photo)
    assert service.predict(photo)["probabilities"] == pytest.approx(of_photo.probabilities, abs=1e-6)


def test_torch_onnx_and_http_give_the_same_answers_for_200_validation_images(service, trained, exported):
    data = vitrail.Run(trained).data()
    split = data.splits["val"]
    images = [split.image(i) for i in range(200)]
    torch_answers = list(vitrail.Predictor(trained, engine="torch")(images))
    onnx_answers = list(vitrail.Predictor(exported)(images))
    for image, by_torch, by_onnx in zip(images, torch_answers, onnx_answers, strict=True):
        file = io.BytesIO()
        Image.fromarray(image[:, :, 0]).save(file, "PNG")
        for model, expected in (("digits", by_torch), ("file", by_onnx)):
            found = service.predict(file.getvalue(), model=model)
            assert found["probabilities"] == pytest.approx(expected.probabilities, abs=1e-5)
            assert found["labels"][0] == by_torch.labels[0]


def test_many_images_in_one_request(service, trained, files):
    several = files[:8]
    expected = list(vitrail.predict(trained, several, top=2))
    answer = service.post("/predict", files=[("image", (f.name, f.read_bytes())) for f in several], top=2).json()
    assert [p["file"] for p in answer["predictions"]] == [f.name for f in several]
    assert [tuple(p["labels"]) for p in answer["predictions"]] == [p.labels for p in expected]
    scored = service.predict(several[0].read_bytes(), scores=True)["scores"]
    assert len(scored) == 10
    assert sum(scored) == pytest.approx(1)


def test_embeddings_are_those_of_the_predictor(service, trained, files):
    predictor = vitrail.Predictor(trained)
    expected = predictor.features(np.stack([predictor.pixels(f) for f in files[:3]]))
    sent = [("image", (f.name, f.read_bytes())) for f in files[:3]]
    found = service.post("/embed", files=sent).json()["embeddings"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def image(trained, files):
    """The model and a normalised image."""
    model, card = open_run(trained)
    pixels = vitrail.Predictor(trained).pixels(files[3])
    return model, card.preprocess.normalise(torch.from_numpy(pixels)[None])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, lambda model, image: rollout(model, image)[0]),
        ({"layer": 2, "head": 1}, lambda model, image: attention_maps(model, image)[1][0, 0]),
        ({"layer": 1, "patch": "1,0"}, lambda model, image: patch_attention(model, image, 1, 0)[0][0].mean(axis=0)),
        ({"method": "relevance", "target": "4"}, lambda model, image: relevance(model, image, 4)[0]),
    ],
    ids=["rollout", "head", "patch", "relevance"],
)
def test_explanations_are_those_of_the_library(service, files, image, asked, expected):
    content = files[3].read_bytes()
    found = service.post("/explain", content, **asked).json()
    np.testing.assert_allclose(found["map"], expected(*image), rtol=1e-4, atol=1e-6)
    drawn = service.post("/explain", content, **asked, format="png")
    assert drawn.headers["content-type"] == "image/png"
    assert min(Image.open(io.BytesIO(drawn.content)).size) >= 448


def test_the_relevance_is_by_default_that_of_the_prediction(service, files):
    content = files[3].read_bytes()
    found = service.post("/explain", content, method="relevance").json()
    assert found["target"] == service.predict(content)["labels"][0]


def test_all_attention_comes_in_one_binary_answer(service, files, image):
    content = service.post("/explain", files[3].read_bytes(), format="binary").content
    (length,) = struct.unpack_from("<I", content)
    header = json.loads(content[4 : 4 + length])
    numbers = np.frombuffer(content, np.uint8, offset=4 + length)
    maps, patch = attention_maps(*image), patch_attention(*image, 1, 0)
    assert len(header["layers"]) == len(maps)
    for layer, whole, one in zip(header["layers"], maps, patch, strict=True):
        (h, w), heads = layer["grid"], layer["heads"]
        rows = numbers[layer["offset"] :][: heads * (h * w + 1) * h * w].reshape(heads, h * w + 1, h, w)
        for found, expected in ((rows[:, 0], whole[0]), (rows[:, 1 + w], one[0])):
            scaled = 255 * expected / expected.max(axis=(1, 2), keepdims=True)
            np.testing.assert_allclose(found, scaled, atol=1)
    h, w = header["rollout"]["grid"]
    assert len(numbers) == header["rollout"]["offset"] + h * w


def test_the_model_describes_itself(service, photo):
    facts = service.get("/model").json()
    assert (facts["name"], facts["form"], facts["task"]["classes"]) == ("digits", "probabilities", list("0123456789"))
    assert facts["explains"]["layers"][0] == {"grid": [2, 2], "heads": facts["explains"]["layers"][0]["heads"]}
    assert facts["version"] == service.post("/predict", photo).json()["version"]
    exported = service.get("/model", model="file").json()
    assert (exported["explains"], exported["embeds"], exported["engine"]) == (None, False, "onnx")
    assert service.get("/models").json() == {"models": ["digits", "file"], "default": "digits"}


@pytest.mark.parametrize(
    ("path", "params", "status", "code"),
    [
        ("/predict", {"model": "digit"}, 404, "unknown_model"),
        ("/predict", {"top": 0}, 422, "bad_parameter"),
        ("/predict", {"tops": 3}, 422, "bad_parameter"),
        ("/embed", {"top": 3}, 422, "bad_parameter"),
        ("/explain", {"layer": 99}, 422, "no_such_layer"),
        ("/explain", {"layer": 1, "head": 99}, 422, "no_such_head"),
        ("/explain", {"patch": "9,9"}, 422, "no_such_patch"),
        ("/explain", {"patch": "../etc"}, 422, "bad_parameter"),
        ("/explain", {"method": "relevance", "target": "eleven"}, 422, "unknown_target"),
        ("/explain", {"method": "relevance", "format": "binary"}, 422, "not_supported"),
        ("/explain", {"method": "relevance", "layer": 1}, 422, "not_supported"),
        ("/explain", {"method": "attention", "target": "0"}, 422, "not_supported"),
        ("/explain", {"format": "binary", "head": 1}, 422, "not_supported"),
        ("/explain", {"model": "file"}, 422, "not_supported"),
        ("/embed", {"model": "file"}, 422, "not_supported"),
        ("/nothing", {}, 404, "not_found"),
    ],
)
def test_wrong_questions_get_a_reason(service, files, path, params, status, code):
    answer = service.post(path, files[0].read_bytes(), **params)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_an_unknown_parameter_is_answered_with_the_known_ones(service, photo):
    for params, hint in (({"tops": 3}, "Did you mean 'top'?"), ({"x": 1}, "The parameters are model, top, scores,")):
        assert hint in service.post("/predict", photo, **params).json()["error"]["message"]
    assert service.get("/model", name="file").status_code == 422
    assert service.get("/health", now=17).status_code == 200  # a probe may add what it likes


def test_head_is_answered_like_get_without_the_body(service):
    for path in ("/", "/docs", "/assets/app.js", "/model", "/health", "/metrics", "/nothing", "/predict"):
        get, head = service.get(path), service.client.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert head.status_code == 405


def test_the_health_check_of_the_image_passes(service):
    program = re.search(r'"(import urllib.*)"\]', DOCKERFILE.read_text())[1]
    exec(program.replace("http://127.0.0.1:8000", service.address))
    with pytest.raises(OSError, match="404"):
        exec(program.replace("http://127.0.0.1:8000/health", f"{service.address}/nothing"))


def test_probes_and_documents(service):
    assert service.get("/health").json() == {"status": "ok"}
    assert service.get("/ready").json() == {"status": "ready"}
    document = service.get("/openapi.json").json()
    assert {"/predict", "/explain", "/embed", "/model", "/health", "/ready", "/metrics"} <= set(document["paths"])
    for path in ("/", "/docs"):
        page = service.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "//" not in page.text.replace("</", "")  # nothing from elsewhere
        again = service.client.get(path, headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304
