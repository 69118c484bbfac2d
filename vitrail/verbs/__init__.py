"""The verbs: one file each, with a function of its name that Python and the command line share.

A verb's signature defines the arguments of its command, and its docstring their help; the command line reads the first
type of a union. `show` prints the result and returns the exit code; its keywords are command-line options, and it also
receives the verb's parameters of the same name. Heavy imports stay inside the functions, so that `--help` is instant.
"""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.world import is_first

VERBS = (
    "models",
    "check",
    "shard",
    "train",
    "pretrain",
    "evaluate",
    "predict",
    "embed",
    "search",
    "explain",
    "report",
    "export",
    "serve",
    "recipes",
    "plan",
    "study",
    "convert",
)
TOGETHER = ("train", "pretrain", "evaluate", "predict", "embed")  # whose work the processes of torchrun share


def takes_part(words: Sequence[str]) -> bool:
    """Whether this process runs a command: all do if they share the work, otherwise the first."""
    return is_first() or (words[:1] != [] and words[0] in TOGETHER and not {"-h", "--help"} & {*words})
