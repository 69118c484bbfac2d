"""What is imported when, and by whom."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail
from vitrail.verbs import VERBS

PACKAGE = Path(vitrail.__file__).parent

# A package may import only those to its right, and what is below all of them.
ORDER = (
    "cli",
    "verbs",
    "studies",
    "serve",
    "report",
    "export",
    "explain",
    "plan",
    "train",
    "evaluate",
    "runs",
    "weights",
    "data",
    "tasks",
    "charts",
    "models",
    "tokenizers",
    "config",
)
BELOW = ("device", "threads", "amx", "progress", "world", "files", "errors", "version")
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each takes a tenth of a second to two seconds to import.
HEAVY = {
    "PIL",
    "datasets",
    "jinja2",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "pandas",
    "pyarrow",
    "sklearn",
    "tensorboardX",
    "torch",
    "torch._dynamo",
    "torch.utils.flop_counter",
}


def heavy_modules(code: str) -> set[str]:
    """The slow modules that a fresh process has loaded after running this code."""
    show = f"import atexit, sys\natexit.register(lambda: print('HEAVY', *{HEAVY} & set(sys.modules)))\n"
    answer = subprocess.run(
        [sys.executable, "-c", show + code],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
        check=True,
    )
    first, *modules = answer.stdout.splitlines()[-1].split()
    assert first == "HEAVY"
    return set(modules)


def top(path: Path) -> str:
    """The package of vitrail that a file is in, or its own name if it is in none."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def part(module: str) -> str:
    """The same for the name of a module."""
    return module.split(".")[1] if "." in module else "vitrail"


def imports(path: Path) -> set[str]:
    """The modules of vitrail that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            whole = node.module == "vitrail"
            names |= {f"vitrail.{alias.name}" for alias in node.names} if whole else {str(node.module)}
    return {name for name in names if name.split(".")[0] == "vitrail"}


def test_every_module_has_its_place_in_the_order():
    assert {top(path) for path in MODULES} <= {*ORDER, *BELOW, "__init__", "__main__"}


@pytest.mark.parametrize("own", [*ORDER, *BELOW])
def test_imports_point_one_way(own):
    allowed = ORDER[ORDER.index(own) :] + BELOW if own in ORDER else BELOW[BELOW.index(own) :]
    for path in (path for path in MODULES if top(path) == own):
        assert {part(name) for name in imports(path)} <= set(allowed), path


@pytest.mark.parametrize(
    "code",
    [
        "import vitrail",
        "import vitrail; dir(vitrail); vitrail.UserError; vitrail.__version__",
        "from vitrail.cli import main; main(['--help'])",
        "from vitrail.cli import main; main(['--version'])",
        "from vitrail.cli import run; from vitrail.verbs import VERBS; [run([verb, '--help']) for verb in VERBS]",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code):
    assert heavy_modules(code) == set()


def test_models_are_listed_without_building_them():
    assert heavy_modules("from vitrail.cli import main; main(['models'])") == {"torch"}


def test_predictions_load_only_what_they_need(trained, digits):
    words = ["predict", str(trained), str(digits / "0" / "0.png")]
    assert heavy_modules(f"from vitrail.cli import main; main({words!r})") == {"torch", "PIL"}


def test_every_verb_is_a_function_of_vitrail_with_its_signature_and_docstring():
    for name in VERBS:
        verb = getattr(importlib.import_module(f"vitrail.verbs.{name}"), name)
        public = getattr(vitrail, name)
        assert callable(public)
        assert inspect.signature(public) == inspect.signature(verb)
        assert inspect.getdoc(public) == inspect.getdoc(verb)
    assert [row.name for row in vitrail.models("vit_nano4")] == ["vit_nano4"]


def test_a_verb_shares_its_name_with_a_room_whoever_imports_it_first():
    code = """
import os, sys
import matplotlib.figure, tensorboardX, torch._dynamo  # once, before the forks: they take seconds
for first in sys.argv[1:]:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    exec(first)
    import vitrail, vitrail.train.loop
    assert vitrail.train.loop.steps and vitrail.train is sys.modules["vitrail.train"]
    try:
        vitrail.train(epochz=3, data="digits")
    except vitrail.UserError as error:
        print(error)
    break
"""
    first = [
        "import vitrail.train.loop",
        "from vitrail import train",
        "from vitrail.train import loop",
        "import vitrail.verbs.train",
    ]
    answer = subprocess.run([sys.executable, "-c", code, *first], capture_output=True, text=True, check=True)
    assert answer.stdout == len(first) * "There is no setting 'epochz'. Did you mean 'epochs'?\n"


def test_public_names_resolve():
    assert vitrail.create("vit_nano4", classes=3).config.classes == 3
    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
        assert name in dir(vitrail)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        vitrail.trian  # noqa: B018  # to ask for it is the test
