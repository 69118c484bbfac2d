"""The touch test, as counts: a new task or architecture is one file, because nobody else asks which one it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import vitrail
from vitrail import models
from vitrail.tasks import METHODS, TASKS, Boxes

PACKAGE = Path(vitrail.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
SCREEN = 75  # lines
# "mae" and "dino" are also a pooling and recipes. What only boxes mean is a name of theirs.
TASK_NAMES = {*TASKS, *METHODS, Boxes.meant} - {"mae", "dino"}


def outside(*rooms: str) -> list[Path]:
    """The modules that are in none of the rooms."""
    return [path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in rooms]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(parsed(path))


def strings(node: ast.AST) -> set[object]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def names(node: ast.AST) -> set[str]:
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    }


def where(path: Path, node: ast.expr | ast.stmt) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_only_tasks_compare_the_name_of_a_task():
    found = []
    for path in outside("tasks"):
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                used = strings(node)
            elif isinstance(node, ast.Dict):  # a dictionary by task is a comparison in disguise
                used = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            else:
                continue
            found += [where(path, node)] if used & TASK_NAMES else []
    assert found == []


def test_only_models_and_weights_ask_for_the_family_of_a_model():
    """A model says itself what it can do."""
    families = {part.__name__ for config, model in models.FAMILIES.values() for part in (config, model)}
    found = []
    for path in outside("models", "weights"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                used = {alias.name for alias in node.names}
            elif isinstance(node, ast.Call) and names(node.func) & {"isinstance", "issubclass"}:
                used = names(node)
            else:
                continue
            found += [where(path, node)] if used & families else []
    assert found == []


def test_no_module_is_longer_than_400_lines():
    long = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_the_training_loop_is_a_page_of_two_screens():
    source = (PACKAGE / "train" / "loop.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 200
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths["steps"] <= SCREEN
    assert lengths["train"] <= SCREEN
