"""What the docs say is what the program says."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

from vitrail.train.recipes import RECIPES
from vitrail.verbs import VERBS
from vitrail.verbs.recipes import recipes

DOCS = Path(__file__).parent.parent / "docs"
README = DOCS.parent / "README.md"


def test_the_table_of_recipes_is_what_they_resolve_to():
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", (DOCS / "recipes.md").read_text(), re.M)
    values = {name: tuple(cells.split(" | ")) for name, cells in rows if cells.count(" | ") == 7}
    expected = {}
    for name in RECIPES:
        config = recipes(name)
        o, a = config.optim, config.augment
        mixing = [f"{kind} {value:g}" for kind, value in (("mixup", a.mixup), ("CutMix", a.cutmix)) if value]
        colour = [f"RandAugment {a.randaug}, {a.magnitude:g}"] if a.randaug else ["3-Augment"] * (a.three_augment > 0)
        expected[name] = (
            f"{config.model}, {config.input.img_size[0]}",
            f"{o.epochs}",
            f"{o.batch_size}",
            {"adamw": "AdamW", "sgd": "SGD", "lamb": "LAMB", "muon": "Muon"}[o.opt],
            f"{o.lr:g}",
            f"{o.weight_decay:g}",
            f"{o.sched}, {o.warmup_epochs:g}",
            ", ".join(colour + mixing + [f"{a.aug_repeats} copies"] * (a.aug_repeats > 1)) or "-",
        )
    published = {name: row for name, row in expected.items() if name not in ("small", "finetune", "pretrain-small")}
    assert values == published, "\n".join(f"| `{name}` | {' | '.join(row)} |" for name, row in published.items())
    assert all(f"`{name}`" in (DOCS / "recipes.md").read_text() for name in RECIPES)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_that_the_readme_links_to(verb):
    assert (DOCS / f"{verb}.md").read_text().startswith(f"# `vitrail {verb}")
    assert f"docs/{verb}.md" in README.read_text()


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_programs_import_names_that_exist():
    for program in (*DOCS.glob("*.py"), *(DOCS.parent / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(program.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("vitrail"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    submodule = f"{node.module}.{name.name}"
                    assert hasattr(module, name.name) or importlib.util.find_spec(submodule), f"{program}: {submodule}"


@pytest.mark.usefixtures("plain_runs", "own_models")
def test_the_code_of_the_page_on_extending_runs(tmp_path, monkeypatch, capsys):
    code = re.findall(r"^```python\n(.*?)^```$", (DOCS / "extend.md").read_text(), re.M | re.S)
    assert len(code) == 10
    assert all(len(block.strip().splitlines()) <= 16 for block in code)
    monkeypatch.chdir(tmp_path)
    program = types.ModuleType("extending")
    monkeypatch.setitem(sys.modules, program.__name__, program)  # where dataclasses look up their types
    exec("\n".join(code).replace("240", "60"), vars(program))  # images
    assert "# Given as Python objects: data, val. To resume:" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"rows", "set", "small", "mine", "focal", "enough"}


def test_the_page_for_users_of_other_tools_is_the_table_of_synonyms():
    spec = importlib.util.spec_from_file_location("coming_from", DOCS / "coming_from.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run python docs/coming_from.py"
