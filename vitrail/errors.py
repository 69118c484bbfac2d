"""`UserError`, the error that a user can fix, and helpers for its message."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}  # whose modules have other names
_LONGEST = 200  # characters of a value or of another program's message in an error
_MESSAGE = 2000  # characters of a message
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, _LONGEST, _LONGEST, _LONGEST


class UserError(Exception):
    """A mistake the user can fix: what, the rule, what was got, the way out. The command line exits with 2.

    Names and values of files may be of any length, so the middle of a long message is left out.
    """

    def __init__(self, message: str = ""):
        half = _MESSAGE // 2
        super().__init__(message if len(message) <= _MESSAGE else f"{message[:half]} … {message[-half:]}")


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


def shown(value: object) -> str:
    """A value of a file or a command as an error shows it: never longer than a few lines, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no integers of more than 4300 digits
        return f"a {type(value).__name__} that is too long to print"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened, or its type if it has none."""
    try:
        text = str(error).strip()
    except ValueError:  # it contains an integer of more than 4300 digits
        text = ""
    line = (text or type(error).__name__).splitlines()[0].rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def explained(error: BaseException) -> tuple[str, int]:
    """An error in a sentence, and the exit code of the command line: 2 if the user can fix it, 1 for a fault."""
    line = first_line(error)
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, MemoryError) or "allocate memory" in line or "out of memory" in line:  # torch has its own
        return f"There is not enough memory: {line}. Lower --batch-size or the size of the images.", 2
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("vitrail"):
        package = error.name.partition(".")[0]
        return f"This needs {package}, which is not installed: pip install {_PACKAGES.get(package, package)}", 2
    if isinstance(error, OSError):
        return f"{error.filename or 'A file'} cannot be used: {error.strerror or line}.", 2
    return f"A fault of vitrail: {type(error).__name__}: {line}. --debug shows it; please report it.", 1
