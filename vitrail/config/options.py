"""Settings by flat name: their types, conversion from text, overriding, and the YAML files of runs."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from vitrail.config.habits import keyword
from vitrail.config.settings import LARGEST_SIDE, Duration, Floats, Freeze, Ints, Names, Size, TrainConfig, Verb
from vitrail.errors import UserError, nearest, shown
from vitrail.files import read_text, reading

C = TypeVar("C")

LARGEST = 2**63  # whole numbers are below it, as torch and NumPy need
_LONGEST = 2**17  # bytes of a YAML file; a run's has some 3,000


@dataclass(frozen=True)
class Option:
    """One setting of a configuration, with its flat name, whichever group it is in."""

    name: str
    group: str
    type: Any
    default: Any
    help: str
    alias: str
    only: Verb  # the only verb that has it, if there is one
    bare: bool  # its flag may be given without a value, which means the default


_HINTS: dict[type[Any], dict[str, Any]] = {}
_OPTIONS: dict[type[Any], Mapping[str, Option]] = {}


def type_hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a configuration's fields, evaluated once: it is slow, and every setting needs them."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def options(cls: type[Any] = TrainConfig) -> Mapping[str, Option]:
    """All settings of a configuration class and its groups, by flat name."""
    if cls not in _OPTIONS:
        _OPTIONS[cls] = dict(_options(cls))
    return _OPTIONS[cls]


def _options(cls: type[Any]) -> Iterator[tuple[str, Option]]:
    hints = type_hints(cls)
    for f in dataclasses.fields(cls):
        if is_dataclass(hints[f.name]):
            inner = options(hints[f.name])
            yield from ((name, dataclasses.replace(o, group=f.name)) for name, o in inner.items())
        else:
            about = {key: f.metadata.get(key, "") for key in ("help", "alias", "only")}
            bare = bool(f.metadata.get("bare"))
            yield f.name, Option(f.name, "", hints[f.name], f.default, **about, bare=bare)


def coerce(cls: type[Any], name: str, value: object) -> Any:
    """Converts a value to the type of the setting with this flat name; raises UserError with the rule."""
    known = options(cls)
    unknown_setting([name], known)
    return _coerce(name, known[name].type, value)


def override(config: C, changes: dict[str, object]) -> C:
    """A copy of a configuration with settings changed by flat name."""
    known = options(type(config))
    groups: dict[str, dict[str, object]] = {}
    for name, value in changes.items():
        value = coerce(type(config), name, value)
        groups.setdefault(known[name].group, {})[name] = value
    top: dict[str, Any] = groups.pop("", {})
    for group, values in groups.items():
        top[group] = dataclasses.replace(getattr(config, group), **values)
    return dataclasses.replace(config, **top)  # type: ignore[type-var]  # configurations are dataclasses


def unknown_setting(given: Any, known: Any) -> None:
    """Raises UserError for the first name in `given` that is not `known`."""
    for name in given:
        if name not in known:
            if not isinstance(name, str):
                raise UserError(f"The name of a setting must be text, but one is {shown(name)}.")
            hint = keyword("train", name, known) or nearest(name, known)
            raise UserError(f"There is no setting '{name[:100]}'.{hint}")


def flat(config: Any) -> dict[str, Any]:
    """All settings of a configuration by flat name."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        found |= flat(value) if is_dataclass(value) else {f.name: value}
    return found


def to_plain(config: Any) -> dict[str, Any]:
    """The inverse of `from_plain`: dictionaries, lists and plain values; sizes are `[height, width]`."""
    return dataclasses.asdict(config, dict_factory=lambda items: {k: _plain(v) for k, v in items})


def to_yaml(config: Any, comment: str = "") -> str:
    """A configuration as the text of its `config.yaml`, with a comment in front."""
    head = f"# {comment}\n" if comment else ""
    return head + yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def save_yaml(config: Any, path: Path, comment: str = "") -> None:
    """Writes a configuration as YAML."""
    path.write_text(to_yaml(config, comment), encoding="utf-8")


def load_yaml(cls: type[C], path: Path) -> C:
    """Reads what `save_yaml` wrote; raises UserError for unknown, missing or ill-typed settings."""
    document = modern(read_yaml(path))
    try:
        return from_plain(cls, document)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Plain values only. An alias could make a file of some hundred bytes expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*), which settings may not have")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> object:
    """The plain values in a YAML file; raises UserError for anything else."""
    with reading(path, "a YAML file"):
        return deepcopy(_parsed(read_text(path, _LONGEST)))


@lru_cache(maxsize=8)
def _parsed(text: str) -> object:
    """The values in a YAML text. A run's is read several times, and the parser is slow."""
    return yaml.load(text, _Loader)


def modern(document: object) -> object:
    """The settings of a file, which an earlier version may have written.

    There `batch_size` counted the images of a forward pass, of which an optimiser step had `grad_accum_steps`.
    """
    if not isinstance(document, dict):
        return document
    settings = {name: modern(value) if isinstance(value, dict) else value for name, value in document.items()}
    images, passes = settings.get("batch_size"), settings.get("grad_accum_steps")
    if type(images) is int and type(passes) is int and "grad_accum" not in settings:
        del settings["grad_accum_steps"]
        settings |= {"batch_size": images * passes, "grad_accum": passes}
    return settings


def from_plain(cls: type[C], document: object, where: str = "") -> C:
    """A validated configuration from dictionaries, lists and plain values, as in YAML and JSON."""
    if not isinstance(document, dict):
        raise UserError(f"{where or 'The file'} must contain settings, but it contains {shown(document)}.")
    hints = type_hints(cls)
    unknown_setting(document, hints)
    values = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # configurations are dataclasses
        if f.name in document:
            hint, value, group = hints[f.name], document[f.name], is_dataclass(hints[f.name])
            values[f.name] = from_plain(hint, value, f.name) if group else _coerce(f.name, hint, value)
        elif f.default is f.default_factory is dataclasses.MISSING:
            raise UserError(f"The setting '{f.name}' is missing.")
    return cls(**values)


def _plain(value: object) -> object:
    if isinstance(value, Duration):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _coerce(name: str, hint: Any, value: object) -> Any:
    for number in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(number, int) and abs(number) >= LARGEST:
            raise UserError(f"'{name}' must be below 2^63, but it is {shown(number)}.")
    if hint == Freeze | None:
        return None if value is None else _coerce_freeze(name, value)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
        origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        if value in choices:
            return value
        if str(value).lower() in choices:  # AdamW, as others write it
            return str(value).lower()
        raise UserError(
            f"'{name}' must be one of {', '.join(choices)}, but it is {shown(value)}.{nearest(str(value), choices)}"
        )
    if hint == Size:
        return _coerce_size(name, value)
    if hint is Duration:
        return _coerce_duration(name, value)
    if hint == Names:
        return coerce_names(name, value)
    if hint in (Floats, Ints):
        return _coerce_numbers(name, value, get_args(hint)[0])
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, PathLike):
        return str(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    raise UserError(f"'{name}' must be {kind}, but it is {shown(value)}.")


def _coerce_size(name: str, value: object) -> Size:
    """A size: 224, (192, 256), "224" or "192x256"."""
    try:
        parts = value.lower().replace(",", "x").split("x") if isinstance(value, str) else value
        sides = [int(side) for side in parts] if isinstance(parts, (list, tuple)) else [int(parts)]  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"'{name}' must be a size like 224 or 192x256, but it is {shown(value)}.")
    if max(sides) > LARGEST_SIDE:
        raise UserError(f"'{name}' must be at most {LARGEST_SIDE}x{LARGEST_SIDE}, but it is {shown(value)}.")
    return sides[0], sides[-1]


def _coerce_duration(name: str, value: object) -> Duration:
    """A duration: 90s, 10m, 1h30m, 1.5h or a `Duration`."""
    if isinstance(value, Duration):
        return value
    parts = (
        re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", value.strip().lower())
        if isinstance(value, str)
        else None
    )
    try:
        hours, minutes, seconds = (float(part or 0) for part in parts.groups()) if parts else (0.0, 0.0, 0.0)
    except ValueError:  # two decimal points
        hours = minutes = seconds = 0.0
    total = 3600 * hours + 60 * minutes + seconds
    if total < 1 or math.isinf(total):
        raise UserError(f"'{name}' must be at least a second, as in 90s, 10m or 1h30m, but it is {shown(value)}.")
    return Duration(total)


def _coerce_freeze(name: str, value: object) -> Freeze:
    """What to freeze: 3, "3", "all" or "image"."""
    if value == "all" or value == "image":
        return value
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UserError(f"'{name}' must be all, image, or a number of blocks from 0, but it is {shown(value)}.")
    return int(text)


def coerce_names(name: str, value: object) -> Names:
    """Names: "x", "x,y" or ["x", "y"]."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise UserError(f"'{name}' must be a name, or several as in x,y, but it is {shown(value)}.")
    return tuple(n.strip() for n in names)


def _coerce_numbers(name: str, value: object, kind: type[float]) -> tuple[float, ...]:
    """A tuple of numbers, from one number or a list."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    whole = kind is int
    if any(type(v) not in ((int,) if whole else (int, float)) for v in values) or not (values or whole):
        raise UserError(f"'{name}' must be a list of {'whole ' if whole else ''}numbers, but it is {shown(value)}.")
    return tuple(map(kind, values))
