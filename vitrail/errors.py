"""`UserError`, the error that a user can fix, and helpers for its message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class UserError(Exception):
    """A mistake the user can fix: what, the rule, what was got, the way out. The command line exits with 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint " Did you mean 'X'?" for the known name that is almost `name`, or an empty string.

    Names that are only alike are not offered: --pretrained does not mean --streaming.
    """
    plain, by_plain = name.lower().lstrip("-"), {k.lower().lstrip("-"): k for k in known}
    swapped = [other for other in by_plain if sorted(other) == sorted(plain)]  # the same letters in another order
    match = get_close_matches(plain, by_plain, n=1, cutoff=0.8) or swapped
    return f" Did you mean '{by_plain[match[0]]}'?" if match else ""


def shortlist(names: Sequence[str], limit: int) -> str:
    """At most `limit` names, comma-separated: "a, b, c and 4 more"."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
