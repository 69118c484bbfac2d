"""What is chosen for the user, and what the user's own choices change of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import data_of, model_file

from vitrail.config import DistillConfig, Duration, PretrainConfig, TransferConfig, flat, options
from vitrail.config.settings import CaptionConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build, canonical
from vitrail.tasks import METHODS, Multiclass, Multilabel, task_type
from vitrail.train.prepare import model_config
from vitrail.train.recipes import RECIPES
from vitrail.train.resolve import resolve
from vitrail.weights import Card, save

SIZES = [4, 8, 12, 20, 28, 32, 33, 48, 64, 90, 96, 97, 100, 128, 224, 500, (20, 90), (28, 96), (40, 4000), (31, 17)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Names of runs depend on the folders that there are."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(tmp_path):
    return model_file(tmp_path)


def architecture(config):
    return model_config(config, Multiclass(("a", "b", "c")))


@pytest.mark.parametrize(("size", "images"), [*((size, 1000) for size in SIZES), (32, 1), (32, 60_000)], ids=str)
def test_any_data_gets_a_patch_that_fits_its_images(size, images):
    model = architecture(resolve("made-up", data_of(size, images), {}))
    h, w = model.img_size
    assert h % model.patch == w % model.patch == 0
    assert min(model.grid) >= 4
    assert min(h, w) > 32 or model.patch < 16
    assert model.length <= 1024


@pytest.mark.parametrize("size", [8, 32, 64, 96])
def test_small_images_keep_their_size(size):
    assert resolve("made-up", data_of(size), {}).input.img_size == (size, size)


@pytest.mark.parametrize("asked", [16, 32, 48, 64, 96, 224, "64x96"])
@pytest.mark.parametrize("size", [8, 32, 224])
def test_the_patch_fits_the_size_that_was_asked_for_rather_than_that_of_the_images(size, asked):
    model = architecture(resolve("made-up", data_of(size), {"img_size": asked}))
    assert min(model.grid) >= 4
    assert min(model.img_size) > 32 or model.patch < 16
    assert model.length <= 1024


SUPERVISED = [name for name, recipe in RECIPES.items() if not recipe.methods]


@pytest.mark.parametrize(
    ("method", "images"), [*((method, 1000) for method in METHODS), ("mae", 2), ("mae", 10_000_000)]
)
def test_methods_have_just_their_options(method, images):
    data = replace(data_of(images=images), task=task_type(method)())
    for name in (name for name, recipe in RECIPES.items() if method in recipe.methods):
        config = resolve("made-up", data, {"recipe": name})
        given = {option for option in options(PretrainConfig) if getattr(config.pretraining, option) is not None}
        assert given == task_type(method).small(model_config(config, task_type(method)())).keys()


@pytest.mark.parametrize(
    ("recipe", "images"),
    [*((recipe, 1000) for recipe in SUPERVISED), *(("small", images) for images in (1, 10, 100_000, 10_000_000))],
)
def test_nothing_is_left_unresolved(recipe, images):
    config = resolve("made-up", data_of(images=images), {"recipe": recipe})
    assert {name for name, value in flat(config).items() if value is None} == options(PretrainConfig).keys() | {
        "probe",
        "weights",
        "val",
        "python",
        "best",
        "restarts",
        "log",
        "max_pixels",
        "mask_values",
        "tokenizer",
        "context",
        "data_dir",
        "image_dir",
        "image_column",
        "label_column",
        "time_budget",
        "freeze",
        "teacher",
        "teacher_model",
    }
    assert config.recipe == recipe
    assert config.optim.warmup_epochs < config.optim.epochs
    assert config.optim.batch_size <= max(images, 16)


def test_the_images_decide_the_channels():
    assert resolve("made-up", data_of(channels=1), {}).input.channels == 1
    assert resolve("made-up", data_of(channels=3), {}).input.channels == 3
    assert resolve("made-up", data_of(channels=1), {"channels": 3}).input.channels == 3


ASKED = {
    "shard": "off",
    "aug_repeats": 1,
    "cache_gb": 1.0,
    "streaming": True,
    "time_budget": Duration(600),
    "model": "vit_ti8",
    "img_size": (40, 24),
    "channels": 1,
    "bits": 16,
    "interpolation": "lanczos",
    "fit": "crop",
    "normalize": "imagenet",
    "mean": (0.1,),
    "std": (0.2,),
    "crop": 0.9,
    "val_fraction": 0.3,
    "folds": 4,
    "fold": 2,
    "data_dir": "there",
    "image_dir": "pictures",
    "max_pixels": 10**9,
    "image_column": "photo",
    "label_column": ("kind",),
    "task": "multiclass",
    "mask_values": ("0=ground", "1=leaf"),
    "workers": 3,
    "pool": "map",
    "pos": "relative",
    "head": "tanh",
    "stem": "conv",
    "registers": 2,
    "attention": "global",
    "layer_scale": 0.5,
    "drop": 0.1,
    "drop_path": 0.2,
    "epochs": 7,
    "batch_size": 6,
    "grad_accum": 2,
    "opt": "sgd",
    "loss": "bce",
    "lr": 0.123,
    "weight_decay": 0.4,
    "sched": "constant",
    "warmup_epochs": 0.5,
    "min_lr": 0.1,
    "cooldown": 0.3,
    "clip_grad": 2.0,
    "layer_decay": 0.7,
    "body_lr": 0.6,
    "class_weights": False,  # not with the next
    "balanced_sampling": True,
    "model_ema": 0.5,
    "best": "f1",
    "patience": 3,
    "restarts": (2.0, 4.0),
    "crop_scale": 0.4,
    "shift": 3,
    "hflip": 0.5,
    "randaug": 2,
    "magnitude": 5.0,
    "three_augment": 0.4,
    "color_jitter": 0.2,
    "reprob": 0.3,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_prob": 0.9,
    "smoothing": 0.2,
    "name": "mine",
    "out": "elsewhere",
    "seed": 5,
    "device": "cpu",
    "amp": "bf16",
    "compile": True,
    "grad_checkpointing": True,
    "log": ("csv",),
    "save_minutes": 1.5,
}


@pytest.mark.parametrize("recipe", SUPERVISED)
def test_what_the_user_asks_for_wins(recipe):
    asked = {"recipe": recipe, **ASKED}
    settings = flat(resolve("made-up", data_of(), asked))
    without = {"weights": None, "probe": None, "val": None, "python": None}
    for group in (TransferConfig, DistillConfig, PretrainConfig, CaptionConfig):
        without |= flat(group())
    assert settings == {**asked, "data": "made-up", **without}
    assert {*asked, "data", *without} == set(settings)  # or a setting is missing above


def test_how_weights_are_used_is_asked_for_too(trained):
    asked = {"freeze": 2, "lora_rank": 4, "lora_alpha": 3.0, "pos_resample": "linear", "partial": True}
    asked |= {"head_init": "zero"}
    assert set(asked) == set(flat(TransferConfig()))  # or a setting is missing above
    assert flat(resolve("made-up", data_of(), {"weights": trained, **asked}).transfer) == asked


def test_only_heads_for_one_class_per_image_start_as_a_probe(trained):
    several = replace(data_of(), task=Multilabel(("a", "b")))
    assert resolve("made-up", several, {"weights": trained}).transfer.head_init == "zero"
    assert resolve("made-up", data_of(), {"weights": trained}).transfer.head_init == "probe"
    with pytest.raises(UserError, match="--head-init probe needs one class per image, but made-up is multi-label"):
        resolve("made-up", several, {"weights": trained, "head_init": "probe"})


def test_where_only_what_is_new_learns_it_learns_faster(trained):
    def rate(**asked):
        return resolve("made-up", data_of(), {"weights": trained, **asked}).optim.lr

    assert rate() == rate(freeze=3) == 1e-3
    assert rate(freeze="all") == rate(lora_rank=8) == rate(lora_rank=8, freeze=2) == 3e-3
    assert rate(freeze="all", lr=0.5) == 0.5


def test_the_strength_of_adapters_is_resolved(trained):
    asked = {"weights": trained, "lora_rank": 8}
    assert resolve("made-up", data_of(), asked).transfer.lora_alpha == 16.0
    assert resolve("made-up", data_of(), asked | {"lora_alpha": 4}).transfer.lora_alpha == 4.0
    assert resolve("made-up", data_of(), {"weights": trained}).transfer.lora_alpha == 0.0


def test_the_architecture_is_that_of_the_settings():
    model = architecture(resolve("made-up", data_of(), ASKED))
    assert {name: getattr(model, name) for name in ASKED if name in model.__dict__} == {
        name: value for name, value in ASKED.items() if name in model.__dict__
    }
    assert (model.patch, model.width, model.classes) == (8, 192, 3)


def test_what_follows_from_a_setting_follows_it():
    assert resolve("made-up", data_of(), {"epochs": 20}).optim.warmup_epochs == 2.0
    assert resolve("made-up", data_of(), {"model": "ViT-B/16"}).model == "vit_b16"
    assert resolve("made-up", data_of(30), {"model": "vit_b16"}).input.img_size == (64, 64)


def test_the_default_is_made_for_the_number_of_images():
    recipes = [resolve("made-up", data_of(images=images), {}).recipe for images in (1, 100_000, 100_001)]
    assert recipes == ["small", "small", "beyer"]


def test_fewer_images_are_seen_more_often():
    few, many = (resolve("made-up", data_of(images=images), {}).optim for images in (500, 60_000))
    assert few.epochs > many.epochs
    assert few.batch_size < many.batch_size


@pytest.mark.parametrize("images", [3, 20, 150, 5_000])
def test_a_handful_of_images_is_seen_often_enough_to_learn_from(images, trained):
    optim = resolve("made-up", data_of(images=images), {"weights": trained}).optim
    assert optim.epochs * max(images // optim.batch_size, 1) >= 200


def test_weights_decide_the_model_and_its_size(trained):
    config = resolve("made-up", data_of(32, channels=3), {"weights": trained})
    assert (config.recipe, config.model, config.weights) == ("finetune", "vit_nano2", trained)
    assert (config.input.img_size, config.input.channels, config.arch.registers) == ((12, 12), 3, 3)
    assert resolve("made-up", data_of(), {"weights": trained, "img_size": 16}).input.img_size == (16, 16)
    assert resolve("made-up", data_of(), {"weights": trained, "recipe": "small"}).recipe == "small"
    assert resolve("made-up", data_of(), {"weights": trained, "model": "vit-nano/2"}).model == "vit_nano2"


def test_weights_keep_the_mean_they_were_trained_with(tmp_path, trained):
    assert resolve("made-up", data_of(), {"weights": trained}).input.normalize == "weights"
    config = replace(canonical("vit_nano2")[1], img_size=(12, 12), classes=2)
    seen = Preprocess((12, 12), 3, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    save(
        tmp_path / "colour.safetensors",
        build(config),
        Card(model="vit_nano2", config=config, task=Multiclass(("x", "y")), preprocess=seen),
    )
    weights = {"weights": str(tmp_path / "colour.safetensors")}
    kept = resolve("made-up", data_of(), weights).input
    assert (kept.normalize, kept.mean, kept.std) == ("weights", seen.mean, seen.std)
    other = resolve("made-up", data_of(channels=1), weights).input
    assert (other.normalize, other.mean) == ("half", (0.5,))
    asked = resolve("made-up", data_of(), weights | {"normalize": "imagenet", "std": 0.25}).input
    assert (asked.mean, asked.std) == ((0.485, 0.456, 0.406), (0.25,))


def test_another_model_than_that_of_the_weights_is_refused(trained):
    with pytest.raises(UserError, match="are a vit_nano2, but --model asks for vit_b16"):
        resolve("made-up", data_of(), {"weights": trained, "model": "vit_b16"})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"recipe": "smal"}, "There is no recipe 'smal'. Did you mean 'small'? There are small, finetune, paper-"),
        ({"model": "vit_b61"}, "There is no model 'vit_b61'. Did you mean 'vit_b16'?"),
        ({"epoch": 3}, "There is no setting 'epoch'. Did you mean 'epochs'?"),
        ({"opt": "adam"}, "'opt' must be one of adamw, sgd, muon, lamb, but it is 'adam'. Did you mean 'adamw'?"),
        ({"model": "vit_b16", "img_size": 100}, "must be a multiple of the patch size, 16, but it is 100x100"),
        ({"weights": "nowhere"}, "nowhere is neither a run folder nor a weights file"),
        ({"device": "gpu"}, "The device 'gpu' cannot be used"),
        ({"epochs": 0}, "'epochs' must be above 0 and finite, but it is 0."),
        ({"epochs": float("inf")}, "'epochs' must be above 0 and finite, but it is inf."),
        ({"epochs": 3, "warmup_epochs": 4.0}, "'warmup_epochs' must be between 0 and the number of epochs"),
        ({"warmup_epochs": -1.0}, "'warmup_epochs'"),
        ({"batch_size": 0}, "'batch_size' must be at least 1"),
        ({"grad_accum": 0}, "'grad_accum' must be at least 1"),
        ({"grad_accum": 3, "batch_size": 64}, "'batch_size' must be a multiple of the 3 forward passes"),
        ({"lr": 0.0}, "'lr' must be above 0"),
        ({"lr": float("nan")}, "'lr' must be above 0"),
        ({"weight_decay": -0.1}, "'weight_decay'"),
        ({"min_lr": -1.0}, "'min_lr'"),
        ({"min_lr": 2.0}, "'min_lr'"),
        ({"cooldown": 1.5}, "'cooldown'"),
        ({"clip_grad": -1.0}, "'clip_grad'"),
        ({"body_lr": -0.1}, "'body_lr'"),
        ({"layer_decay": 0.0}, "'layer_decay'"),
        ({"layer_decay": 1.1}, "'layer_decay'"),
        ({"model_ema": 1.0}, "'model_ema' must be at least 0 and below 1"),
        ({"workers": 0}, "'workers' must be at least 1"),
        ({"channels": 2}, "'channels' must be 1 or 3 or 4"),
        ({"channels": 0}, "'channels' must be at least 1"),
        ({"bits": 12}, "'bits' must be 8, 16, or 32"),
        ({"bits": 32}, "'bits' must be 8 or 16"),
        ({"channels": 1, "normalize": "imagenet"}, "--normalize imagenet needs 3 channels, but the model reads 1"),
        ({"normalize": "weights"}, "--normalize weights needs --weights with"),
        ({"mean": (0.1, 0.2)}, "'mean' must have one number, or one for each of 3 channels"),
        ({"mean": ("a",)}, "'mean' must be a list of numbers"),
        ({"std": 0.0}, "'std' must be above 0"),
        ({"crop": 0.0}, "'crop'"),
        ({"crop_scale": 0.0}, "'crop_scale'"),
        ({"shift": -1}, "'shift'"),
        ({"hflip": 1.5}, "'hflip' must be a probability"),
        ({"randaug": -1}, "'randaug'"),
        ({"magnitude": 11.0}, "'magnitude'"),
        ({"three_augment": 1.5}, "'three_augment' must be a probability"),
        ({"color_jitter": 1.5}, "'color_jitter' must be between 0 and 1"),
        ({"mixup": -0.5}, "'mixup'"),
        ({"smoothing": 1.0}, "'smoothing'"),
        ({"drop": 1.0}, "'drop'"),
        ({"registers": -1}, "'registers'"),
        ({"name": ""}, "'name'"),
        ({"name": "../elsewhere"}, "'name'"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(asked, message):
    with pytest.raises(UserError) as caught:
        resolve("made-up", data_of(), asked)
    assert message in str(caught.value)


def test_runs_without_a_name_are_numbered(tmp_path):
    for name in ("made-up-vit_nano2", "made-up-vit_nano2-2", "made-up-vit_nano2-3"):
        assert resolve("made-up", data_of(), {}).run.name == name
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert resolve("made-up", data_of(), {"out": "others"}).run.name == "made-up-vit_nano2"
    assert resolve("made-up", data_of(), {"name": "made-up-vit_nano2"}).run.name == "made-up-vit_nano2"


def test_a_recipe_says_what_it_is():
    for name, recipe in RECIPES.items():
        assert recipe.line.endswith("."), name
        if not name.endswith("small"):
            assert "https://arxiv.org/abs/" in recipe.make.__doc__, name
