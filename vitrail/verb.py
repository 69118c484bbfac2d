"""Makes a package callable, so that `vitrail.train` is both the verb and the package that holds its parts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def callable_package(name: str, function: Callable[..., Any]) -> None:
    """Lets `package(...)` call `function`, which keeps its signature and documentation."""

    class Verb(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    package = sys.modules[name]
    package.__class__ = Verb
    package.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # what help() reads
