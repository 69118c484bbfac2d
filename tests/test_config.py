"""Settings: one source for names, types, defaults and help, and a file that holds them exactly."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace
from typing import get_type_hints

import pytest

from vitrail.config import (
    ArchConfig,
    AugmentConfig,
    CaptionConfig,
    DistillConfig,
    InputConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
    SourceConfig,
    StopConfig,
    TrainConfig,
    TransferConfig,
    coerce,
    flat,
    from_plain,
    load_yaml,
    options,
    override,
    save_yaml,
    to_plain,
)
from vitrail.errors import UserError
from vitrail.models import FAMILIES

GROUPS = (
    TrainConfig,
    SourceConfig,
    InputConfig,
    ArchConfig,
    TransferConfig,
    DistillConfig,
    PretrainConfig,
    OptimConfig,
    StopConfig,
    AugmentConfig,
    CaptionConfig,
    RunConfig,
)

CONFIG = TrainConfig(
    data="photos/ä: [x]",
    recipe="small",
    model="vit_b16",
    weights=None,
    source=SourceConfig(data_dir="~/data"),
    input=InputConfig(img_size=(192, 256), channels=3),
    arch=ArchConfig(
        pool="cls", pos="none", head="linear", stem="patch", registers=4, layer_scale=1e-5, drop=0.0, drop_path=0.1
    ),
    transfer=TransferConfig(freeze="all"),
    distillation=DistillConfig(teacher="runs/bit", distill="soft"),
    optim=OptimConfig(
        epochs=3, batch_size=64, opt="muon", lr=1e-3, weight_decay=0.05, sched="linear", warmup_epochs=0.3
    ),
    augment=AugmentConfig(mixup=0.8, hflip=1 / 3),
    run=RunConfig(name="no", device="cpu", amp="off", compile=True),
)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "config.yaml"
    save_yaml(CONFIG, path)
    return path


def test_yaml_gives_back_what_was_saved(saved):
    assert load_yaml(TrainConfig, saved) == CONFIG


def test_a_default_may_be_left_out_of_the_file(saved):
    saved.write_text("".join(line for line in saved.read_text().splitlines(True) if "mixup" not in line))
    assert load_yaml(TrainConfig, saved) == override(CONFIG, {"mixup": 0.0})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  epochs: 3", "  epoch: 3", "There is no setting 'epoch'. Did you mean 'epochs'?"),
        ("optim:", "optimm:", "There is no setting 'optimm'. Did you mean 'optim'?"),
        ("  epochs: 3\n", "", "The setting 'epochs' is missing."),
        ("  epochs: 3", "  epochs: three", "'epochs' must be a number, but it is 'three'."),
        ("  batch_size: 64", "  batch_size: 2.5", "'batch_size' must be a whole number, but it is 2.5."),
        ("  epochs: 3", "  epochs: true", "'epochs' must be a number, but it is True."),
        ("  lr: 0.001", "  lr: true", "'lr' must be a number, but it is True."),
        ("  compile: true", "  compile: 1", "'compile' must be true or false, but it is 1."),
        ("model: vit_b16", "model: 16", "'model' must be text, but it is 16."),
        ("  opt: muon", "  opt: moun", "'opt' must be one of adamw, sgd, muon, lamb, but it is 'moun'."),
        ("  lr: 0.001", "  lr: null", "'lr' must be a number, but it is None."),
        ("recipe: small", "recipe: [small", "is not a YAML file"),
        ("recipe: small", "recipe: !!python/object/apply:os.system ['false']", "is not a YAML file"),
    ],
)
def test_a_wrong_file_is_refused_by_name(saved, old, new, message):
    text = saved.read_text()
    assert text.count(old) == 1
    saved.write_text(text.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_yaml(TrainConfig, saved)
    assert str(saved) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"- 1\n- 2\n", b"just text", b"\xff\xfe\x00\x80", b"optim: 3\n"])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config\.yaml"):
        load_yaml(TrainConfig, path)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (224, (224, 224)),
        ("224", (224, 224)),
        ("192x256", (192, 256)),
        ("192X256", (192, 256)),
        ("192,256", (192, 256)),
        ([192, 256], (192, 256)),
        ((192, 256), (192, 256)),
    ],
)
def test_sizes_are_written_in_many_ways(value, size):
    assert coerce(TrainConfig, "img_size", value) == size


@pytest.mark.parametrize("value", ["big", "1x2x3", "0", -4, [32, 0], [], None, "32x", {}])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(UserError, match="'img_size' must be a size like 224 or 192x256"):
        coerce(TrainConfig, "img_size", value)


@pytest.mark.parametrize(
    ("value", "freeze"), [("all", "all"), (3, 3), ("3", 3), (0, 0), ("0", 0), (None, None)], ids=repr
)
def test_what_is_frozen_is_all_or_a_number(value, freeze):
    assert coerce(TrainConfig, "freeze", value) == freeze


@pytest.mark.parametrize("value", ["ALL", "none", "", "2.0", 2.0, -1, "-1", True, [2], "²"], ids=repr)
def test_what_cannot_be_frozen_is_refused(value):
    with pytest.raises(UserError, match="'freeze' must be all, image, or a number of blocks from 0, but it is"):
        coerce(TrainConfig, "freeze", value)


def test_a_number_of_frozen_blocks_is_a_number_in_the_file(tmp_path):
    config = override(CONFIG, {"freeze": "2"})
    save_yaml(config, tmp_path / "config.yaml")
    assert "freeze: 2\n" in (tmp_path / "config.yaml").read_text()
    assert load_yaml(TrainConfig, tmp_path / "config.yaml") == config


@pytest.mark.parametrize("group", ["transfer", "source", "distillation"])
def test_a_group_of_defaults_may_be_left_out_of_the_file(group):
    document = to_plain(CONFIG)
    del document[group]
    assert from_plain(TrainConfig, document) == replace(CONFIG, **{group: type(getattr(CONFIG, group))()})


def test_whole_numbers_are_taken_for_fractions_and_not_the_reverse():
    assert isinstance(coerce(TrainConfig, "lr", 1), float)
    with pytest.raises(UserError, match="'batch_size' must be a whole number"):
        coerce(TrainConfig, "batch_size", 32.0)


def test_override_changes_settings_in_their_groups_and_nothing_else():
    changed = override(CONFIG, {"epochs": 9, "img_size": "64", "model": "vit_s16", "weights": "runs/a"})
    assert (changed.optim.epochs, changed.input.img_size) == (9, (64, 64))
    assert (changed.model, changed.weights) == ("vit_s16", "runs/a")
    assert (
        override(changed, {name: flat(CONFIG)[name] for name in ("epochs", "img_size", "model", "weights")}) == CONFIG
    )
    with pytest.raises(UserError, match=r"no setting 'epoch'\. Did you mean 'epochs'"):
        override(CONFIG, {"epoch": 9})


def test_flat_names_are_unique_over_all_groups():
    leaves = [
        field.name
        for group in GROUPS
        for field in dataclasses.fields(group)
        if not dataclasses.is_dataclass(get_type_hints(group)[field.name])
    ]
    assert [name for name, count in Counter(leaves).items() if count > 1] == []
    assert set(options()) == set(leaves) == set(flat(CONFIG))


def test_flags_are_unique_with_their_aliases():
    flags = [f"--{name}".replace("_", "-") for name in options()] + [o.alias for o in options().values() if o.alias]
    assert len(flags) == len(set(flags))


def test_every_setting_has_a_help_text():
    assert [name for name, option in options().items() if len(option.help.split()) < 1] == []


@pytest.mark.parametrize("group", GROUPS)
def test_no_group_grows_too_large(group):
    assert len(dataclasses.fields(group)) <= 16


@pytest.mark.parametrize("config", [config for config, _ in FAMILIES.values()])
def test_no_model_configuration_grows_too_large(config):
    contract = {"img_size", "channels", "classes", "drop", "drop_path", "eps", "resample", "attention"}
    assert len({field.name for field in dataclasses.fields(config)} - contract) <= 12


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.optim.lr = 1.0
