"""The values of published recipes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import data_of, model_file

import vitrail
from vitrail.config import TrainConfig, flat, load_yaml
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.errors import UserError
from vitrail.models import build, canonical
from vitrail.runs.run import Run
from vitrail.tasks import Multiclass, task_type
from vitrail.train.recipes import RECIPES, method_of
from vitrail.train.resolve import resolve
from vitrail.weights import Card, save

pytestmark = pytest.mark.usefixtures("plain_runs")

SUPERVISED = [name for name, recipe in RECIPES.items() if not recipe.methods]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Names of runs depend on the folders that there are."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def weights(tmp_path):
    return model_file(tmp_path)


def imagenet(images=1_281_167):
    return data_of((375, 500), images)


def published(recipe, images=1_281_167, **asked):
    """The settings for photographs, as many as in ImageNet, by their flat names; the batch is that of a step."""
    settings = flat(resolve("made-up", imagenet(images), {"recipe": recipe, **asked}))
    return settings | {"batch": settings["batch_size"]}


def warmup_steps(settings, images=1_281_167):
    return settings["warmup_epochs"] * (images // settings["batch"])


ADAM = {"opt": "adamw", "loss": "ce", "layer_decay": 1.0, "model_ema": 0.0, "clip_grad": 1.0, "min_lr": 0.0}
CROP = {"crop_scale": 0.05, "hflip": 0.5, "shift": 0, "reprob": 0.0, "cutmix": 0.0, "smoothing": 0.0}
PUBLISHED = {
    "paper-pretrain": {
        **ADAM,
        **CROP,
        **{"model": "vit_b16", "img_size": (224, 224), "head": "tanh", "pool": "cls", "drop": 0.1, "drop_path": 0.0},
        **{
            "epochs": 300,
            "batch": 4096,
            "lr": 3e-3,
            "weight_decay": 0.3,
            "sched": "cosine",
            "randaug": 0,
            "mixup": 0.0,
        },
    },
    "paper-finetune": {
        **CROP,
        **{"opt": "sgd", "img_size": (384, 384), "head": "linear", "drop": 0.0, "crop": 1.0, "body_lr": 1.0},
        "model_ema": 0.9999,
        **{"epochs": 8, "batch": 512, "lr": 0.03, "weight_decay": 0.0, "sched": "cosine", "clip_grad": 1.0},
    },
    "augreg": {
        **ADAM,
        **CROP,
        **{"loss": "bce", "model": "vit_b16", "img_size": (224, 224), "head": "tanh", "drop": 0.0, "drop_path": 0.0},
        **{"epochs": 300, "batch": 4096, "lr": 1e-3, "weight_decay": 0.1, "sched": "cosine"},
        **{"randaug": 2, "magnitude": 10.0, "mixup": 0.5},
    },
    "beyer": {
        **ADAM,
        **CROP,
        **{"model": "vit_s16", "img_size": (224, 224), "pool": "gap", "pos": "sincos2d", "head": "tanh", "drop": 0.0},
        **{"epochs": 90, "batch": 1024, "lr": 1e-3, "weight_decay": 0.1, "sched": "cosine"},
        **{"randaug": 2, "magnitude": 10.0, "mixup": 0.2},
    },
    "deit": {
        **ADAM,
        **{"model": "vit_b16", "img_size": (224, 224), "pool": "cls", "head": "linear", "drop_path": 0.1, "drop": 0.0},
        **{"epochs": 300, "batch": 1024, "lr": 1e-3, "min_lr": 0.01, "weight_decay": 0.05, "warmup_epochs": 5.0},
        **{"sched": "cosine", "clip_grad": 0.0, "crop_scale": 0.08, "hflip": 0.5, "randaug": 2, "magnitude": 9.0},
        **{"reprob": 0.25, "mixup": 0.8, "cutmix": 1.0, "mix_prob": 1.0, "smoothing": 0.1, "crop": 0.875},
        **{"normalize": "imagenet", "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "aug_repeats": 3},
    },
    "deit3": {
        **{
            "opt": "lamb",
            "loss": "bce",
            "model": "vit_b16",
            "img_size": (192, 192),
            "layer_scale": 1e-4,
            "pool": "cls",
        },
        **{"epochs": 800, "batch": 2048, "lr": 3e-3, "weight_decay": 0.05, "warmup_epochs": 5.0, "drop_path": 0.2},
        **{
            "sched": "cosine",
            "crop_scale": 0.08,
            "hflip": 0.5,
            "three_augment": 1.0,
            "color_jitter": 0.3,
            "randaug": 0,
        },
        **{"reprob": 0.0, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.0, "aug_repeats": 3},
        **{"normalize": "imagenet", "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "crop": 1.0},
    },
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_imagenet_gets_the_published_values(recipe):
    settings = published(recipe)
    assert {name: settings[name] for name in PUBLISHED[recipe]} == PUBLISHED[recipe]


@pytest.mark.parametrize(
    ("recipe", "steps"), [("paper-pretrain", 10_000), ("augreg", 10_000), ("beyer", 10_000), ("paper-finetune", 500)]
)
def test_the_warm_up_has_the_published_number_of_steps(recipe, steps):
    assert warmup_steps(published(recipe)) == pytest.approx(steps, abs=10)


@pytest.mark.parametrize(
    ("images", "model", "expected"),
    [
        (14_000_000, "vit_b16", {"epochs": 90, "lr": 1e-3, "weight_decay": 0.03, "sched": "linear", "drop": 0.1}),
        (303_000_000, "vit_b32", {"epochs": 7, "lr": 8e-4, "weight_decay": 0.1, "sched": "linear", "drop": 0.0}),
        (303_000_000, "vit_l32", {"epochs": 7, "lr": 6e-4}),
        (303_000_000, "vit_l16", {"epochs": 14, "lr": 4e-4}),
        (303_000_000, "vit_h14", {"epochs": 14, "lr": 3e-4, "clip_grad": 0.0}),
    ],
)
def test_the_paper_pretrains_on_more_data_with_other_values(images, model, expected):
    settings = published("paper-pretrain", images, model=model)
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("images", "model", "randaug", "magnitude", "mixup"),
    [
        (1_281_167, "vit_ti16", 2, 0.0, 0.0),
        (1_281_167, "vit_s32", 2, 10.0, 0.2),
        (1_281_167, "vit_s16", 2, 10.0, 0.5),
        (14_000_000, "vit_ti16", 0, 9.0, 0.0),
        (14_000_000, "vit_s32", 0, 9.0, 0.0),
        (14_000_000, "vit_s16", 2, 0.0, 0.0),
        (14_000_000, "vit_b16", 2, 10.0, 0.2),
        (14_000_000, "vit_l16", 2, 10.0, 0.5),
    ],
)
def test_augreg_augments_by_the_size_of_model_and_data(images, model, randaug, magnitude, mixup):
    settings = published("augreg", images, model=model)
    assert (settings["randaug"], settings["magnitude"], settings["mixup"]) == (randaug, magnitude, mixup)


@pytest.mark.parametrize(
    ("model", "lr", "drop_path"), [("vit_s16", 4e-3, 0.05), ("vit_l16", 3e-3, 0.45), ("vit_h14", 3e-3, 0.6)]
)
def test_deit3_goes_by_the_size_of_the_model(model, lr, drop_path):
    settings = published("deit3", model=model)
    assert (settings["lr"], settings["drop_path"]) == (lr, drop_path)
    assert settings["min_lr"] * settings["lr"] == pytest.approx(1e-5)


def test_augreg_pools_by_average_without_a_hidden_layer_on_imagenet_21k():
    settings = published("augreg", 14_000_000)
    assert (settings["pool"], settings["head"]) == ("gap", "linear")
    assert published("augreg")["pool"] == "cls"


def test_deit3_clips_the_mean_over_the_classes_at_one():
    """The loss is the sum over the classes, so its gradient is that many times as large."""
    settings = published("deit3")
    assert settings["clip_grad"] == imagenet().task.outputs


def test_imagenets_mean_is_for_three_channels():
    grey = flat(resolve("made-up", data_of(8, 1500, channels=1), {"recipe": "deit"}))
    assert (grey["normalize"], grey["mean"]) == ("half", (0.5,))
    assert published("deit", normalize="half")["mean"] == (0.5,)


@pytest.mark.parametrize("other", [{"balanced_sampling": True}, {"streaming": True}])
def test_images_are_repeated_for_one_reason(other):
    with pytest.raises(UserError, match="--aug-repeats 1"):
        published("deit", **other)
    assert published("deit", aug_repeats=1, **other)["aug_repeats"] == 1


@pytest.mark.parametrize(("images", "epochs"), [(1_020, 251), (3_680, 70), (50_000, 103), (1_281_167, 8)])
def test_the_paper_finetunes_for_its_number_of_steps(images, epochs):
    assert published("paper-finetune", images)["epochs"] == epochs


def test_trained_weights_become_larger_for_the_papers_finetuning_and_keep_their_architecture(weights, tmp_path):
    assert resolve("made-up", data_of(), {"weights": weights, "recipe": "paper-finetune"}).input.img_size == (12, 12)
    config = replace(canonical("vit_nano16")[1], img_size=(112, 112), classes=2)
    card = Card(model="vit_nano16", config=config, task=Multiclass(("x", "y")), preprocess=Preprocess((112, 112), 3))
    save(tmp_path / "photos.safetensors", build(config), card)
    asked = {"weights": str(tmp_path / "photos.safetensors")}
    assert resolve("made-up", data_of(), {**asked, "recipe": "paper-finetune"}).input.img_size == (384, 384)
    assert resolve("made-up", data_of(), {**asked, "recipe": "deit3"}).input.img_size == (112, 112)
    for recipe in SUPERVISED:
        arch = resolve("made-up", data_of(), {**asked, "recipe": recipe}).arch
        assert replace(arch, drop=0.0, drop_path=0.0) == resolve("made-up", data_of(), asked).arch


def test_a_batch_is_made_of_passes_and_the_rate_fits_it():
    assert (published("deit")["batch_size"], published("deit")["grad_accum"]) == (1024, 8)
    assert published("deit", batch_size=512)["grad_accum"] == 1
    one = published("deit", batch_size=256, grad_accum=2)
    assert (one["batch"], one["lr"]) == (256, 2.5e-4)
    assert published("beyer", batch_size=256)["lr"] == 5e-4
    assert published("beyer", batch_size=256, lr=0.1)["lr"] == 0.1


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_little_data_gets_small_batches_and_a_short_warm_up(recipe):
    settings = flat(resolve("made-up", data_of(8, 1500, channels=1), {"recipe": recipe}))
    assert settings["batch_size"] == 64
    assert settings["lr"] < published(recipe)["lr"]
    assert settings["warmup_epochs"] <= settings["epochs"] / 8
    assert (settings["model"], settings["img_size"]) == ("vit_nano2", (8, 8))
    assert (settings["hflip"], settings["crop"]) == (0.0, 1.0)


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - SUPERVISED))
def test_every_recipe_of_pretraining_trains(recipe, tiny, tmp_path):
    """Some steps on digits, with small heads and decoders."""
    (method, *_) = RECIPES[recipe].methods
    settings = {name: value for name, value in tiny.items() if name in ("model", "img_size", "epochs", "device")}
    less = {"mae": {"decoder_width": 64, "decoder_depth": 1}, "dino": {"prototypes": 64, "head_width": 64}}
    run = vitrail.pretrain(
        "digits", method=method, recipe=recipe, out=tmp_path, val_fraction=0.8, **settings, **less.get(method, {})
    )
    assert Run(run).config.recipe == recipe
    assert Run(run).has_model


@pytest.mark.parametrize("recipe", SUPERVISED)
def test_every_recipe_trains(recipe, tiny, tmp_path):
    """Some steps on digits, with all that the recipe brings but its number of epochs."""
    settings = {name: value for name, value in tiny.items() if name not in ("opt", "batch_size")}
    run = vitrail.train("digits", recipe=recipe, out=tmp_path, **settings, val_fraction=0.8)
    assert load_yaml(TrainConfig, run / "config.yaml").recipe == recipe
    assert 0 < Run(run).card.metrics["loss"] < 3


@pytest.mark.parametrize(("epochs", "expected"), [(3, (0, 4e-3, 0.0)), (10, (1, 4e-3, 0.0)), (20, (2, 2e-3, 0.2))])
def test_small_augments_more_in_longer_runs(epochs, expected):
    settings = flat(resolve("made-up", data_of((28, 28), 60_000, channels=1), {"epochs": epochs}))
    assert (settings["shift"], settings["lr"], settings["mixup"]) == expected


@pytest.mark.parametrize(
    ("size", "images", "expected"),
    [(28, 255, 16), (28, 256, 32), (28, 600, 64), (28, 2559, 64), (28, 2560, 128), (128, 600, 16), (128, 1280, 64)],
)
def test_small_trains_few_small_images_in_larger_batches(size, images, expected):
    data = data_of((size, size), images, channels=1)
    assert resolve("made-up", data, {}).optim.batch_size == expected


@pytest.mark.parametrize(
    ("model", "epochs", "expected"),
    [
        ("vit_nano8", 30, ("muon", 2e-3, 1.0, 2)),
        ("vit_nano8", 10, ("muon", 4e-3, 1.0, 1)),
        ("vit_ti16", 30, ("adamw", 1e-3, 0.75, 2)),
    ],
)
def test_small_models_pretrained_without_labels_are_finetuned_with_muon(tmp_path, model, epochs, expected):
    config = replace(canonical(model)[1], img_size=(32, 32), classes=0)
    card = Card(model=model, config=config, task=task_type("mae")(), preprocess=Preprocess((32, 32), 3))
    save(tmp_path / "model.safetensors", build(config), card)
    found = resolve("made-up", data_of(), {"weights": str(tmp_path / "model.safetensors"), "epochs": epochs})
    optim = found.optim
    assert (optim.opt, optim.lr, optim.layer_decay, found.augment.shift) == expected
    assert optim.body_lr == 1.0


@pytest.mark.parametrize(("model", "expected"), [("vit_nano8", (1.0, 1.0)), ("vit_ti16", (0.1, 0.85))])
def test_all_layers_of_small_models_are_finetuned_at_the_full_rate(tmp_path, model, expected):
    config = replace(canonical(model)[1], img_size=(32, 32), classes=2)
    card = Card(model=model, config=config, task=Multiclass(("a", "b")), preprocess=Preprocess((32, 32), 3))
    save(tmp_path / "model.safetensors", build(config), card)
    optim = resolve("made-up", data_of(), {"weights": str(tmp_path / "model.safetensors")}).optim
    assert (optim.body_lr, optim.layer_decay) == expected


@pytest.mark.parametrize(("epochs", "expected"), [(5, (0, 4e-3)), (10, (1, 4e-3)), (20, (2, 2e-3))])
def test_masked_pretraining_learns_faster_and_shifts_less_in_short_runs(epochs, expected):
    data = replace(data_of((28, 28), 60_000, channels=1), task=task_type("mae")())
    settings = flat(resolve("made-up", data, {"epochs": epochs}))
    assert (settings["shift"], settings["lr"]) == expected


def test_a_recipe_for_one_method_implies_it():
    assert [method_of(name) for name in ("dino", "mae", "pretrain-small", None)] == ["dino", "mae", "mae", "mae"]
    assert vitrail.recipes("dino").pretraining.prototypes == 65_536
