"""The command line, generated from the verbs: a parameter becomes an argument, its docstring the help.

Nothing heavy is imported before a verb runs, so that `vitrail --help` is instant.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from vitrail.config import Duration, Floats, Freeze, Names, Option, Size, TrainConfig, habits, options, type_hints
from vitrail.config.options import LARGEST
from vitrail.errors import UserError, nearest
from vitrail.progress import log_to_console
from vitrail.threads import settle_threads
from vitrail.verbs import VERBS, takes_part
from vitrail.version import VERSION
from vitrail.world import world

# Settings given as text that the configuration parses, with their placeholders in the help.
_TEXTS = ((Size, "H[xW]"), (Duration, "TIME"), (Names, "NAME[,…]"), (Freeze, "N|all"))
_METAVARS = {int: "INT", float: "FLOAT", bool: ""}


@dataclass(frozen=True)
class Argument:
    """One argument of a command."""

    name: str  # of the parameter
    kind: Any  # type of a value: bool, int, float, str or a Literal
    metavar: str
    help: str
    default: Any = None  # shown in the help unless None
    many: bool = False  # takes one or more values
    required: bool = False
    positional: bool = False
    alias: str = ""
    group: str = ""  # section of the help
    values: tuple[str, ...] = ()  # that may follow a flag
    bare: bool = False  # may be given without a value, which means its default

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def names(self) -> list[str]:
        """The spellings of an option; a positional argument has none."""
        if self.positional:
            return []
        return [self.flag, self.alias] if self.alias.startswith("--") else [*filter(None, [self.alias]), self.flag]

    @property
    def usage(self) -> str:
        """The argument in the help: `-b, --batch-size INT`, `IMAGES…`, `[DATA]`."""
        value = f"[{self.metavar}]" if self.bare else self.metavar + "…" * self.many
        value = f"[{'|'.join(self.values)}]" if self.values else value
        if self.positional:
            return value if self.required else f"[{value}]"
        return f"{', '.join(self.names)} {value}".rstrip()

    @property
    def text(self) -> str:
        """The help with the default."""
        if self.default is None or self.default is False or self.default in ("", ()) or "default:" in self.help:
            return self.help
        inner = self.help[:-1] + "; " if self.help.endswith(")") else self.help + " ("
        return f"{inner}{_shown(self.default)})"


_NONE = Argument("", str, "", "")


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "set by the recipe"
    values = default if isinstance(default, tuple) else (default,)
    return "default: " + " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


# From a verb to its arguments


def _verb(name: str) -> Callable[..., Any]:
    """The function of a verb."""
    return getattr(import_module(f"vitrail.verbs.{name}"), name)


def arguments(verb: str) -> list[Argument]:
    """Every argument of a verb's command, from the signatures and docstrings of the verb and its `show`."""
    found: dict[str, Argument] = {}
    for function in (_verb(verb), import_module(f"vitrail.verbs.{verb}").show):
        documented = _documented(function)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                settings = {name: option for name, option in options().items() if _applies(option, verb)}
                found = {name: _setting(option) for name, option in settings.items() if name not in found} | found
            elif parameter.name not in found and parameter.name in documented:  # not the result to show
                found[parameter.name] = _argument(parameter, function, *documented[parameter.name])
    return list(found.values())


def _applies(option: Option, verb: str) -> bool:
    """Whether a verb has an option of runs; `recipes` and `plan` have all of them."""
    return option.only in ("", verb) or (verb in ("recipes", "plan") and option.only != "python")


def _documented(function: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """The placeholder, if any, and the help of each parameter, from a Google-style docstring."""
    _, _, args = (inspect.getdoc(function) or "").partition("Args:\n")
    args = re.sub(r"\n {8,}", " ", args)  # wrapped lines
    return {name: (metavar, text) for name, metavar, text in re.findall(r"^ +(\w+)(?: \((.*?)\))?: (.*)$", args, re.M)}


def _argument(parameter: inspect.Parameter, function: Callable[..., Any], metavar: str, text: str) -> Argument:
    kind = _first_type(parameter.annotation, function)
    many = get_origin(kind) is not None and get_origin(kind) is not Literal
    kind = get_args(kind)[0] if many else kind
    kind = kind if kind in (bool, int, float) or get_origin(kind) is Literal else str
    positional = parameter.kind is not parameter.KEYWORD_ONLY
    required = parameter.default is parameter.empty
    same = options().get(parameter.name)  # also a setting of runs: use the same alias
    return Argument(
        parameter.name,
        kind,
        metavar or (parameter.name.upper() if positional else _metavar(kind)),
        text,
        None if required else parameter.default,
        many,
        required,
        positional,
        "" if same is None or positional else same.alias,
        values=_values(parameter.annotation) if kind is bool else (),
    )


def _first_type(annotation: str, function: Any) -> Any:
    """The first type of a union; the others may need imports that only type checkers do."""
    node = ast.parse(annotation, mode="eval").body
    while isinstance(node, ast.BinOp):
        node = node.left
    return eval(ast.unparse(node), function.__globals__)


def _values(annotation: str) -> tuple[str, ...]:
    """The values that may follow a flag: of `bool | Literal["auto"]`, auto."""
    return tuple(re.findall(r"['\"](\w+)['\"]", annotation))


def _setting(option: Option) -> Argument:
    """The argument of a setting of `TrainConfig`."""
    kind = option.type
    metavar = next((metavar for text, metavar in _TEXTS if kind in (text, text | None)), "")
    if metavar:
        kind = str
    elif type(None) in get_args(kind):
        kind = get_args(kind)[0]
    many = kind == Floats
    kind = float if many else kind
    about = (metavar or _metavar(kind), option.help, option.default, many)
    group = _summary(type_hints(TrainConfig)[option.group]).rstrip(".") if option.group else ""
    return Argument(option.name, kind, *about, bare=option.bare, alias=option.alias, group=group)


def _metavar(kind: Any) -> str:
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else _METAVARS.get(kind, "TEXT")


# Help


def help_text(verb: str | None = None) -> str:
    """The help of a command, or the list of all."""
    if verb is None:
        rows = [(name, _summary(_verb(name))) for name in VERBS]
        more = [("-h, --help", "show this help; `vitrail COMMAND --help` for a command")]
        more += [("--version", "print the version"), ("--debug", "show the traceback of an error")]
        title = "usage: vitrail COMMAND [ARGUMENTS] [OPTIONS]\n\nThe Vision Transformer as real software."
        return "\n\n".join([title, _section("commands", rows), _section("options", more)])
    known = arguments(verb)
    parts = [f"usage: {_usage(verb, known)}"]
    about, _, _ = (inspect.getdoc(_verb(verb)) or "").partition("\nArgs:")
    parts += [textwrap.fill(paragraph, _width()) for paragraph in about.strip().split("\n\n")]
    groups: dict[str, list[tuple[str, str]]] = {"arguments": [], "options": []}
    for argument in known:
        title = "arguments" if argument.positional else argument.group or "options"
        groups.setdefault(title, []).append((argument.usage, argument.text))
    groups["options"].append(("-h, --help", "show this help"))
    return "\n\n".join(parts + [_section(title, rows) for title, rows in groups.items() if rows])


def _summary(documented: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _usage(verb: str, known: Sequence[Argument]) -> str:
    needed = [a.usage if a.positional else f"{a.flag} {a.metavar}" for a in known if a.positional or a.required]
    return " ".join(["vitrail", verb, *needed, "[OPTIONS]"])


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A title and a two-column table; a long left cell gets its own line."""
    column = 26
    lines = [f"{title}:"]
    for left, right in rows:
        first, *others = textwrap.wrap(right, max(_width() - column, 20), break_on_hyphens=False)
        if len(left) + 4 <= column:
            lines.append(f"  {left:<{column - 2}}{first}")
        else:
            lines += [f"  {left}", " " * column + first]
        lines += [" " * column + line for line in others]
    return "\n".join(lines)


# Parsing


def parse(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """The arguments by parameter name; raises UserError if they are invalid."""
    known = arguments(verb)
    flags = {name: argument for argument in known for name in argument.names}
    words = _with_values([_with_dashes(word) for word in words], flags)
    _check_flags(verb, words, flags, [argument.name.upper() for argument in known if argument.positional])
    words = [word for word, value in zip(words, [*words[1:], ""], strict=False) if not _is_bare(flags.get(word), value)]
    parser = _Parser(usage=_usage(verb, known), add_help=False, allow_abbrev=False, exit_on_error=False)
    for argument in known:
        _add(parser, argument)
    try:
        return vars(parser.parse_intermixed_args(words))
    except argparse.ArgumentError as error:
        flag = (error.argument_name or "").split("/")[0]
        if flag not in flags:
            parser.error(str(error))
        rule = "takes no value" if flags[flag].kind is bool else "must be followed by a value"
        raise UserError(f"'{flag}' {rule}.") from None


def _check_flags(verb: str, words: Sequence[str], flags: Mapping[str, Argument], positional: Collection[str]) -> None:
    """Raises UserError for options that the verb does not have: those of other tools, misspelled ones, `epochs=10`."""
    given = [word.partition("=")[0] for word in words]
    unknown = [f for f in given if re.match("--?[a-zA-Z]", f) and f not in flags and f[:2] not in flags]
    if unknown:
        hint = nearest(unknown[0], flags) or f" `vitrail {verb} --help` lists them all."
        answer = habits.wrong_flags(verb, words, unknown, {*flags, *positional})
        raise UserError(answer or f"`vitrail {verb}` has no option '{unknown[0]}'.{hint}")
    for before, word in zip(["", *words], words, strict=False):
        if word.partition("=")[0] in flags and word.endswith("=--"):  # argparse would drop the value
            raise UserError(f"'{word[:-3]}' must be followed by a value, but it is '--'.")
        takes_value = before in flags and flags[before].kind is not bool
        answer = None if takes_value else habits.assignment(verb, word, {*flags, *positional})
        if answer is not None and not Path(word).exists():
            raise UserError(answer)


def _is_bare(argument: Argument | None, value: str) -> bool:
    """Whether an option is given without the value that it may have; then its default applies."""
    if argument is None or not argument.bare:
        return False
    choices = get_args(argument.kind)
    return value not in choices and not nearest(value, choices)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if missing := re.search(r"required: .*?(--[\w-]+)", message):
            raise UserError(f"{missing[1]} is required. Usage: {self.usage}")
        raise UserError(f"Wrong number of arguments. Usage: {self.usage}")


def _with_dashes(word: str) -> str:
    """A word with dashes for underscores in its flag."""
    flag, equals, value = word.partition("=")
    return (flag.replace("_", "-") if re.match("--[a-zA-Z]", flag) else flag) + equals + value


def _with_values(words: Sequence[str], flags: Mapping[str, Argument]) -> list[str]:
    """The words with the optional value of a flag joined to it, `--int8=auto`, and `--int8=` without one."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].endswith("=") and word in flags.get(joined[-1][:-1], _NONE).values:
            joined[-1] += word
        else:
            joined.append(f"{word}=" if flags.get(word, _NONE).values else word)
    return joined


def _add(parser: argparse.ArgumentParser, argument: Argument) -> None:
    read = partial(_read, argument)
    if argument.positional:
        nargs = {(False, False): "?", (True, False): "*", (True, True): "+"}.get((argument.many, argument.required))
        parser.add_argument(argument.name, nargs=nargs, type=read, default=argparse.SUPPRESS)
        return
    if argument.kind is bool and not argument.values:
        parser.add_argument(*argument.names, dest=argument.name, action="store_true", default=argparse.SUPPRESS)
        return
    parser.add_argument(
        *argument.names,
        dest=argument.name,
        nargs="+" if argument.many else None,
        type=read,
        required=argument.required,
        default=argparse.SUPPRESS,
    )


def _read(argument: Argument, text: str) -> Any:
    """Converts the text of an argument to its type."""
    kind, hint = argument.kind, ""
    if argument.values:
        if text in ("", *argument.values):
            return text or True
        kind = Literal[argument.values]
    if get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
        rule, hint = f"one of {', '.join(get_args(kind))}", nearest(text, get_args(kind))
    else:
        try:
            if kind is not int or abs(int(text)) < LARGEST:
                return kind(text)
            rule = "a whole number below 2^63"
        except ValueError:
            rule = "a whole number" if kind is int else "a number"
    raise UserError(f"'{argument.flag}' must be {rule}, but it is '{text}'.{hint}")


# Running


def run(words: Sequence[str]) -> int:
    """Runs a command and returns its exit code."""
    if words in (["--version"], ["-h"], ["--help"]):
        print(f"vitrail {VERSION}" if words == ["--version"] else help_text())
        return 0
    if not words or words[0] not in VERBS:
        first = f"There is no command '{words[0]}'.{nearest(words[0], VERBS)}" if words else "No command was given."
        if words and (answer := habits.command(words[0])):
            raise UserError(f"There is no command '{words[0]}'. {answer}")
        raise UserError(f"{first} The commands are {', '.join(VERBS)}; see `vitrail --help`.")
    verb, *rest = words
    if "--help" in rest or "-h" in rest:
        print(help_text(verb))
        return 0
    given = parse(verb, rest)
    log_to_console()
    module = import_module(f"vitrail.verbs.{verb}")
    shown = {p.name for p in inspect.signature(module.show).parameters.values() if p.kind is p.KEYWORD_ONLY}
    only_shown = shown - {*inspect.signature(_verb(verb)).parameters}
    result = _verb(verb)(**{name: value for name, value in given.items() if name not in only_shown})
    return module.show(result, **{name: value for name, value in given.items() if name in shown})


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Exits with 0, 1 for partial failure or a fault, 2 for user errors, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    settle_threads()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what is meant
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be undecodable
    try:
        try:
            code = run(words) if takes_part(words) else 0
        finally:
            sys.stdout.flush()  # here, where a closed pipe is handled
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        sys.exit(world().report(error))
