"""Answers for people who type what another tool calls it; the names are in `synonyms.py`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from vitrail.config.synonyms import FLAGS, MODEL_OPTIONS, MODELS, NAMES, TIMM_TAGS, VERBS, Rows

_LIKE = {"pretrain": "train", "recipes": "train", "embed": "predict", "explain": "predict"}  # verbs with similar flags


def find_flag(verb: str, flag: str) -> str | None:
    """What a flag of another tool, such as --learning-rate, is here: a flag, an argument or a sentence."""
    return _find(FLAGS.get(_LIKE.get(verb, verb), ()), flag.lstrip("-"))


def wrong_flags(verb: str, words: Sequence[str], unknown: Sequence[str], known: Collection[str]) -> str | None:
    """The message for unknown flags that other tools have, or None if the first of them is new to all of them.

    `known` are the flags and arguments of the verb. If all are only called otherwise, the message has the command.
    """
    meant = {flag: find_flag(verb, flag) for flag in unknown}
    first = meant[unknown[0]]
    if first is None:
        return None
    if _is_sentence(first):
        return f"`vitrail {verb}` has no option '{unknown[0]}'. {first}"
    named = {flag: here for flag, here in meant.items() if here is not None and not _is_sentence(here)}
    renamed = {flag: here for flag, here in named.items() if here.split()[0] in known}
    if unknown[0] not in renamed:
        return None
    says = [
        f"{flag} is called {here} here" if here.startswith("-") else f"{here} is given without {flag} here"
        for flag, here in renamed.items()
    ]
    if len(renamed) < len(set(unknown)):  # others are wrong, too
        return f"{'; '.join(says)}."
    return f"{'; '.join(says)}. Use `{_command(verb, words, renamed)}`."


def _command(verb: str, words: Sequence[str], renamed: Mapping[str, str]) -> str:
    """The command with the names of vitrail."""
    typed: list[str] = []
    run: list[str] = []  # comes first
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        here = renamed.get(flag, word)
        if here == "RUN":
            run = [value if equals else next(rest, "")]
        elif here.isupper() and flag in renamed:
            typed += [value] if equals else []
        else:
            typed += [*(here.split() if flag in renamed else [word])]
            typed += [value] if flag in renamed and equals and " " not in here else []
    return shlex.join(["vitrail", verb, *run, *typed])


def assignment(verb: str, word: str, known: Collection[str]) -> str | None:
    """The message for `epochs=10`, as in ultralytics, or None if the word is not a setting."""
    match = re.fullmatch(r"([A-Za-z]\w*)=(.*)", word)
    if match is None:
        return None
    flag = f"--{match[1].replace('_', '-')}"
    here = flag if flag in known else find_flag(verb, flag)
    if here is None:
        return None
    if here.isupper():
        return f"{here} is given without a name here: `{match[2]}` instead of `{word}`."
    if _is_sentence(here):
        return f"`vitrail {verb}` has no option '{match[1]}'. {here}"
    typed = here if " " in here else f"{here} {match[2]}"
    return f"Options are flags here: `{typed}` instead of `{word}`."


def keyword(verb: str, name: str, known: Collection[str]) -> str:
    """The hint for an unknown keyword of a verb's Python function: " It is called 'lr' here.", or an empty string."""
    here = find_flag(verb, name.replace("_", "-"))
    if here is None:
        return ""
    if here.isupper():
        return f" Give it as `{here.lower()}`." if here.lower() in known else ""
    if _is_sentence(here):
        return f" {here}"
    flag, _, value = here.partition(" ")
    plain = flag[2:].replace("-", "_")
    if plain not in known:
        return ""
    return f" It is called '{plain}' here" + (f": {plain}={value!r}." if value else ".")


def command(verb: str) -> str | None:
    """The sentence for a command of another tool."""
    here = _find(VERBS, verb)
    if here is None:
        return None
    return here if here.startswith("vitrail ") else f"Use `vitrail {here.replace(' or vitrail', '` or `vitrail')}`."


def name(name: str) -> str | None:
    """What a name imported from another tool is here."""
    return _find(NAMES, name)


def model_option(name: str) -> str:
    """The hint for a keyword of other tools' models, or an empty string."""
    here = _find(MODEL_OPTIONS, name)
    if here is None:
        return ""
    return f" {here}" if " " in here else f" It is called '{here}' here."


def model(name: str) -> str | None:
    """The sentence for a model of another tool that vitrail does not have."""
    plain = name.rpartition("/")[2].lower().replace("-", "_")
    return next((says for _, start, says in MODELS if plain.startswith(start)), None)


def timm_tag(name: str) -> str | None:
    """The tag of timm's own choice of weights for a model, or None if it has none or is not known."""
    return next((tag for pattern, tag in TIMM_TAGS if re.fullmatch(pattern, name)), None)


def _is_sentence(here: str) -> bool:
    """Whether an answer says what vitrail does instead; otherwise it is vitrail's own name."""
    return here.endswith(".")


def _find(rows: Rows, name: str) -> str | None:
    wanted = name.lower().replace("_", "-")
    return next((here for _, theirs, here in rows if theirs.lower().replace("_", "-") == wanted), None)
