"""Classifiers on frozen features, against scikit-learn and by hand; and that features are computed once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

import vitrail
from vitrail.data import open_data
from vitrail.data.holdout import stratify
from vitrail.errors import UserError
from vitrail.evaluate import probes
from vitrail.evaluate.probes import fewshot, knn, least_squares, linear, logistic
from vitrail.models.vit import ViT
from vitrail.weights import open_run

pytestmark = pytest.mark.usefixtures("plain_runs")

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """Digits as features of 64 numbers: to learn from, and to be measured on."""
    pixels, labels = load_digits(return_X_y=True)
    noise = np.random.default_rng(0).normal(0, 4, pixels.shape)  # so that not all are told apart
    features = (pixels + noise).astype(np.float32)
    return features[:600], labels[:600], features[600:900], labels[600:900]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run that may be changed, without what other tests have kept in it."""
    return Path(shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("features")))


def pictures(path: Path, classes: tuple[int, ...], images: int = 240) -> Path:
    """Some classes of digits as an `.npz` file with splits."""
    pixels, labels = load_digits(return_X_y=True)
    rows = np.flatnonzero(np.isin(labels, classes))[:images]
    names = np.array(["zero", "one", "two", "three"])[labels[rows]]
    shades = (pixels[rows].reshape(-1, 8, 8) * 15).astype(np.uint8)
    half = images // 2
    np.savez(path, x_train=shades[:half], y_train=names[:half], x_test=shades[half:], y_test=names[half:])
    return path


# As the start of a head


@pytest.mark.parametrize("classes", [(0, 1, 2, 3), (0, 1)], ids=["four", "two"])
def test_a_head_computes_the_logits_of_scikit_learn(
    arrays: Arrays, classes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    x, y, test, _ = arrays
    x, y = x[np.isin(y, classes)], y[np.isin(y, classes)]
    scaler = StandardScaler().fit(x)
    peer = LogisticRegression(C=probes._PRIOR, max_iter=1000).fit(scaler.transform(x), y)
    monkeypatch.setattr(probes, "_START", 1000)
    weights, bias = logistic(x, y, 5)  # no image has one of the other classes
    logits = test @ weights.T + bias
    given, expected = np.exp(logits[:, list(classes)]), peer.predict_proba(scaler.transform(test))
    np.testing.assert_allclose(given / given.sum(axis=1, keepdims=True), expected, atol=1e-3)
    assert np.isin(logits.argmax(axis=1), classes).mean() > 0.99


# k-NN


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 1.0)])
def test_knn_is_that_of_scikit_learn(arrays: Arrays, k: int, temperature: float):
    x, y, test, labels = arrays
    peer = KNeighborsClassifier(k, metric="cosine", weights=lambda far: np.exp((1 - far) / temperature)).fit(x, y)
    expected = np.zeros((10, 10), np.int64)
    np.add.at(expected, (labels, peer.predict(test)), 1)
    metrics = knn(x, y, test, labels, k=k, temperature=temperature)
    assert np.array_equal(metrics.confusion, expected)
    assert metrics.top1 == peer.score(test, labels) < 1
    assert metrics.settings == {"k": k, "temperature": temperature}


def test_knn_is_the_same_in_small_pieces(arrays: Arrays, monkeypatch: pytest.MonkeyPatch):
    whole = knn(*arrays)
    monkeypatch.setattr(probes, "_SIMILARITIES", 7 * len(arrays[0]))
    assert np.array_equal(knn(*arrays).confusion, whole.confusion)


def test_votes_at_a_low_temperature_do_not_overflow(arrays: Arrays):
    assert knn(*arrays, temperature=1e-4).top1 == knn(*arrays, k=1).top1


def test_all_vote_if_there_are_fewer_than_k():
    metrics = knn([[1, 0], [0, 1]], [0, 1], [[2, 1], [1, 2]], [0, 1])
    assert (metrics.top1, metrics.settings["k"]) == (1, 2)


# Linear


def test_linear_of_few_images_takes_others_that_are_far_from_them():
    x = np.array([[0.0], [0.1], [1.0], [1.1]], np.float32).repeat(5, axis=0)
    y = np.array([0, 0, 1, 1]).repeat(5)
    far = np.array([[-1e6], [1e6], [0.5], [0.6]], np.float32)  # the probability of the other class is 0 for two
    assert linear(x, y, far, np.array([0, 1, 0, 1])).confusion.tolist() == [[2, 0], [0, 2]]


def test_linear_is_the_regression_of_scikit_learn_at_the_strength_that_does_best_on_held_out_images(arrays: Arrays):
    x, y, test, labels = arrays
    keep, held = stratify(y, probes.HELD_OUT, seed=3)

    def fitted(rows: np.ndarray, strength: float) -> tuple[StandardScaler, LogisticRegression]:
        scale = StandardScaler().fit(x[rows])
        return scale, LogisticRegression(C=1 / (strength * len(rows)), max_iter=1000).fit(
            scale.transform(x[rows]), y[rows]
        )

    found = {}
    for strength in probes.STRENGTHS:
        scale, model = fitted(keep, strength)
        found[strength] = model.score(scale.transform(x[held]), y[held])
    best = max(found, key=found.__getitem__)
    scale, model = fitted(np.arange(len(x)), best)

    metrics = linear(x, y, test, labels, seed=3)
    assert metrics.settings["l2"] == best
    assert metrics.settings["held_out_top1"] == pytest.approx(found[best], abs=0.02)  # warm starts end a little apart
    assert metrics.top1 == pytest.approx(model.score(scale.transform(test), labels), abs=0.01)
    assert metrics.top1 > 0.7


def test_what_is_measured_on_does_not_change_the_probe(arrays: Arrays):
    x, y, test, labels = arrays
    misleading = linear(x, y, test, (labels + 1) % 10)
    assert misleading.settings == linear(x, y, test, labels).settings
    assert misleading.top1 < 0.1


def test_classes_that_only_the_measured_images_have_are_never_guessed():
    x, y = np.array([[0.0], [0.1], [1.0], [1.1]] * 3), np.array([0, 0, 2, 2] * 3)
    metrics = linear(x, y, [[0.0], [1.0], [5.0]], [0, 2, 1], ["a", "b", "c"])
    assert metrics.confusion.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert metrics.per_class[1].name == "b"


# Few-shot


@pytest.mark.parametrize("images", [30, 300])  # fewer and more than features
def test_least_squares_is_the_direct_solution(arrays: Arrays, images: int):
    x, y, test, _ = arrays
    x, y = x[:images], y[:images]
    weights, bias = least_squares(x, y, 10, l2=8.0)

    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64) + 1e-5
    # The ridge as rows of their own, so that it is a plain least-squares problem.
    rows = np.vstack([np.hstack([(x - mean) / std, np.full((images, 1), 100.0)]), np.sqrt(8.0) * np.eye(65)])
    targets = np.vstack([2.0 * np.eye(10)[y] - 1, np.zeros((65, 10))])
    solution = np.linalg.lstsq(rows, targets, rcond=None)[0]
    expected = (test - mean) / std @ solution[:-1] + 100 * solution[-1]
    assert test @ weights + bias == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_few_shots_are_so_many_images_of_every_class(arrays: Arrays, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[bytes, ...]] = []

    def noted(x: np.ndarray, y: np.ndarray, classes: int, l2: float) -> Any:
        assert len(set(np.bincount(y, minlength=classes))) == 1
        seen.append(tuple(row.tobytes() for row in x))
        return least_squares(x, y, classes, l2)

    monkeypatch.setattr(probes, "least_squares", noted)
    metrics = fewshot(*arrays, shots=(1, 5), draws=3)
    assert [len(chosen) for chosen in seen] == [10, 50] * 3
    assert all(len(set(chosen)) == len(chosen) for chosen in seen)
    assert all(set(few) <= set(many) for few, many in zip(seen[::2], seen[1::2], strict=True))
    assert len({frozenset(chosen) for chosen in seen}) == 6  # every draw is another
    for result in metrics.shots:
        assert result.mean == pytest.approx(np.mean(result.top1))
        assert result.std == pytest.approx(np.std(result.top1, ddof=1))
    one, five = metrics.shots
    assert 0.2 < one.mean < five.mean


def test_draws_depend_on_the_seed_alone(arrays: Arrays):
    first = fewshot(*arrays, seed=1).to_json()
    assert first == fewshot(*arrays, seed=1).to_json()
    assert first != fewshot(*arrays, seed=2).to_json()
    more = fewshot(*arrays, seed=1, shots=[10, 3], draws=7)
    assert more.shots[0].top1[:5] == pytest.approx(first["shots"][2]["top1"], abs=1e-6)
    assert fewshot(*arrays, draws=1).shots[0].std == 0


# Any of them


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": [0, 1]}, r"Features must have the shape \(N, D\)"),
        ({"features": [1, 2, 3]}, r"Features must have the shape \(N, D\)"),
        ({"features": [[1.0, 2.0, 3.0]], "labels": [0]}, "Training and test features must have one width"),
        ({"features": [[1.0, np.nan]], "labels": [0]}, "Features must be finite"),
        ({"labels": [0, -1, 1]}, "class indices"),
        ({"labels": [0.0, 1.0, 1.0]}, "class indices"),
        ({"classes": ["a"]}, "Labels must be below 1, the number of class names, but one is 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str):
    good = {"train_features": np.eye(3, 2), "train_labels": [0, 1, 1], "features": np.eye(3, 2), "labels": [0, 1, 1]}
    assert knn(**good).images == 3
    for probe in (knn, linear, fewshot):
        with pytest.raises(UserError, match=message):
            probe(**(good | changes))


def test_settings_that_cannot_be_are_refused(arrays: Arrays):
    x, y, test, labels = arrays
    for probe, settings, message in [
        (knn, {"k": 0}, "'k' must be at least 1"),
        (knn, {"temperature": 0.0}, "'temperature' above 0"),
        (linear, {"seed": -1}, "'seed' must be at least 0"),
        (fewshot, {"shots": ()}, "'shots' and 'draws' must be at least 1"),
        (fewshot, {"draws": 0}, "'shots' and 'draws' must be at least 1"),
        (fewshot, {"shots": (1, 1000)}, "1000 training images of each class, but '"),
    ]:
        with pytest.raises(UserError, match=message):
            probe(x, y, test, labels, **settings)
    with pytest.raises(UserError, match="at least two classes"):
        linear(x, np.zeros_like(y), test, labels)


# On a run


def no_model(*_: object) -> torch.Tensor:
    raise AssertionError("the model ran")


def test_features_are_those_of_the_model_and_are_computed_once(run: Path, monkeypatch: pytest.MonkeyPatch):
    first = vitrail.evaluate(run, method="knn")
    model, card = open_run(run)
    train, val = (open_data("digits").splits[name] for name in ("train", "val"))
    with torch.no_grad():
        x, test = (model.embed(torch.stack([card.preprocess(s.image(i)) for i in range(len(s))])) for s in (train, val))
    expected = knn(x, train.targets, test, val.targets, card.classes)
    assert np.array_equal(first.confusion, expected.confusion)
    assert (first.train_images, first.images) == (1438, 359)

    monkeypatch.setattr(ViT, "embed", no_model)
    assert vitrail.evaluate(run, method="knn").to_json() == first.to_json()
    assert vitrail.evaluate(run, method="fewshot").images == 359  # another method, the same features


def test_features_are_computed_anew_when_anything_changes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = pictures(tmp_path / "shapes.npz", (0, 1))
    vitrail.evaluate(run, data, method="knn")

    computed = 0
    embed = ViT.embed

    def counted(self: ViT, images: torch.Tensor) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return embed(self, images)

    def runs() -> int:
        """How many batches are computed; the two splits are a batch each."""
        nonlocal computed
        computed = 0
        vitrail.evaluate(run, data, method="knn")
        return computed

    monkeypatch.setattr(ViT, "embed", counted)
    assert runs() == 0

    card = json.loads((run / "model.json").read_text())
    card["preprocess"]["mean"] = [0.25]
    (run / "model.json").write_text(json.dumps(card))
    assert [runs(), runs()] == [2, 0]

    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\0")
    assert [runs(), runs()] == [2, 0]

    with np.load(data) as kept:
        changed = dict(kept)
    changed["x_train"][0, 0, 0] ^= 255
    np.savez(data, **changed)
    assert [runs(), runs()] == [1, 0]

    file = run / "features" / "shapes-train.npz"
    file.write_bytes(file.read_bytes()[:1000])
    assert [runs(), runs()] == [1, 0]
    assert sorted(path.name for path in file.parent.iterdir()) == ["shapes-train.npz", "shapes-val.npz"]


def test_features_of_files_are_kept_until_one_changes(run: Path, digits: Path, tmp_path: Path):
    data = Path(shutil.copytree(digits, tmp_path / "photos"))
    first = vitrail.evaluate(run, data, method="knn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ViT, "embed", no_model)
        assert vitrail.evaluate(run, data, method="knn").top1 == first.top1
        for file in data.rglob("*.png"):
            file.touch()
        with pytest.raises(AssertionError, match="the model ran"):
            vitrail.evaluate(run, data, method="knn")


def test_a_run_that_cannot_be_written_to_is_measured_all_the_same(run: Path, tmp_path: Path, caplog):
    (run / "features").write_text("a file where the folder would be")
    metrics = vitrail.evaluate(run, method="knn", out=tmp_path / "out")
    assert metrics.top1 > 0.5
    assert "features are not cached" in caplog.text


@pytest.mark.parametrize("method", ["knn", "linear", "fewshot"])
def test_classes_may_be_others_than_those_of_the_model(run: Path, tmp_path: Path, method: Any):
    data = pictures(tmp_path / "shapes.npz", (0, 1, 3))
    with pytest.raises(UserError, match="the model does not know"):
        vitrail.evaluate(run, data)
    metrics = vitrail.evaluate(run, data, method=method)
    accuracy = metrics.shots[-1].mean if method == "fewshot" else metrics.top1
    assert accuracy > 0.8
    if method != "fewshot":
        assert [score.name for score in metrics.per_class] == ["one", "three", "zero"]
    document = json.loads((run / "evaluation" / f"shapes-val-{method}" / "metrics.json").read_text())
    assert [document[name] for name in ("data", "split", "method", "images")] == ["shapes", "val", method, 120]


def test_what_cannot_be_probed_is_refused(run: Path, tmp_path: Path):
    pixels = np.zeros((20, 8, 8), np.uint8)
    np.savez(tmp_path / "labels.npz", images=pixels, labels=np.eye(2, dtype=np.uint8)[np.arange(20) % 2])
    with pytest.raises(UserError, match="needs one class per image, but labels is multi-label"):
        vitrail.evaluate(run, tmp_path / "labels.npz", method="knn")
    for settings, message in [
        ({"method": "knn", "split": "train"}, "is fitted to the train split"),
        ({"method": "knn", "draws": 3}, "'draws' applies to --method fewshot"),
        ({"seed": 3}, "'seed' applies to --method linear or fewshot, but the method is head"),
        ({"method": "svm"}, "'method' must be one of head, knn"),
    ]:
        with pytest.raises(UserError, match=message):
            vitrail.evaluate(run, **settings)
