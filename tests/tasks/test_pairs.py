"""Images with captions: where they come from, and how they are learnt and measured."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO

import numpy as np
import pytest
from captioned import COLOURS, SETTINGS, SHAPES, drawn
from PIL import Image

import vitrail
from vitrail import tokenizers
from vitrail.data import open_data
from vitrail.errors import UserError
from vitrail.runs.run import Run
from vitrail.tasks import Multiclass, Pairs, pair_scores
from vitrail.tasks.captions import are_captions, joined, pack, unpack
from vitrail.tasks.pair_scores import Match, Reader
from vitrail.tokenizers import Tokenizer

pytestmark = pytest.mark.usefixtures("worded", "plain_runs")


def image(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn(colour, "circle", np.random.default_rng(0)).save(path)


# Where captions come from ------------------------------------------------------------------------------------


def texts(data, split="train"):
    return [unpack(row) for row in data.splits[split].targets]


def test_captions_survive_as_bytes():
    rows = ["a cat\nzwei Kätzchen 🐈", "a dog", "x" * 2000]
    packed = pack(rows)
    assert packed.dtype == np.uint8
    assert unpack(packed[0]) == ("a cat", "zwei Kätzchen 🐈")
    assert unpack(packed[1].astype(np.float32)) == ("a dog",)
    assert unpack(packed[2]) == ("x" * 1000,)


def test_a_column_of_captions(captions):
    data = open_data(captions)
    assert isinstance(data.task, Pairs)
    assert (len(data.splits["train"]), len(data.splits["val"])) == (72, 24)
    assert texts(data)[0] == ("a red circle",)
    assert (data.task.tokenizer.kind, data.task.context) == ("bytes", len("a yellow square") + 2)


def test_several_rows_of_an_image_are_several_captions(tmp_path):
    for name in "abc":
        image(tmp_path / f"{name}.png")
    rows = ["image,caption", "a.png,a red ball", "b.png,two", "a.png,a round thing", "a.png,a red ball", "c.png,three"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    data = open_data(tmp_path / "t.csv", val=tmp_path / "t.csv")
    assert texts(data) == [("a red ball", "a round thing"), ("two",), ("three",)]


def test_a_cell_is_one_caption_and_a_list_is_several(tmp_path):
    for name in "ab":
        image(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text('image,caption\na.png,"a ball, ""red"",\non the grass"\nb.png,two|three\n')
    assert texts(open_data(tmp_path / "t.csv", val=tmp_path / "t.csv")) == [
        ('a ball, "red", on the grass',),
        ("two|three",),
    ]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    listed = {"image": ["a.png", "b.png"], "captions": [["a red\nball", "a|b"], ["two"]]}
    parquet.write_table(pyarrow.table(listed), tmp_path / "t.parquet")
    data = open_data(tmp_path / "t.parquet", val=tmp_path / "t.parquet")
    assert texts(data) == [("a red ball", "a|b"), ("two",)]


def test_captions_that_differ_only_in_case_are_equal():
    packed = [unpack(row) for row in pack(["A cat\na cat", "a Cat", "a dog"])]
    assert packed == [("A cat",), ("A cat",), ("a dog",)]


def test_text_files_beside_images(tmp_path):
    for split in ("train", "val"):
        for i, text in enumerate(("a red circle\nsomething round\n", "another")):
            image(tmp_path / split / f"{i}.png")
            (tmp_path / split / f"{i}.txt").write_text(text)
    data = open_data(tmp_path)
    assert texts(data) == texts(data, "val") == [("a red circle", "something round"), ("another",)]
    (tmp_path / "val" / "1.txt").unlink()
    with pytest.raises(UserError, match=r"An image has no caption: .*1\.png\. Add a \.txt file"):
        open_data(tmp_path)


def test_the_first_image_may_lack_its_caption(tmp_path):
    for name in "abc":
        image(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("" if name == "a" else "a ball")
    with pytest.raises(UserError, match=r"An image has no caption: .*a\.png\. Add a \.txt file"):
        open_data(tmp_path)


def test_cocos_captions(tmp_path):
    document = {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 9, "file_name": "b.png"}],
        "annotations": [
            {"image_id": 9, "caption": "blue"},
            {"image_id": 7, "caption": "red "},
            {"image_id": 7, "caption": "a red one"},
        ],
    }
    for name in "ab":
        image(tmp_path / "pictures" / f"{name}.png")
    path = tmp_path / "captions.json"
    path.write_text(json.dumps(document))
    data = open_data(path, val=path, image_dir=str(tmp_path / "pictures"))
    assert texts(data) == [("red", "a red one"), ("blue",)]
    with pytest.raises(UserError, match=r"None of the images of .* exist"):
        open_data(path)
    path.write_text('{"images": [], "annotations": [{"caption": "red"}]}')
    with pytest.raises(UserError, match="is not a COCO captions file"):
        open_data(path)


def test_shards_and_class_folders(tmp_path, digits):
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for i in range(6):
            picture = BytesIO()
            Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(picture, "png")
            for end, content in ((".png", picture.getvalue()), (".txt", f"picture number {i} of six".encode())):
                member = tarfile.TarInfo(f"{i}{end}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
    data = open_data(tmp_path / "train-0.tar")
    assert isinstance(data.task, Pairs)
    every = sorted(texts(data) + texts(data, "val"))
    assert every == [(f"picture number {i} of six",) for i in range(6)]
    classes = open_data(digits, task="pairs")  # class names as captions
    assert {text for (text,) in texts(classes)} == set("0123456789")
    assert isinstance(open_data(digits).task, Multiclass)


def test_hugging_face_captions(tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = [Image.new("RGB", (8, 8), (40 * i, 0, 0)) for i in range(6)]
    captions = [[f"number {i}", f"the {i}th"] for i in range(6)]
    datasets.Dataset.from_dict({"image": pictures, "captions": captions}).cast_column(
        "image", datasets.Image()
    ).save_to_disk(tmp_path / "saved")
    data = open_data(tmp_path / "saved")
    assert isinstance(data.task, Pairs)
    assert ("number 0", "the 0th") in texts(data) + texts(data, "val")


def test_labels_are_not_taken_for_captions():
    assert not are_captions(["golden retriever", "tabby cat"] * 3)
    assert not are_captions(["a photo of a very good dog"] * 10)
    assert are_captions(["a man rides a horse", "two dogs play in snow"])


def test_bad_captions(tmp_path, captions, digits):
    for name in "ab":
        image(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,\n")
    with pytest.raises(UserError, match="row 3 has no caption"):
        open_data(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,one\n")
    with pytest.raises(UserError, match="has only one caption"):
        open_data(tmp_path / "t.csv")
    with pytest.raises(UserError, match="'context' must be at least 3 tokens"):
        open_data(captions, context=2)
    with pytest.raises(UserError, match="--tokenizer applies to captions, but the data has classes"):
        open_data(digits, tokenizer="bpe")


def test_long_captions_are_cut_and_counted(captions, caplog):
    with caplog.at_level("WARNING", "vitrail"):
        data = open_data(captions, context=12)
    assert "of 12 different captions are longer than 12 tokens and are cut" in caplog.text
    assert data.task.context == 12


def test_captions_cut_in_an_evaluation_are_counted():
    task = Pairs(reader=Letters(Tokenizer(), 4))
    meter = task.meter()
    meter.add(np.eye(4)[:2], pack(["a", "bbb"]))
    scores = meter.scores()
    assert scores.cut == 1
    assert "1 caption is longer than the model reads, and is cut" in scores.table()
    assert task.restore(scores.to_json()).cut == 1


def test_check_finds_what_is_wrong_with_captions(tmp_path):
    rng = np.random.default_rng(0)
    rows = ["image,caption"]
    for i in range(40):
        colour, shape = list(COLOURS)[i % 4], SHAPES[i % 3]
        drawn(colour, shape, rng).save(tmp_path / f"{i}.png")
        text = "an image" if i < 12 else "…" if i == 12 else "long " * 30 if i == 13 else f"number {i // 2}"
        rows.append(f"{i}.png,{text}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    found = {f.kind: f for f in vitrail.check(tmp_path / "t.csv", out=tmp_path).findings}
    assert found["common"].detail == "'an image' describes 12 of 40 images"
    assert found["wordless"].severity == "error"
    assert found["long"].detail == "1 of 16 different captions"
    assert found["repeated"].detail == "14 of 16 different captions"
    assert "conflict" not in found


# How they are measured ---------------------------------------------------------------------------------------


class Letters(Reader):
    """Embeds a text by the letters a to d that it contains."""

    scale = 2.0

    def read(self, given):
        rows = np.array([[letter in text for letter in "abcd"] for text in given], float)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_recall_counts_any_caption_and_any_image():
    captions = [("a", "ab"), ("b",), ("b",), ("c",)]
    images = np.array([[1.0, 0.9, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0.5, 0.4, 0]])
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    match = Match(images, captions, Letters(Tokenizer(), 99))
    assert match.texts == ["a", "ab", "b", "c"]
    assert match.caption_rank.tolist() == [0, 0, 3, 1]  # image 2 is like no caption: all others come first
    assert match.image_rank.tolist() == [0, 0, 0, 0]
    alike = images @ Letters(Tokenizer(), 99)(match.texts).T * 2
    assert match.losses[0] == pytest.approx(np.log(np.exp(alike[0]).sum()) - np.log(np.exp(alike[0, :2]).sum()))


def test_a_collapsed_model_finds_nothing():
    match = Match(np.ones((3, 4)) / 2, [("a",), ("b",), ("c",)], Letters(Tokenizer(), 99))
    assert match.caption_rank.tolist() == match.image_rank.tolist() == [2, 2, 2]


def test_merged_meters_measure_what_one_would():
    task = Pairs(reader=Letters(Tokenizer(), 99))
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(9, 4)), pack(["a", "b", "c", "d", "ab\ncd", "bc", "a", "cd", "abc"])
    one, first, second = task.meter(), task.meter(), task.meter()
    one.add(outputs, targets)
    first.add(outputs[:4], targets[:4])
    second.add(outputs[4:], targets[4:])
    first.merge(second)
    assert one.scores().to_json() == first.scores().to_json()
    assert task.restore(one.scores().to_json()).row() == pytest.approx(one.scores().row(), abs=1e-6)


# How they are learnt -----------------------------------------------------------------------------------------


def test_training_matches_images_and_captions(worded):
    metrics = Run(worded).card.metrics
    assert metrics["text_r5"] > 0.8  # of 12 captions: chance is 0.42
    assert metrics["text_r1"] > 0.2  # chance is 0.08
    scores = vitrail.evaluate(worded)
    assert scores.row()["text_r5"] == pytest.approx(metrics["text_r5"], abs=1e-6)
    assert "captions of an image" in scores.table()


@pytest.mark.parametrize("options", [{"loss": "softmax"}, {"tokenizer": "bpe"}, {"tokenizer": "clip"}], ids=str)
def test_other_losses_and_tokenizers_train_and_load(captions, tmp_path, options):
    run = vitrail.train(captions, out=tmp_path, name="run", **(SETTINGS | {"epochs": 1} | options))
    model = vitrail.load(run.path)
    assert (model.logit_bias is None) == (options.get("loss") == "softmax")
    assert model.card.task.words()(["a red circle"]).shape == (1, 128)


def test_a_run_resumes_to_the_bit(captions, tmp_path):
    import torch

    settings = SETTINGS | {"epochs": 2, "drop": 0.1}
    whole = vitrail.train(captions, out=tmp_path, name="whole", **settings)
    vitrail.train(captions, out=tmp_path, name="half", on_epoch=lambda *_: True, **settings)
    half = vitrail.train(resume=str(tmp_path / "half"))
    one, other = (vitrail.load(run.path).state_dict() for run in (whole, half))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_lit_teaches_words_to_a_frozen_tower(captions, worded, tmp_path, caplog):
    import torch

    table = captions.parent / "colours.csv"
    rows = captions.read_text().splitlines()[1:]
    lines = ["image,label,split", *(f"{n},{c.split()[1]},{s}" for n, c, s in (row.split(",") for row in rows))]
    table.write_text("\n".join(lines))
    seen = {name: SETTINGS[name] for name in ("model", "img_size", "stem", "opt", "batch_size")}
    tower = vitrail.train(table, out=tmp_path, name="tower", epochs=1, **seen)
    before = vitrail.load(tower.path)
    with caplog.at_level("INFO", "vitrail"):
        run = vitrail.train(
            captions, weights=str(tower.path), freeze="image", out=tmp_path, name="lit", epochs=2, batch_size=24
        )
    assert "new text tower and projections" in caplog.text
    after = vitrail.load(run.path)
    kept = {name: value for name, value in before.state_dict().items() if not name.startswith("head.")}
    assert all(torch.equal(after.image.state_dict()[name], value) for name, value in kept.items())
    # And back: a classifier from the image tower of a model that reads captions.
    again = vitrail.train(table, weights=str(worded), out=tmp_path, name="back", epochs=1, batch_size=24)
    assert vitrail.load(again.path).config.classes == 4
    with pytest.raises(UserError, match="--freeze image applies to a model with a text tower"):
        vitrail.train(table, weights=str(tower.path), freeze="image", out=tmp_path, epochs=1)


def test_a_run_is_planned(captions, worded):
    planned = vitrail.plan(data=captions, **SETTINGS)
    assert planned.parameters == sum(p.numel() for p in vitrail.load(worded).parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ce"}, "--loss must be one of sigmoid, softmax for image-text data"),
        ({"mixup": 0.2}, "--mixup does not apply to captions"),
        ({"batch_size": 1}, "--batch-size must be 2 or more"),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_captions(captions, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        vitrail.train(captions, out=tmp_path, **(SETTINGS | options))


def test_losses_of_captions_do_not_suit_classes(tiny, tmp_path):
    with pytest.raises(UserError, match="--loss must be one of ce, bce for multi-class data"):
        vitrail.train("digits", out=tmp_path, **tiny, loss="softmax")


def test_captions_of_one_image_are_joined_once():
    assert joined(["a  cat", "", "a cat", "two\tcats"]) == "a cat\ntwo cats"


def test_labels_do_not_fill_the_memory_of_a_service(monkeypatch):
    monkeypatch.setattr(pair_scores, "MOST_LABELS", 10)
    monkeypatch.setattr(tokenizers, "_REMEMBERED", 10)
    reader, tokenizer = Letters(Tokenizer("bytes"), 9), Tokenizer("bpe")
    for number in range(100):
        label = "abcd"[number % 4] * (number + 1)
        first = pair_scores.label_embeddings(reader, [label], ["{}"])
        assert np.array_equal(first, pair_scores.label_embeddings(reader, [label], ["{}"]))
        assert tokenizer.ids(label) == Tokenizer("bpe").ids(label)
    assert len(reader._labels) <= 11
    assert not reader._known
    assert len(tokenizer._known) <= 10
