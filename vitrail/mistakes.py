"""What is wrong with a command that the parser did not understand, in a sentence like those of all other errors."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail.config import Size, TrainConfig, options
from vitrail.errors import nearest

Verb = Callable[..., Any]


def explain(words: Sequence[str], verbs: Mapping[str, Verb]) -> str:
    """The first mistake in a command, and the way out."""
    if not words or words[0] not in verbs:
        first = f"There is no command '{words[0]}'.{nearest(words[0], verbs)}" if words else "There is nothing to do."
        return f"{first} The commands are {', '.join(verbs)}: `vitrail --help` tells what they do."
    command, verb = f"vitrail {words[0]}", verbs[words[0]]
    flags = _flags(verb)
    for word, following in zip_longest(words[1:], words[2:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if not re.match("--?[a-zA-Z]", flag):  # a value, maybe below zero
            continue
        if (known := flag.replace("_", "-")) not in flags:
            hint = nearest(flag, flags) or f" `{command} --help` lists all."
            return f"There is no option '{flag}' of `{command}`.{hint}"
        if wrong := _wrong(flags[known], value if equals else following):
            return f"'{flag}' must be {wrong}"
    places = [
        p.name.upper() if p.default is p.empty else f"[{p.name.upper()}]"
        for p in inspect.signature(verb).parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    usage = " ".join([command, *places, *(f"{flag} …" for flag in _needed(verb))])
    return f"There is a word too many or too few: it must be `{usage}`, and options. `{command} --help` lists them."


def _needed(verb: Verb) -> list[str]:
    """The flags that must be given."""
    hints = get_type_hints(verb)
    return [
        f"--{p.name}".replace("_", "-")
        for p in inspect.signature(verb).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and not dataclasses.is_dataclass(hints[p.name])
    ]


def _flags(verb: Verb) -> dict[str, Any]:
    """Every flag of a verb, with the type of its value."""
    found: dict[str, Any] = {}
    hints = get_type_hints(verb)
    for parameter in inspect.signature(verb).parameters.values():
        if dataclasses.is_dataclass(hints[parameter.name]):  # a group of the settings of a run
            for option in options(TrainConfig).values():
                if option.name != "data":
                    found[f"--{option.name}"] = option.type
                if option.alias:
                    found[option.alias] = option.type
        elif parameter.kind is parameter.KEYWORD_ONLY:
            found[f"--{parameter.name.rstrip('_')}"] = hints[parameter.name]
    return {flag.replace("_", "-"): kind for flag, kind in found.items()}


def _wrong(kind: Any, value: str) -> str:
    """How a sentence on a flag ends if it cannot have this value; else nothing."""
    if kind is bool:
        return ""
    if not value:
        return "followed by a value."
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        rule = "" if value in choices else f"one of {', '.join(choices)}"
        hint = nearest(value, choices)
    else:
        rule, hint = _number(kind, value), ""
    return rule and f"{rule}, but it is '{value}'.{hint}"


def _number(kind: Any, value: str) -> str:
    """What kind of number a value must be, if it must be one and is none."""
    if kind == Size:  # 224 or 192x256: text to the parser
        return ""
    inner = [kind, *get_args(kind)]
    inner += [part for union in get_args(kind) for part in get_args(union)]  # of several numbers, or None
    for number, rule in ((int, "a whole number"), (float, "a number")):
        if number in inner:
            try:
                number(value)
            except ValueError:
                return rule
    return ""
