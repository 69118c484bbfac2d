"""What no verb expects: errors of the system and faults of vitrail."""

from __future__ import annotations

import pytest
from PIL import Image

from vitrail import cli
from vitrail.errors import explained


def test_a_fault_is_one_sentence(monkeypatch, capsys):
    def fail(_: object) -> int:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(SystemExit) as end:
        cli.main(["models"])
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        "vitrail: A fault of vitrail: ZeroDivisionError: by zero. --debug shows it; please report it.\n"
    )
    with pytest.raises(ZeroDivisionError):
        cli.main(["models", "--debug"])


@pytest.mark.parametrize("error", [MemoryError(), PermissionError(13, "Permission denied", "a.txt")])
def test_errors_of_the_system_are_the_users(monkeypatch, capsys, error):
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(SystemExit) as end:
        cli.main(["models"])
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


REFUSED = [
    "report RUN --device nonsense --out new",
    "evaluate RUN --device nonsense --out new",
    "explain RUN --device nonsense --out new",
    "embed RUN nowhere --out new/a.npz",
    "embed RUN digits --device nonsense --out new/a.npz",
    "predict RUN nowhere --out new/a.csv",
    "export RUN --out new/a.nonsense",
    "convert RUN new/a.safetensors --to nonsense",
    "train digits --device nonsense --out new",
    "train digits --img-size 1000000 --out new",
    "train digits --folds 1 --out new",
    "train digits --teacher nowhere.onnx --out new",
    "pretrain digits --device nonsense --out new",
    "pretrain digits --decoder-depth 100000000 --out new",
    "pretrain digits --decoder-depth 1000 --decoder-width 131072 --out new",
    "pretrain digits --method dino --prototypes 9000000000 --out new",
    "pretrain digits --method lejepa --head-width 131072 --projection 131072 --local-crops 1001 --out new",
    "study pooling digits --budget 1s --out new",
]


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_command_is_one_sentence_and_leaves_nothing(words, trained, tmp_path, monkeypatch, vitrail_says):
    monkeypatch.chdir(tmp_path)
    code, _, error = vitrail_says(*(trained if word == "RUN" else word for word in words.split()))
    assert code == 2
    assert error.splitlines()[-1].startswith("vitrail: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "package"), [("torch", "torch"), ("sklearn.metrics", "scikit-learn")])
def test_a_package_that_is_not_installed_is_named(module, package):
    sentence, code = explained(ModuleNotFoundError(f"No module named '{module}'", name=module))
    assert (sentence.endswith(f"pip install {package}"), code) == (True, 2)
    assert explained(ModuleNotFoundError("No module named 'vitrail.gone'", name="vitrail.gone"))[1] == 1


def test_pictures_of_a_model_that_has_none_leave_no_folder(trained, tmp_path, vitrail_says):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    code, _, error = vitrail_says("predict", trained, tmp_path / "a.png", "--pictures", tmp_path / "new" / "p")
    assert code == 2
    assert "--pictures is for masks and boxes" in error
    assert not (tmp_path / "new").exists()
