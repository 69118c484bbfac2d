"""The caller's own data, model, augmentation, objective, optimiser, schedule and end of a run."""

from __future__ import annotations

import gc
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from sklearn.datasets import load_digits

import vitrail
from vitrail.config import TrainConfig, load_yaml
from vitrail.data import open_data
from vitrail.errors import UserError
from vitrail.runs.run import Run
from vitrail.tasks.objective import Objective
from vitrail.train.checkpoint import checkpoint_path

pytestmark = pytest.mark.usefixtures("plain_runs")

X, Y = load_digits(return_X_y=True)
X, Y = (X[:300].reshape(-1, 8, 8) * 15).astype(np.uint8), Y[:300]


@pytest.fixture(scope="module")
def how(tmp_path_factory, small):
    """Settings of quick runs in a folder of their own."""
    return small | {"out": tmp_path_factory.mktemp("runs"), "seed": 3}


@pytest.fixture(scope="module")
def given(how):
    """A run on arrays."""
    return vitrail.train((X, Y), name="given", **how)


def weights(run):
    return (run / "model.safetensors").read_bytes()


# Data


def test_a_run_on_arrays_is_a_run_on_their_file(given, how, tmp_path):
    np.savez(tmp_path / "arrays.npz", images=X, labels=Y)
    named = vitrail.train(tmp_path / "arrays.npz", name="named", **how)
    assert weights(named) == weights(given)
    assert named.scores == given.scores
    assert vitrail.evaluate(given).top1 == vitrail.evaluate(named).top1


def test_config_yaml_says_that_data_came_from_python(given):
    text = (given / "config.yaml").read_text()
    first = f"# Given as Python objects: data. To resume: vitrail.train(data, resume='{given}')"
    assert text.splitlines()[0] == first
    assert yaml.safe_load(text)["data"] == "python:arrays"
    assert load_yaml(TrainConfig, given / "config.yaml").python == ("data",)


def test_it_is_resumed_with_its_data(how, given, tmp_path):
    copy = shutil.copytree(given, tmp_path / "copy")
    checkpoint_path(copy).unlink()
    with pytest.raises(UserError, match=r"not stored: data\. Give them again: vitrail\.train\(data, resume='.*copy'\)"):
        vitrail.train(resume=copy)
    again = vitrail.train((torch.from_numpy(X[:, None]), Y.tolist()), resume=copy)
    assert weights(again) == weights(given)
    other = Y.copy()
    other[0] += 1
    with pytest.raises(UserError, match="The data has changed since the run began"):
        vitrail.train((X, other), resume=copy)
    with pytest.raises(UserError, match="was started without data from Python"):
        vitrail.train((X, Y), resume=vitrail.train("digits", name="digits", **how))


def test_what_needs_its_data_finds_it_in_this_process_only(given, tmp_path):
    page = vitrail.report(given).read_text()
    assert "python:arrays" in page
    assert vitrail.evaluate(given.path).images == 149
    moved = shutil.copytree(given, tmp_path / "moved")
    with pytest.raises(UserError, match=r"was given as a Python object, which is not stored\. Give it again"):
        vitrail.evaluate(moved)
    assert vitrail.evaluate(moved, (X, Y)).images == len(X)
    assert "was given as a Python object" in vitrail.report(moved).read_text()


def test_data_is_forgotten_with_the_last_run(how):
    run = vitrail.train((X, Y), name="short", **how)
    path = run.path
    assert Run(path).data().name == "arrays"
    del run
    gc.collect()
    with pytest.raises(UserError, match="which is not stored"):
        Run(path).data()


def test_cross_validation_of_objects(how):
    run = vitrail.train((X, Y), name="folds", folds=2, **how | {"val_fraction": 0.2})
    assert set(run.scores) >= {"top1", "loss"}
    assert [len(fold.data().splits["val"]) for fold in run.folds] == [150, 150]
    assert run.report().exists()


def test_pretraining_on_images_alone(tmp_path, tiny):
    run = vitrail.pretrain(X, val=X[:20], method="mae", out=tmp_path, **tiny)
    assert run.config.python == ("data", "val")
    assert not run.card.task.labelled


# Augmentation, objective, optimiser, schedule


def test_own_functions_do_what_the_own_ones_of_vitrail_do(how):
    plain = how | {"opt": "sgd", "sched": "linear", "warmup_epochs": 0.0, "epochs": 2, "hflip": 0.0, "shift": 0}
    plain |= {"randaug": 0, "reprob": 0.0, "mixup": 0.0, "cutmix": 0.0, "crop_scale": 1.0, "smoothing": 0.0}
    theirs = vitrail.train((X, Y), name="theirs", **plain)
    ours = vitrail.train(
        (X, Y),
        name="ours",
        augment=lambda images: images,
        objective=F.cross_entropy,
        optimizer=lambda groups: torch.optim.SGD(groups, momentum=0.9),
        schedule=lambda done: 1 - done,
        **plain,
    )
    for name, value in vitrail.load(theirs).state_dict().items():
        torch.testing.assert_close(vitrail.load(ours).state_dict()[name], value, rtol=1e-4, atol=1e-5)
    said = (ours / "train.log").read_text()
    assert "your optimizer" in said
    assert "by your schedule" in said
    with pytest.raises(UserError, match="not stored: augment, data, objective, optimizer, schedule"):
        vitrail.train(resume=ours)


def test_own_augmentation_replaces_the_recipes(how):
    seen = []

    def augment(images):
        seen.append((images.shape[1:], float(images.min()), float(images.max())))
        return images + 0.1 * torch.randn_like(images)

    run = vitrail.train((X, Y), name="augmented", augment=augment, hflip=0.5, **how)
    assert {shape for shape, _, _ in seen} == {(1, 8, 8)}
    assert min(low for _, low, _ in seen) >= 0
    assert 0.8 < max(high for _, _, high in seen) <= 1
    asked = run.config.augment
    assert (asked.hflip, asked.shift, asked.randaug, asked.mixup, asked.cutmix) == (0.5, 0, 0, 0.0, 0.0)
    assert weights(vitrail.train((X, Y), name="same", augment=augment, hflip=0.5, **how)) == weights(run)


def test_an_own_objective_may_be_a_class(how):
    class Margin(Objective):
        def compare(self, outputs, targets):
            return F.multi_margin_loss(outputs, targets.argmax(dim=1))

    run = vitrail.train((X, Y), name="margin", objective=Margin, **how)
    assert 0 < run.history[0]["train_loss"] < 1.2


def test_an_own_loss_of_values_gets_standardised_ones(how):
    seen = []

    def loss(outputs, targets):
        seen.append(targets)
        return F.smooth_l1_loss(outputs, targets)

    vitrail.train((X, Y * 100.0), name="values", objective=loss, **how)
    assert torch.cat(seen).abs().max() < 3


def test_on_epoch_sees_the_scores_and_stops_the_run(how):
    seen = []

    def on_epoch(progress):
        seen.append(progress.rows[-1]["val_top1"])
        return np.equal(len(seen), 2)

    run = vitrail.train((X, Y), name="stopped", on_epoch=on_epoch, **how | {"epochs": 5})
    assert [row["val_top1"] for row in run.history] == pytest.approx(seen)
    assert len(seen) == 2
    assert run.scores["epoch"] <= 2
    vitrail.train((X, Y), resume=run)
    assert len(run.history) == 5  # it goes on where it was stopped


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"augment": lambda images: images[:, :, 1:]},
            r"must return images of shape \(64, 1, 8, 8\), but it returned a te",
        ),
        ({"optimizer": lambda _: None}, "must return a torch.optim.Optimizer, but it returned NoneType"),
        ({"objective": "ce"}, "'objective' must be a function, but it is str"),
        ({"on_epoch": 3}, "'on_epoch' must be a function, but it is int"),
        ({"model": torch.nn.Flatten}, "'model' must be a name or a module, but it is a class"),
        ({"objective": torch.nn.CrossEntropyLoss}, r"a subclass of Objective: write CrossEntropyLoss\("),
        (
            {"objective": lambda outputs, _: outputs.mean(dim=1)},
            r"must return one number, as a tensor with a gradient, but it returned a tensor of shape \(64,\)",
        ),
        ({"objective": lambda outputs, _: outputs.mean().item()}, "but it returned float"),
        ({"objective": lambda outputs, _: outputs.mean().detach()}, r"of shape \(\) without a gradient"),
        ({"schedule": lambda _: None}, r"must return a number from 0 up, but schedule\(0\) returned None"),
        ({"schedule": lambda done: done - 1}, r"but schedule\(0\) returned -1\.0"),
    ],
    ids=["augment", "optimizer", "text", "on_epoch", "model", "class", "rows", "float", "detached", "None", "negative"],
)
def test_wrong_functions_are_refused(own, message, how, tmp_path):
    with pytest.raises(UserError, match=message):
        vitrail.train((X, Y), **how | {"out": tmp_path}, **own)


def test_a_changed_validation_split_is_noticed_too(how, tmp_path):
    run = vitrail.train((X[:200], Y[:200]), val=(X[200:], Y[200:]), name="val", **how)
    assert run.config.python == ("data", "val")
    assert len(run.data().splits["val"]) == 100
    same = open_data((X[:200], Y[:200]), val=(X[200:], Y[200:]))
    assert run.data().fingerprint() == same.fingerprint()
    with pytest.raises(UserError, match="The data has changed"):
        vitrail.train((X[:200], Y[:200]), val=(X[210:], Y[210:]), resume=shutil.copytree(run, tmp_path / "copy"))
