"""The verbs with words: predict by labels, search, zero-shot evaluation, explanations, export and the service."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import vitrail
from vitrail.data.images import read_image
from vitrail.errors import UserError
from vitrail.runs.run import Run

LABELS = ["a red circle", "a green square", "a blue bar"]


def pictures(captions: Path, what: str) -> list[str]:
    return sorted(map(str, captions.parent.glob(f"{what}-*.png")))


def test_a_run_is_for_searching(worded):
    assert re.search(r"Next: vitrail search \S+worded IMAGES 'a sentence'", (Path(worded) / "train.log").read_text())


def test_predict_by_labels(worded, captions, vitrail_says):
    found = {
        what: list(vitrail.predict(worded, pictures(captions, what), labels=LABELS))
        for what in ("red-circle", "blue-bar")
    }
    assert np.mean([answer.labels[0] == "a red circle" for answer in found["red-circle"]]) > 0.7
    assert np.mean([answer.labels[0] == "a blue bar" for answer in found["blue-bar"]]) > 0.7
    assert all(abs(sum(answer.probabilities) - 1) < 1e-6 for answer in found["red-circle"])
    code, out, _ = vitrail_says("predict", worded, pictures(captions, "red-circle")[0], "--labels", "red, blue,green")
    assert code == 0
    assert "red" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no classes of its own. Give words to choose from"),
        ({"labels": ""}, "There are no labels to choose from"),
        ({"labels": " , "}, "There are no labels to choose from"),
        ({"labels": "cat,Cat"}, "Labels must differ in more than case, but 'cat' and 'Cat' do not"),
        ({"labels": "cat,,dog"}, "'labels' must be a name"),
        ({"labels": "cat,cat"}, "Labels must differ, but 'cat' is given twice"),
        ({"templates": ["a {}"]}, "--templates needs labels"),
        ({"labels": "cat", "templates": ["a photo"]}, "A template must have {} where the label goes"),
    ],
    ids=str,
)
def test_bad_labels(worded, captions, options, message):
    with pytest.raises(UserError, match=message):
        list(vitrail.predict(worded, pictures(captions, "red-circle"), **options))


def test_a_run_without_words_is_asked_for_words(trained, digits):
    for ask in (
        lambda: list(vitrail.predict(trained, digits, labels="cat,dog")),
        lambda: vitrail.search(trained, digits, "a three"),
        lambda: vitrail.evaluate(trained, digits, method="zeroshot"),
    ):
        with pytest.raises(UserError, match="was not trained with captions, so it cannot read words"):
            ask()


def test_search_by_a_sentence_and_by_a_picture(worded, captions, tmp_path, vitrail_says):
    index = tmp_path / "index.npz"
    hits = vitrail.search(worded, captions.parent, "a green square", top=5, index=index)
    assert sum("green" in hit.file for hit in hits) >= 4
    assert [hit.similarity for hit in hits] == sorted((hit.similarity for hit in hits), reverse=True)
    picture = pictures(captions, "yellow-bar")[0]
    best, *_ = vitrail.search(worded, captions.parent, picture, index=index)
    assert best.file == picture
    assert best.similarity == pytest.approx(1, abs=1e-4)
    code, out, _ = vitrail_says("search", worded, captions.parent, "a red circle", "--top", 2, "--json")
    assert code == 0
    assert len(json.loads(out)) == 2


def test_an_index_reads_only_what_is_new(worded, captions, tmp_path, monkeypatch):
    from vitrail.runs.predictor import Predictor

    folder = tmp_path / "some"
    folder.mkdir()
    for name in pictures(captions, "red-circle")[:3]:
        (folder / Path(name).name).write_bytes(Path(name).read_bytes())
    index, counts = tmp_path / "index.npz", []
    outputs = Predictor.outputs
    monkeypatch.setattr(Predictor, "outputs", lambda self, pixels: counts.append(len(pixels)) or outputs(self, pixels))
    vitrail.search(worded, folder, "red", index=index)
    (folder / "new.png").write_bytes(Path(pictures(captions, "blue-bar")[0]).read_bytes())
    (folder / "broken.png").write_bytes(b"no image")
    hits = vitrail.search(worded, folder, "red", index=index)
    assert sum(counts) == 4
    assert len(hits) == 4
    with pytest.raises(UserError, match=r"--index must be an \.npz file"):
        vitrail.search(worded, folder, "red", index=tmp_path / "index.txt")
    index.write_bytes(b"")
    with pytest.raises(UserError, match="is not an index"):
        vitrail.search(worded, folder, "red", index=index)
    with pytest.raises(UserError, match="The query is empty"):
        vitrail.search(worded, folder, " ")


def test_an_index_keeps_the_vectors_of_other_images(worded, captions, tmp_path):
    index, files = tmp_path / "new" / "index.npz", pictures(captions, "red-circle")[:2]
    copy = tmp_path / "copy.png"
    copy.write_bytes(Path(files[0]).read_bytes())
    for file in (*files, str(copy)):
        vitrail.search(worded, file, "red", index=index)
    assert np.load(index)["files"].tolist() == [*files, str(copy)]
    copy.unlink()
    vitrail.search(worded, pictures(captions, "blue-bar")[0], "red", index=index)
    assert np.load(index)["files"].tolist() == [*files, pictures(captions, "blue-bar")[0]]


def test_images_of_the_same_name_have_their_own_vectors(worded, captions, tmp_path, monkeypatch):
    index, similarities = tmp_path / "index.npz", []
    for kind in ("red-circle", "blue-bar"):
        (tmp_path / kind).mkdir()
        pixels = read_image(pictures(captions, kind)[0])
        np.save(tmp_path / kind / "a.npy", pixels)
        os.utime(tmp_path / kind / "a.npy", (0, 0))  # as an archive leaves it
        monkeypatch.chdir(tmp_path / kind)
        images = ("a.npy", pixels)  # a relative path, and an image without one
        hits = [vitrail.search(worded, [image], "a red circle", index=index)[0] for image in images]
        assert hits[0].similarity == pytest.approx(hits[1].similarity)
        similarities.append(hits[0].similarity)
    assert abs(similarities[0] - similarities[1]) > 1e-3


def test_images_that_a_search_cannot_read_are_named(worded, captions, tmp_path, vitrail_says, caplog):
    (tmp_path / "bad.png").write_bytes(b"no image")
    good = pictures(captions, "red-circle")[0]
    code, out, _ = vitrail_says("search", worded, good, tmp_path / "bad.png", "red", "--json")
    assert code == 1
    assert [hit["file"] for hit in json.loads(out)] == [good]
    assert "1 of the images cannot be read and are left out" in caplog.text
    assert "bad.png" in caplog.text


def test_a_missing_picture_is_not_searched_for_as_a_sentence(worded, captions, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "birds").mkdir()
    monkeypatch.chdir(tmp_path)
    for query in ("typo.png", str(tmp_path / "pipe"), f"{tmp_path}/birds", "http://127.0.0.1:9/x.png"):
        with pytest.raises(UserError, match="cannot be read"):
            vitrail.search(worded, captions.parent, query)
    for sentence in ("birds", "what is in typo.png"):
        assert vitrail.search(worded, captions.parent, sentence, top=1)


def test_a_long_sentence_is_cut_and_reported(worded, captions, caplog):
    with caplog.at_level("WARNING", "vitrail"):
        vitrail.search(worded, captions.parent, "a red circle on a wide and grey ground")
    assert "1 text is longer than the model reads, and is cut." in caplog.text


def test_long_labels_are_cut_and_counted(worded, captions, caplog):
    with caplog.at_level("WARNING", "vitrail"):
        list(vitrail.predict(worded, pictures(captions, "red-circle")[:1], labels=["red", "a " * 99, "b " * 99]))
    assert "2 texts are longer than the model reads, and are cut." in caplog.text


def test_any_run_compares_pictures(trained, digits):
    (best,) = vitrail.search(trained, digits, str(digits / "3" / "3.png"), top=1)
    assert best.file == str(digits / "3" / "3.png")


def test_zero_shot_classification_of_labelled_data(worded, captions, tmp_path):
    table = captions.parent / "shapes.csv"
    rows = [row.split(",") for row in captions.read_text().splitlines()[1:]]
    table.write_text("\n".join(["image,label,split", *(f"{name},{text[2:]},{part}" for name, text, part in rows)]))
    scores = vitrail.evaluate(worded, table, method="zeroshot", templates=["a {}"], out=tmp_path)
    assert scores.row()["top1"] > 0.2  # of 12 classes
    retrieved = vitrail.evaluate(worded).row()["text_r1"]
    assert scores.row()["top1"] == pytest.approx(retrieved, abs=1e-6)  # the same captions, the same question
    with pytest.raises(UserError, match="zeroshot needs labelled data"):
        vitrail.evaluate(worded, method="zeroshot")


def test_explain_shows_what_speaks_for_a_word(worded, captions, tmp_path):
    picture = pictures(captions, "red-circle")[0]
    explanation = vitrail.explain(worded, picture, labels="a red circle,a blue bar", target="a blue bar", out=tmp_path)
    assert any("relevance" in file.name for file in explanation.files)
    with pytest.raises(UserError, match=r"no classes of its own, so there is no 'cat'\. Give words .* --labels"):
        vitrail.explain(worded, picture, target="cat", out=tmp_path)
    with pytest.raises(UserError, match="The model has no class 'cat'"):
        vitrail.explain(worded, picture, labels="a red circle,a blue bar", target="cat", out=tmp_path)


def test_the_report_shows_best_and_worst_matches(worded):
    page = Run(worded).report_file.read_text()
    assert "Images that find their caption" in page
    assert "matches images of" in page
    assert "Labels are not read" not in page


def test_both_towers_are_exported_with_the_tokenizer(worded, captions, tmp_path):
    proof = vitrail.export(worded, out=tmp_path / "m.onnx", no_preprocess=True)  # whose shapes take most of the time
    assert set(proof.parts) == {"m.onnx", "m.text.onnx"}
    ours = vitrail.search(worded, captions.parent, "a green square", top=5)
    theirs = vitrail.search(tmp_path / "m.onnx", captions.parent, "a green square", top=5)
    assert [hit.file for hit in ours] == [hit.file for hit in theirs]
    assert np.allclose([hit.similarity for hit in ours], [hit.similarity for hit in theirs], atol=1e-3)
    assert (
        vitrail.evaluate(tmp_path / "m.onnx", captions, split="val").row()["text_r1"]
        == vitrail.evaluate(worded).row()["text_r1"]
    )
    picture = pictures(captions, "red-circle")[0]
    (ours,) = vitrail.predict(worded, picture, labels=LABELS, templates=["{}", "see {}"])
    (theirs,) = vitrail.predict(tmp_path / "m.onnx", picture, labels=LABELS, templates=["{}", "see {}"])
    assert theirs.labels == ours.labels
    assert np.allclose(theirs.probabilities, ours.probabilities, atol=1e-3)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "m.text.onnx"))
    assert json.loads(session.get_modelmeta().custom_metadata_map["tokenizer"])["kind"] == "bytes"
