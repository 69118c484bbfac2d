"""Tasks: what a model learns to predict, one file each; `Task` is their base class.

To add a task, subclass `Task` (or one of these) and call `tasks.register(MyTask)`; `--task NAME` then trains it on any
data whose targets it can read.
"""

from __future__ import annotations

from importlib import import_module

from vitrail.errors import UserError, nearest
from vitrail.tasks.boxes import Boxes
from vitrail.tasks.masks import Masks
from vitrail.tasks.multiclass import Multiclass
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.pairs import Pairs
from vitrail.tasks.regression import Regression
from vitrail.tasks.task import Task

__all__ = [
    "METHODS",
    "TASKS",
    "Boxes",
    "Masks",
    "Multiclass",
    "Multilabel",
    "Pairs",
    "Regression",
    "Task",
    "other_tasks",
    "register",
    "task_type",
]

TASKS: dict[str, type[Task]] = {}  # those imported so far
METHODS = ("masked", "mae", "simmim", "dino", "lejepa")  # of self-supervised pre-training, imported on first use


def register(task: type[Task]) -> type[Task]:
    """Registers a task under its name; usable as a decorator."""
    if task.name in TASKS and TASKS[task.name] is not task:
        raise UserError(f"There already is a task '{task.name}': {TASKS[task.name].__qualname__}. Choose another name.")
    TASKS[task.name] = task
    return task


for _task in (Multiclass, Multilabel, Regression, Masks, Boxes, Pairs):
    register(_task)


def task_type(name: object) -> type[Task]:
    """The task class of a name; an unknown name raises UserError."""
    if isinstance(name, str) and name in METHODS:
        import_module(f"vitrail.tasks.{name}")  # registers it; needs torch
    if not isinstance(name, str) or name not in TASKS:
        known = [task for task, kind in TASKS.items() if kind.labelled]
        hint = nearest(str(name), known) or " Call vitrail.tasks.register first for a task of your own."
        raise UserError(f"'task' must be one of {', '.join(known)}, but it is {name!r}.{hint}")
    return TASKS[name]


def other_tasks(task: type[Task]) -> str:
    """The other tasks that read the labels of a table: "multilabel, regression or pairs"."""
    names = [name for name, other in TASKS.items() if other.labelled and not other.annotated and other is not task]
    return " or ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])
