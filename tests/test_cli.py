"""The command line: the same verbs, and every mistake answered with one sentence."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.config import options
from vitrail.errors import UserError
from vitrail.runs.run import Run
from vitrail.train.checkpoint import checkpoint_path
from vitrail.train.custom import Custom
from vitrail.verbs import VERBS


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Whatever is left behind is left here."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refuses(vitrail_says):
    """Runs a command that must be refused: exit code 2, one sentence, and not a file more than before."""

    def run(*words):
        before = sorted(Path.cwd().rglob("*"))
        code, out, err = vitrail_says(*words)
        assert (code, out) == (2, "")
        assert err.startswith("vitrail: ")
        assert err.count("\n") == 1
        assert err.rstrip().endswith((".", "?", "…", "[OPTIONS]"))
        assert sorted(Path.cwd().rglob("*")) == before
        return err

    return run


def picture(path, colour="red"):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)


# Generated from the verbs


# Parameters that take Python objects only
PYTHON = {"augment", "objective", "optimizer", "schedule", "on_epoch", "preprocess"}


@pytest.mark.parametrize("verb", VERBS)
def test_flags_are_the_parameters_of_the_verb_and_of_what_prints_its_result(verb):
    module = import_module(f"vitrail.verbs.{verb}")
    parameters = [*signature(getattr(module, verb)).parameters.values()]
    named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in PYTHON}
    own = {
        name: o
        for name, o in options().items()
        if o.only in ("", verb) or (verb in ("recipes", "plan") and o.only != "python")
    }
    settings = own if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
    printing = {p.name: p for p in signature(module.show).parameters.values() if p.kind is p.KEYWORD_ONLY}
    found = {argument.name: argument for argument in cli.arguments(verb)}
    assert found.keys() == named.keys() | settings.keys() | printing.keys()
    for name, parameter in (printing | named).items():
        assert found[name].required == (parameter.default is parameter.empty)
        assert found[name].positional == (parameter.kind is parameter.POSITIONAL_OR_KEYWORD)
        assert found[name].default in (parameter.default, None)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_argument_is_a_phrase_with_its_default(verb, vitrail_says, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = vitrail_says(verb, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 120
    assert "None" not in out
    assert "{" not in out.replace("{}", "")  # the place of a label in a template
    words = " ".join(out.split())
    for argument in cli.arguments(verb):
        assert not argument.help.endswith(".")
        assert argument.text.count("default:") + argument.text.count("set by the recipe") <= 1
        assert f"{argument.usage} {argument.text}" in words
        if argument.default or argument.default is dataclasses.MISSING:
            assert "default:" in argument.text or "set by the recipe" in argument.text


def test_every_file_of_verbs_is_a_command():
    files = {path.stem for path in Path(import_module("vitrail.verbs").__file__).parent.glob("*.py")}
    assert files == {*VERBS, "__init__", "run"}  # `vitrail.Run` has verbs as methods


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("predict run a.png --top 2 b.png", {"run": "run", "images": ["a.png", "b.png"], "top": 2}),
        ("predict run a.png -b4 -j 3", {"run": "run", "images": ["a.png"], "batch_size": 4, "workers": 3}),
        ("evaluate run --method knn data", {"run": "run", "method": "knn", "data": "data"}),
        ("evaluate run --shots 1 5 --json", {"run": "run", "shots": [1, 5], "json": True}),
        ("train --val_fraction=0.5 data --wd 1e-3", {"val_fraction": 0.5, "data": "data", "weight_decay": 1e-3}),
        ("train data --imgsz 192x256 --mean -0.5 0 1", {"data": "data", "img_size": "192x256", "mean": [-0.5, 0, 1]}),
        ("train data --freeze 3 --label-column x,y", {"data": "data", "freeze": "3", "label_column": "x,y"}),
        ("train data --output=there", {"data": "data", "out": "there"}),
        ("report a b --out c.html", {"runs": ["a", "b"], "out": "c.html"}),
        ("recipes", {}),
        ("explain run", {"run": "run"}),
    ],
)
def test_what_can_be_typed(words, given):
    verb, *rest = words.split()
    assert cli.parse(verb, rest) == given


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_every_setting_is_a_flag_of_the_verbs_that_have_it(verb, vitrail_says, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = vitrail_says(verb, "--help")
    assert code == 0
    for name, option in options().items():
        if name != "data":
            flag = f"--{name.replace('_', '-')}"
            assert (re.search(rf"{flag}\b(?!-)", out) is not None) == (option.only in ("", verb)), flag
            assert option.alias in out or option.only not in ("", verb)


def test_settings_arrive_as_they_were_given(monkeypatch, vitrail_says, tmp_path):
    seen = {}

    def train(source, resume, overwrite, find_lr, asked, custom, data_changed):
        seen.update(asked, data=source, resume=resume, overwrite=overwrite, find_lr=find_lr, changed=data_changed)
        assert custom == Custom()
        return Run(tmp_path)

    monkeypatch.setattr("vitrail.train.start.start", train)
    words = ["--img-size", "192x256", "-b", 4, "--lr", 0, "--wd", 0.5, "--opt", "sgd", "--drop-path", 0.1]
    assert vitrail_says("train", "photos", *words, "--compile", "--overwrite")[0] == 0
    assert seen == {
        "data": "photos",
        "resume": None,
        "overwrite": True,
        "find_lr": False,
        "changed": False,
        "img_size": "192x256",
        "batch_size": 4,
        "lr": 0.0,
        "weight_decay": 0.5,
        "opt": "sgd",
        "compile": True,
        "drop_path": 0.1,
    }


def test_the_version(vitrail_says):
    assert vitrail_says("--version") == (0, f"vitrail {vitrail.__version__}\n", "")


# Mistakes


def test_missing_and_empty_data(refuses):
    assert "There is no data set 'nowhere'" in refuses("train", "nowhere", "--out", "runs")
    assert "Did you mean 'digits'?" in refuses("train", "digts", "--out", "runs")
    Path("empty").mkdir()
    assert "empty has no images" in refuses("train", "empty", "--out", "runs")
    Path("empty/cat").mkdir()
    assert "has no images" in refuses("train", "empty", "--out", "runs")


def test_one_class_only(refuses):
    for i in range(4):
        picture(f"data/cat/{i}.png")
    assert "data has only one class, 'cat'" in refuses("train", "data", "--out", "runs")


def test_a_split_without_images(refuses):
    for name in ("cat", "dog"):
        picture(f"data/train/{name}/1.png")
    Path("data/val").mkdir()
    assert "data/val has no images" in refuses("train", "data", "--out", "runs")
    for name in ("cat", "dog"):
        Path("data/val", name).mkdir()
    assert "data/val/cat has no images" in refuses("train", "data", "--out", "runs")


def test_a_class_in_val_that_train_lacks(refuses):
    for path in ("train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/horse/1.png"):
        picture(Path("data", path))
    assert "The class 'horse' is in the val split of data, but not in train" in refuses(
        "train", "data", "--out", "runs"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "vit_b61"], "There is no model 'vit_b61'. Did you mean 'vit_b16'?"),
        (["--recipe", "smal"], "There is no recipe 'smal'. Did you mean 'small'?"),
        (["--model", "vit_b16", "--img-size", "100"], "must be a multiple of the patch size, 16, but it is 100x100"),
        (["--img-size", "huge"], "'img_size' must be a size like 224 or 192x256, but it is 'huge'."),
        (["--epochs", "0"], "'epochs' must be above 0 and finite, but it is 0."),
        (["--weights", "nowhere"], "nowhere is neither a run folder nor a weights file"),
        (["--device", "cuda:77"], "The device 'cuda:77' cannot be used"),
        (["--grad-accum", "1000"], "of the 1000 forward passes of --grad-accum"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(refuses, words, message):
    assert message in refuses("train", "digits", "--out", "runs", *words)


def test_nothing_to_train_on(refuses):
    assert "Give a data set, or --resume RUN" in refuses("train", "--out", "runs")


def test_a_run_folder_that_exists(refuses):
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/notes.txt").touch()
    message = refuses("train", "digits", "--name", "mine")
    assert "The run runs/mine exists." in message
    assert "--resume runs/mine" in message


def test_resume_of_what_is_no_run_or_another(refuses, trained):
    Path("folder").mkdir()
    assert "folder is not a run" in refuses("train", "--resume", "folder")
    assert "nowhere is not a run" in refuses("train", "--resume", "nowhere")
    shutil.copytree(trained, "run")
    assert "model vit_b16 instead of vit_nano4" in refuses("train", "--resume", "run", "--model", "vit_b16")
    assert "data fashion-mnist instead of digits" in refuses("train", "fashion-mnist", "--resume", "run")


def test_a_corrupt_checkpoint_and_corrupt_weights(refuses, trained):
    shutil.copytree(trained, "run")
    for path, words in (
        (checkpoint_path(Path("run")), ["train", "--resume", "run"]),
        (Path("run/model.safetensors"), ["evaluate", "run"]),
        (Path("run/model.safetensors"), ["predict", "run", "image.png"]),
        (Path("run/model.safetensors"), ["train", "digits", "--weights", "run", "--out", "runs"]),
    ):
        picture("image.png")
        path.write_bytes(path.read_bytes()[:3000])
        message = refuses(*words)
        assert str(path) in message
        assert "corrupt" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "nowhere"], "nowhere is neither a run folder nor a weights file"),
        (["evaluate", "RUN", "nowhere"], "There is no data set 'nowhere'"),
        (["evaluate", "RUN", "--split", "vall"], "digits has no split 'vall'. Did you mean 'val'?"),
        (["evaluate", "RUN", "--batch-size", "0"], "'batch_size' must be"),
        (["evaluate", "RUN", "--device", "gpu"], "device 'gpu' cannot be used"),
        (["predict", "RUN", "nowhere.png"], "nowhere.png does not exist."),
        (["predict", "RUN", "*.jpg"], "No image matches *.jpg."),
        (["predict", "RUN", "folder"], "The folder folder and its subfolders contain no images"),
        (["predict", "nowhere", "image.png"], "nowhere is neither a run folder nor a weights file"),
        (["predict", "RUN", "image.png", "--top", "0"], "top"),
        (["evaluate", "RUN", "--method", "linear", "--k", "3"], "'k' applies to --method knn"),
        (["embed", "RUN", "image.png", "--out", "a.txt"], "--out must be a .npz or .parquet file, but it is a.txt."),
        (["embed", "RUN", "image.png", "--out", "nowhere/a.npz"], "Could not write nowhere/a.npz"),
        (["embed", "RUN", "folder", "--out", "a.npz"], "The folder folder and its subfolders contain no images"),
        (["models", "resnet"], "No model has 'resnet' in its name."),
        (["recipes", "diet"], "There is no recipe 'diet'. Did you mean 'deit'?"),
        (["recipes", "deit", "nowhere"], "There is no data set 'nowhere'"),
        (["recipes", "deit", "--epochs", "0"], "'epochs' must be above 0"),
    ],
    ids=str,
)
def test_mistakes_in_the_other_verbs(refuses, trained, words, message):
    Path("folder").mkdir()
    picture("image.png")
    assert message in refuses(*[trained if word == "RUN" else word for word in words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train digits --epoch 3", "`vitrail train` has no option '--epoch'. Did you mean '--epochs'?"),
        ("train digits --lrr=3", "`vitrail train` has no option '--lrr'. Did you mean '--lr'?"),
        ("train digits --learning-rate 3", "--learning-rate is called --lr here. Use `vitrail train digits --lr 3`."),
        ("train digits --learnig-rate 3", "`vitrail train` has no option '--learnig-rate'."),
        ("evaluate run --spilt val", "`vitrail evaluate` has no option '--spilt'. Did you mean '--split'?"),
        ("train digits --epochs ten", "'--epochs' must be a number, but it is 'ten'."),
        ("train digits --opt sgd -b=x", "'--batch-size' must be a whole number, but it is 'x'."),
        ("train digits --val-fraction much", "'--val-fraction' must be a number, but it is 'much'."),
        (
            "train digits --opt adam",
            "'--opt' must be one of adamw, sgd, muon, lamb, but it is 'adam'. Did you mean 'adamw'?",
        ),
        ("predict run a.png --top x", "'--top' must be a whole number, but it is 'x'."),
        ("predict run a.png --top 9999999999999999999", "'--top' must be a whole number below 2^63"),
        ("train digits --img-size 8 --out", "'--out' must be followed by a value."),
        ("convert run a.npz --to=--", "'--to' must be followed by a value, but it is '--'."),
        ("train digits more", "Wrong number of arguments. Usage: vitrail train [DATA] [OPTIONS]"),
        ("predict", "Wrong number of arguments. Usage: vitrail predict RUN IMAGES… [OPTIONS]"),
        ("embed run a.png", "--out is required. Usage: vitrail embed RUN IMAGES… --out FILE [OPTIONS]"),
        ("models nano --json=1", "'--json' takes no value."),
        ("evaluate run --method kn", "'--method' must be one of head, knn, linear, fewshot, zeroshot, but it is 'kn'."),
        ("evaluate run --method fewshot --shots one", "'--shots' must be a whole number, but it is 'one'."),
        ("trian digits", "There is no command 'trian'. Did you mean 'train'?"),
        ("", "The commands are models, check, shard, train"),
    ],
)
def test_a_command_that_cannot_be_read(refuses, words, message):
    assert message in refuses(*words.split())


def test_debug_shows_where_an_error_comes_from():
    with pytest.raises(UserError, match="There is no data set 'nowhere'"):
        cli.main(["train", "nowhere", "--debug"])


def test_ctrl_c_exits_130(monkeypatch, vitrail_says):
    def interrupted(*_args, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.train.start.start", interrupted)
    assert vitrail_says("train", "digits") == (130, "", "")


@pytest.mark.parametrize("words", [["models", "nano"], ["--help"]], ids=str)
def test_a_reader_that_has_seen_enough_is_no_error(words):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "vitrail", *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.close()
        said = child.stderr.read()
    assert said == ""
    assert child.returncode in (0, 1)


def test_convert_says_where_the_file_is(trained, vitrail_says, refuses):
    assert vitrail_says("convert", trained, "there.npz", "--to", "vitrail")[0] == 2
    assert "for npz must be a .npz file" in refuses("convert", trained, "there", "--to", "npz")
    assert vitrail_says("convert", trained, "there.safetensors", "--to", "timm") == (0, "there.safetensors\n", "")
    assert vitrail_says("predict", "there.safetensors", "nowhere.png")[0] == 2
    assert vitrail.load("there.safetensors").config == vitrail.load(trained).config


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["run", "--int8"], True),
        (["--int8", "run"], True),
        (["--int8", "auto", "run"], "auto"),
        (["run", "--int8=auto"], "auto"),
    ],
)
def test_a_flag_may_have_a_value(words, value):
    assert cli.parse("export", words) == {"run": "run", "int8": value}


def test_the_value_of_a_flag_is_checked_and_shown():
    with pytest.raises(UserError, match="'--int8' must be one of auto, but it is 'all'"):
        cli.parse("export", ["run", "--int8=all"])
    assert "--int8 [auto] " in cli.help_text("export")
