"""`vitrail pretrain`: runs of every method, resume, probes, and what takes such a run."""

from __future__ import annotations

import numpy as np
import pytest
from peers import identical
from PIL import Image
from safetensors.torch import load_file
from stopping import copied

import vitrail
from vitrail.data import open_data
from vitrail.errors import UserError
from vitrail.runs.run import Run
from vitrail.tasks import METHODS
from vitrail.train.resolve import resolve

pytestmark = pytest.mark.usefixtures("plain_runs")

QUICK = {
    "model": "vit_w64d2h2m128p2",
    "img_size": 8,
    "stem": "patch",
    "opt": "adamw",
    "epochs": 2,
    "batch_size": 64,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Some of the digits, with labels."""
    file = tmp_path_factory.mktemp("data") / "some.npz"
    train, val = (open_data("digits").splits[name] for name in ("train", "val"))
    arrays = {"x_train": train.pixels[:640], "y_train": train.targets[:640]}
    np.savez(file, **arrays, x_val=val.pixels[:200], y_val=val.targets[:200])
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits):
    """A run of every method on digits, without their labels, and beside it what a kill after its first epoch leaves."""
    out, found = tmp_path_factory.mktemp("runs"), {}
    for method in METHODS:
        with copied(out / method, out / f"{method}-killed", "last/state.pt"):
            found[method] = vitrail.pretrain(digits, method=method, out=out, name=method, probe=digits, **QUICK)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_a_headless_model(runs, method):
    run = Run(runs[method])
    assert run.card.task.name == method
    assert run.card.classes == ()
    assert run.finished
    model = vitrail.load(run.path)
    assert model.config.classes == 0
    rows = run.history
    assert len(rows) == 2
    assert {"train_loss", "val_loss", "val_rank", "val_spread", "val_knn"} <= rows[0].keys()
    assert rows[-1]["val_knn"] > 0.3  # chance is 0.1
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] or method in ("dino", "lejepa")
    assert run.reconstruction_file.exists() == (method not in ("dino", "lejepa"))
    assert run.attention_file.exists() == (method in ("dino", "lejepa"))
    assert run.decoder_file.exists()


@pytest.mark.parametrize("method", ["mae", "dino", "lejepa"])  # a decoder; a teacher and its centre; BatchNorm
def test_killed_runs_resume_to_the_bit(method, runs):
    """A run killed after its first epoch ends with the weights of an undisturbed one."""
    killed = runs[method].path.with_name(f"{method}-killed")
    assert len(Run(killed).history) == 1
    vitrail.pretrain(resume=killed)
    for name in ("model.safetensors", "decoder.safetensors"):
        assert identical(load_file(runs[method] / name), load_file(killed / name))
    timed = {"seconds", "wait"}
    rows = [[{k: row[k] for k in row.keys() - timed} for row in Run(run).history] for run in (runs[method], killed)]
    assert rows[0] == rows[1]


def test_a_run_is_fine_tuned_probed_embedded_and_explained(runs, digits, tmp_path):
    run = runs["mae"]
    tuned = vitrail.train(digits, weights=run, epochs=1, workers=1, out=tmp_path, name="tuned", device="cpu")
    log = (tuned / "train.log").read_text()
    assert "new head for 10 classes" in log
    assert vitrail.evaluate(run, digits, method="knn").top1 > 0.3
    assert vitrail.evaluate(run, digits, method="linear").top1 > 0.3
    picture = tmp_path / "one.png"
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(picture)
    (embedding,) = vitrail.embed(run, [picture])
    assert embedding.features.shape == (vitrail.load(run).config.features,)
    assert vitrail.explain(run, [picture], out=tmp_path / "figures").files


def test_the_fine_tuned_model_starts_from_the_pretrained_encoder(runs, digits, tmp_path):
    tuned = vitrail.train(
        digits, weights=runs["simmim"], epochs=0.05, lr=1e-9, workers=1, out=tmp_path, name="tuned", device="cpu"
    )
    before, after = vitrail.load(runs["simmim"]).state_dict(), vitrail.load(tuned).state_dict()
    assert max((before[name] - after[name]).abs().max().item() for name in before) < 1e-5


def test_predictions_need_a_head(runs, digits, tmp_path):
    picture = tmp_path / "one.png"
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(picture)
    with pytest.raises(UserError, match=r"no classification head|has no head"):
        list(vitrail.predict(runs["mae"], [picture]))
    with pytest.raises(UserError, match=r"no classification head|has no head"):
        vitrail.evaluate(runs["mae"], digits)


def test_any_tree_of_images_is_enough(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a.png", "deep/b.png", "deep/er/c.png", *(f"more/{i}.png" for i in range(30))):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(tmp_path / "photos" / name)
    run = vitrail.pretrain(tmp_path / "photos", epochs=1, workers=1, out=tmp_path, device="cpu")
    assert Run(run).has_model


def test_labels_are_not_looked_at(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (80, 8, 8), np.uint8)
    for name, labels in (("one", np.arange(80) % 2), ("other", rng.integers(0, 9, 80))):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "data.npz", x=x, y=labels)
    first, second = (
        vitrail.pretrain(tmp_path / name / "data.npz", out=tmp_path, name=f"run-{name}", **(QUICK | {"epochs": 1}))
        for name in ("one", "other")
    )
    assert identical(load_file(first / "model.safetensors"), load_file(second / "model.safetensors"))


def test_options_of_labels_and_of_other_methods_are_refused(tmp_path):
    how = {"out": tmp_path, "device": "cpu"}
    with pytest.raises(UserError, match="'smoothing' is an option of `vitrail train`, not of `vitrail pretrain`"):
        vitrail.pretrain("digits", smoothing=0.1, **how)
    with pytest.raises(UserError, match="'mask_ratio' is an option of `vitrail pretrain`, not of `vitrail train`"):
        vitrail.train("digits", mask_ratio=0.5, **how)
    with pytest.raises(UserError, match="The method dino has no option 'mask_ratio'"):
        vitrail.pretrain("digits", method="dino", mask_ratio=0.5, **how)
    with pytest.raises(UserError, match="The recipe 'small' is not for the method mae"):
        vitrail.pretrain("digits", method="mae", recipe="small", **how)
    with pytest.raises(UserError, match="Use `vitrail pretrain`"):
        vitrail.train("digits", recipe="mae", **how)
    with pytest.raises(UserError, match="only a ViT allows, not a Swin"):
        vitrail.pretrain("digits", method="mae", model="swin_nano", img_size=32, **how)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("dino", {"teacher_temp": 0.0}, "'teacher_temp' must be above 0, but it is 0"),
        ("dino", {"teacher_momentum": 1.5}, "'teacher_momentum' must be at least 0 and below 1"),
        ("dino", {"prototypes": 1}, "'prototypes' must be from 2 to"),
        ("dino", {"local_crops": -1}, "'local_crops' must be from 0 to"),
        ("dino", {"global_crops": 0}, "'global_crops' must be from 1 to"),
        ("dino", {"img_size": 64}, "The images of digits are 8x8, smaller than crops of"),
        ("lejepa", {"projection": 0}, "'projection' must be from 1 to"),
        ("lejepa", {"head_width": 2**17 + 1}, "'head_width' must be from 1 to 131,072, but it is 131073"),
        ("lejepa", {"head_width": 2**17, "projection": 2**17}, "The model with its projector has"),
        ("lejepa", {"sigreg": 0.0}, "'sigreg' must be above 0 and below 1"),
    ],
)
def test_values_that_cannot_work_are_refused_before_the_run_exists(method, given, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vitrail.pretrain("digits", method=method, out=tmp_path, device="cpu", **given)
    assert not any(tmp_path.iterdir())


def test_a_size_in_the_settings_of_a_run_has_the_same_limit(tmp_path):
    asked = {"out": str(tmp_path), "name": "run", "device": "cpu"}
    run = Run.create(resolve("digits", open_data("digits", task="mae"), asked))
    text = run.config_file.read_text()
    run.config_file.write_text(text.replace("decoder_depth: 2", "decoder_depth: 100000000"))
    with pytest.raises(UserError, match="'decoder_depth' must be from 1 to 1,000, but it is 100000000"):
        vitrail.pretrain(resume=run)


def test_a_probe_needs_labels(tmp_path):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"^--probe .*: .* holds images but no class folders"):
        vitrail.pretrain("digits", probe=tmp_path, out=tmp_path / "runs", device="cpu")
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_method_is_named(tmp_path):
    with pytest.raises(UserError, match=r"'method' must be one of masked, mae, .* 'simmin'. Did you mean 'simmim'"):
        vitrail.pretrain("digits", method="simmin", out=tmp_path)


def test_a_collapsed_teacher_is_named_though_the_validation_images_are_few(tmp_path, caplog):
    np.savez(tmp_path / "few.npz", images=np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8))
    vitrail.pretrain(tmp_path / "few.npz", method="dino", teacher_temp=0.01, out=tmp_path, **QUICK | {"batch_size": 8})
    assert "need 10 validation images or more to show" in caplog.text
    assert caplog.text.count("The teacher has collapsed to few prototypes") == 1
    assert "effective rank 1 " not in caplog.text


def test_runs_resume_with_their_own_verb(runs):
    with pytest.raises(UserError, match="was started by `vitrail pretrain`"):
        vitrail.train(resume=runs["mae"])
