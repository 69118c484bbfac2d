"""Tasks: what a model learns to predict, one file each; `Task` is their base class.

To add a task, subclass `Task` (or one of these) and call `tasks.register(MyTask)`; `--task NAME` then trains it on any
data whose targets it can read.
"""

from __future__ import annotations

from vitrail.errors import UserError, nearest
from vitrail.tasks.multiclass import Multiclass
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.regression import Regression
from vitrail.tasks.task import Task

__all__ = ["TASKS", "Multiclass", "Multilabel", "Regression", "Task", "register", "task_type"]

TASKS: dict[str, type[Task]] = {}


def register(task: type[Task]) -> type[Task]:
    """Registers a task under its name; usable as a decorator."""
    if task.name in TASKS and TASKS[task.name] is not task:
        raise UserError(f"There already is a task '{task.name}': {TASKS[task.name].__qualname__}. Choose another name.")
    TASKS[task.name] = task
    return task


for _task in (Multiclass, Multilabel, Regression):
    register(_task)


def task_type(name: object) -> type[Task]:
    """The task class of a name; an unknown name raises UserError."""
    if not isinstance(name, str) or name not in TASKS:
        hint = nearest(str(name), TASKS) or " Call vitrail.tasks.register first for a task of your own."
        raise UserError(f"'task' must be one of {', '.join(TASKS)}, but it is {name!r}.{hint}")
    return TASKS[name]
