"""The one error that is the user's to fix, and the nearest-name hint that goes into it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can change: what, the rule, what was got, the way out. The command line exits 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known spelling closest to `name`, or nothing."""
    by_lower = {k.lower(): k for k in known}
    match = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean '{by_lower[match[0]]}'?" if match else ""


def some(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
