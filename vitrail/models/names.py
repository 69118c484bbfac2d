"""Other spellings of the names of the ViT's relatives: those of papers, timm, Hugging Face and the files of authors."""

from __future__ import annotations

import re
from collections.abc import Callable

_OWNER = r"(?:[\w.-]+/)?"  # of a Hugging Face repository
_TAG = r"(?:[-_.](?:in1k|in21k|in22k|in22k_to_1k|in22ft1k|ms_|goog|augreg|orig|sw_|untrained|npz).*)?"
_SIDE = r"(?:[-_](?P<side>\d{3}))?"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(_OWNER + text + _SIDE + _TAG, re.IGNORECASE)


def _mixer(match: re.Match[str]) -> str:
    return f"mixer_{match['size']}{match['patch']}"


_PATTERNS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    # Mixer-B/16, mixer_b16_224.goog_in21k, imagenet1k_Mixer-B_16.npz
    (_pattern(r"(?:imagenet\d+k_)?mixer[-_](?P<size>[sblh])[-_/]?(?P<patch>\d\d)"), _mixer),
]


def find(name: str) -> tuple[str, int | None] | None:
    """The short name that a spelling stands for, and the side of the images if it tells one; None if it is unknown."""
    for pattern, short in _PATTERNS:
        if match := pattern.fullmatch(name):
            side = match.groupdict().get("side")
            return short(match).lower(), int(side) if side else None
    return None
