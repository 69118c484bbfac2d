"""Learning from a teacher: what is learnt, and that the teacher stays what it is."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peers import randomise
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax, softmax
from torch._dynamo.utils import counters

import vitrail
from vitrail.config import DistillConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass, Multilabel, Regression
from vitrail.tasks.objective import Batch, BinaryCrossEntropy, CrossEntropy, SquaredError
from vitrail.train import loop
from vitrail.train.checkpoint import load_checkpoint
from vitrail.train.distill import Distilled
from vitrail.train.progress import Progress
from vitrail.weights import Card, save

pytestmark = pytest.mark.usefixtures("plain_runs")

DIGITS = tuple("0123456789")
NARROW = ViTConfig(width=32, depth=1, heads=2, mlp=64, patch=4, img_size=(8, 8), channels=1, classes=10, pool="gap")


def write(path, config=NARROW, classes=DIGITS, seed=0, name="vit_nano4", task=None, **card):
    """A model of random weights as a file, whose answers differ from image to image and from class to class."""
    config = replace(config, classes=len(classes))
    preprocess = card.pop("preprocess", Preprocess(config.img_size, config.channels))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = randomise(build(config), seed)
    task = task or Multiclass(classes)
    save(path, whole, Card(model=name, config=config, task=task, preprocess=preprocess, **card))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A teacher, and students with and without a distillation token, all of one narrow block. For reading only."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "teacher": write(folder / "teacher.safetensors", seed=1),
        "plain": write(folder / "plain.safetensors", seed=2),
        "deit": write(folder / "deit.safetensors", replace(NARROW, pool="cls_dist"), seed=3),
    }


@pytest.fixture
def settings(files, tmp_path):
    """Settings with which a student of one block learns from half of the digits, in seven steps an epoch."""
    how = {"recipe": "small", "body_lr": 1.0, "val_fraction": 0.5, "batch_size": 128, "smoothing": 0.0}
    return how | {"weights": files["deit"], "teacher": files["teacher"], "epochs": 2, "out": tmp_path, "name": "run"}


def rows(run):
    with (Path(run) / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


# What is learnt -------------------------------------------------------------------------------------------


def batch(outputs=10):
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(6, 1, 8, 8, generator=generator)
    return images, *(2 * torch.randn(6, outputs, generator=generator) for _ in range(2))


def learn(objective, images, targets, taught, **how):
    """What the objective gives for a batch, with a teacher that says `taught`."""
    progress = Progress()
    distilled = Distilled(objective, lambda *_: taught, DistillConfig(**how), progress)
    result = distilled(Batch(images, targets, torch.arange(len(images))))
    assert progress.taught is not None
    return result


@pytest.mark.parametrize("pool", ["cls_dist", "gap"])
@pytest.mark.parametrize("distill", ["hard", "soft"])
def test_the_loss_is_that_of_the_paper(pool, distill):
    model = randomise(build(replace(NARROW, pool=pool)))
    images, taught, targets = batch()
    targets = targets.softmax(1)
    result = learn(CrossEntropy(model), images, targets, taught, distill=distill, distill_alpha=0.3, distill_tau=2.0)

    with torch.no_grad():
        heads = model.heads(images) if pool == "cls_dist" else [model(images)] * 2
    labelled, distilled = (logits.double().numpy() for logits in heads)
    teacher, labels = taught.double().numpy(), targets.double().numpy()
    truth = -(labels * log_softmax(labelled, 1)).sum(1).mean()
    if distill == "hard":
        lesson = -log_softmax(distilled, 1)[np.arange(6), teacher.argmax(1)].mean()
    else:
        p, q = softmax(teacher / 2, 1), softmax(distilled / 2, 1)
        lesson = 4 * (p * np.log(p / q)).sum(1).mean()
    assert result["loss"].item() == pytest.approx(0.7 * truth + 0.3 * lesson, rel=1e-5)
    assert result["agree"].item() == pytest.approx((distilled.argmax(1) == teacher.argmax(1)).mean())
    both = (labelled + distilled).argmax(1)
    assert result["top1"].item() == pytest.approx((both == labels.argmax(1)).mean())


@pytest.mark.parametrize(("alpha", "idle", "busy"), [(0.0, "head_dist", "head"), (1.0, "head", "head_dist")])
def test_each_token_learns_from_its_own(alpha, idle, busy):
    model = randomise(build(replace(NARROW, pool="cls_dist")))
    images, taught, targets = batch()
    learn(CrossEntropy(model), images, targets.softmax(1), taught, distill_alpha=alpha)["loss"].backward()
    assert not getattr(model, idle).weight.grad.any()
    assert getattr(model, busy).weight.grad.abs().max() > 1e-3


def test_labels_are_taught_by_their_probabilities_and_numbers_by_their_distance():
    model = randomise(build(replace(NARROW, classes=3)))
    images, taught, targets = batch(3)
    with torch.no_grad():
        outputs = model(images).double().numpy()
    teacher = taught.double().numpy()

    soft = {"distill": "soft", "distill_alpha": 1.0}
    result = learn(BinaryCrossEntropy(model), images, (targets > 0).float(), taught, distill_tau=2.0, **soft)
    p, q = 1 / (1 + np.exp(-teacher / 2)), 1 / (1 + np.exp(-outputs / 2))
    loss = -4 * (p * np.log(q) + (1 - p) * np.log(1 - q)).mean()
    assert result["loss"].item() == pytest.approx(loss, rel=1e-5)
    assert result["agree"].item() == pytest.approx(((outputs > 0) == (teacher > 0)).mean())

    result = learn(SquaredError(model, (0.0,) * 3, (1.0,) * 3), images, targets, taught, **soft)
    assert result["loss"].item() == pytest.approx(((outputs - teacher) ** 2).mean(), rel=1e-5)
    assert set(result) == {"loss"}


# Runs -----------------------------------------------------------------------------------------------------


def test_a_student_comes_to_agree_with_its_teacher(settings, trained):
    before = load_file(trained / "model.safetensors")
    asked = settings | {"teacher": trained, "epochs": 3, "batch_size": 64, "lr": 4e-3, "distill": "soft", "shift": 1}
    run = vitrail.train("digits", **asked)
    agree = [row["train_agree"] for row in rows(run)]
    assert agree[-1] > agree[0] + 0.05
    after = load_file(trained / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_checkpoint(run, "cpu")["teacher"].keys() == {"fingerprint", "metrics"}

    card = json.loads((run / "model.json").read_text())
    assert (card["teacher"]["model"], card["teacher"]["source"]) == ("vit_nano4", str(trained))
    spoken = (run / "train.log").read_text()
    assert f"top1 {card['teacher']['metrics']['top1']:.2%} on the validation images" in spoken
    assert rows(run)[0]["teach"] > 0
    assert f"teacher {rows(run)[-1]['teach']:.0%}" in spoken
    assert f"agree {agree[-1]:.1%}" in spoken


def test_answers_that_never_change_are_asked_for_once(settings):
    asked = settings | {"epochs": 1}
    once = vitrail.train("digits", **asked)
    assert "the teacher's outputs for all 899 were computed once" in (once / "train.log").read_text()
    # A mirror image in a thousand million is no augmentation, but the program cannot know it.
    always = vitrail.train("digits", **(asked | {"name": "always", "hflip": 1e-9}))
    assert "computed once" not in (always / "train.log").read_text()
    left, right = load_file(once / "model.safetensors"), load_file(always / "model.safetensors")
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("student", ["deit", "plain"])
def test_a_compiled_objective_learns_the_same(settings, files, monkeypatch, student):
    """All of torch.compile but its C++ compiler, which takes long."""
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile(module, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    asked = settings | {"weights": files[student], "epochs": 1, "shift": 1, "opt": "sgd", "lr": 0.05}
    eager, compiled = (vitrail.train("digits", **asked | {"name": str(on), "compile": on}) for on in (False, True))
    assert counters["stats"]["unique_graphs"] > 0
    left, right = load_file(eager / "model.safetensors"), load_file(compiled / "model.safetensors")
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("student", "augmentation"), [("deit", {"shift": 1, "mixup": 0.5}), ("plain", {"balanced_sampling": True})]
)
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(settings, files, monkeypatch, student, augmentation):
    """Where images are augmented, the teacher is asked in every step; else once, and again by the run that goes on."""
    asked = settings | augmentation | {"weights": files[student], "save_minutes": 0.0, "model_ema": 0.9}
    straight = vitrail.train("digits", **asked)
    clip, steps = loop.clip_grad_norm_, []

    def stop(*arguments):
        steps.append(1)
        if len(steps) == 10:  # in the second epoch
            raise KeyboardInterrupt
        return clip(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_grad_norm_", stop)
        with pytest.raises(KeyboardInterrupt):
            vitrail.train("digits", **(asked | {"name": "stopped"}))
    stopped = vitrail.train(resume=asked["out"] / "stopped")
    left, right = load_file(straight / "model.safetensors"), load_file(stopped / "model.safetensors")
    assert all(torch.equal(left[name], right[name]) for name in left)
    timeless = [{k: v for k, v in row.items() if k not in ("seconds", "wait", "teach")} for row in rows(straight)]
    assert timeless == [{k: row[k] for k in timeless[0]} for row in rows(stopped)]


def test_a_run_goes_on_with_its_own_teacher_only(settings, files, tmp_path):
    teacher = Path(write(tmp_path / "teacher" / "model.safetensors", seed=1))
    run = vitrail.train("digits", **(settings | {"teacher": teacher.parent, "epochs": 1}))
    with pytest.raises(UserError, match=r"asks for teacher .*plain\.safetensors instead of .*teacher"):
        vitrail.train(resume=run, teacher=files["plain"])
    write(teacher, seed=9)
    with pytest.raises(UserError, match="has changed since the run began"):
        vitrail.train(resume=run)
    teacher.unlink()
    with pytest.raises(UserError, match=r"The teacher cannot be used\. .* does not exist"):
        vitrail.train(resume=run)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_labels_and_numbers_can_be_taught(settings, tmp_path, task):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    labels = (images[:, :2, 0] > 127).astype(np.float32) if task == "multilabel" else images[:, :2, 0].astype(float)
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    names = ("0", "1")
    taught = {"multilabel": Multilabel(names, (0.5, 0.5)), "regression": Regression(names, (9.0, 9.0), (9.0, 9.0))}
    teacher = write(tmp_path / "teacher.safetensors", NARROW, names, task=taught[task])
    asked = settings | {"batch_size": 10, "epochs": 1, "task": task, "teacher": teacher}
    run = vitrail.train(tmp_path / "data.npz", **asked)
    assert np.isfinite(rows(run)[0]["train_loss"])
    assert ("train_agree" in rows(run)[0]) == (task == "multilabel")
    with pytest.raises(UserError, match="needs one class per image"):
        vitrail.train(tmp_path / "data.npz", **(asked | {"name": "hard", "distill": "hard"}))


# Mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher": None, "distill": "soft"}, "--distill needs a teacher. Add --teacher"),
        ({"teacher": None, "distill_alpha": 0.1}, "--distill-alpha needs a teacher"),
        ({"teacher": None, "teacher_model": "vit_b16"}, "--teacher-model needs a teacher"),
        ({"distill_tau": 2.0}, "has no effect with --distill hard"),
        ({"distill_alpha": 1.5}, "'distill_alpha' must be between 0 and 1"),
        ({"distill": "soft", "distill_tau": 0.0}, "'distill_tau' must be above 0"),
        ({"teacher": "nowhere"}, r"The teacher cannot be used\. .*nowhere does not exist"),
        ({"teacher": "nowhere.onnx"}, r"The teacher cannot be used\. .*nowhere.onnx does not exist"),
        ({"teacher_model": "vit_b16"}, "are a vit_nano4, not a vit_b16"),
        ({"teacher": "a.onnx", "teacher_model": "vit_b16"}, r"a\.onnx is an exported file, so 'model' does not apply"),
    ],
)
def test_settings_that_cannot_be(settings, given, message):
    with pytest.raises(UserError, match=message):
        vitrail.train("digits", **(settings | given))
    assert not (settings["out"] / "run").exists()


def test_a_teacher_must_know_the_classes_of_the_data(settings, tmp_path):
    def refused(message, **teacher):
        file = write(tmp_path / "other.safetensors", **teacher)
        with pytest.raises(UserError, match=message):
            vitrail.train("digits", **(settings | {"teacher": file}))

    refused(r"Only the teacher has: cat; only the data has: 9\.", classes=(*DIGITS[:9], "cat"))
    refused(r"Only the teacher has: ten; only the data has: none\.", classes=(*DIGITS, "ten"))
    refused("has 5 outputs, but the data has 10 classes", classes=DIGITS[:5])
    refused("predicts labels, but the data has classes", task=Multilabel(DIGITS, (0.5,) * 10))
    refused("reads 5 channels, and the student's 1 cannot be converted", config=replace(NARROW, channels=5))
    floats = Preprocess((8, 8), 1, bits=32)
    refused("reads floating-point images, and the student's 8-bit ones cannot be converted", preprocess=floats)


def test_a_teacher_whose_outputs_are_no_numbers_is_refused(settings, tmp_path):
    file = write(tmp_path / "broken.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"head.weight": torch.full_like(tensors["head.weight"], 3e38)}, file)
    with pytest.raises(UserError, match="A teacher's outputs must be finite"):
        vitrail.train("digits", **(settings | {"teacher": file}))


def test_a_run_does_not_replace_its_teacher(settings):
    run = vitrail.train("digits", **(settings | {"epochs": 1}))
    with pytest.raises(UserError, match=r"is in .*, the run to create"):
        vitrail.train("digits", overwrite=True, **(settings | {"teacher": run}))
    assert (run / "model.safetensors").exists()
