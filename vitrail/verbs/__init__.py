"""The verbs: one file each, with a function of its name that Python and the command line share.

A verb's signature is its command's arguments, and its docstring is their help; the first type of a union is the one
that the command line reads. `show` prints the result and returns the exit code: its keywords are options of the command
line only, unless the verb has a parameter of the same name, whose value it then gets too. Heavy imports stay inside the
functions, so that `--help` answers at once.
"""

from __future__ import annotations

VERBS = (
    "models",
    "check",
    "train",
    "evaluate",
    "predict",
    "embed",
    "explain",
    "report",
    "export",
    "recipes",
    "convert",
)
