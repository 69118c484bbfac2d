"""Byte-pair encoding as in CLIP: words are split into bytes, and frequent neighbours are merged.

A merge is written as in CLIP's file, "th e</w>": two pieces of a word, in GPT-2's printable bytes; `</w>` ends a word.
"""

from __future__ import annotations

import gzip
import html
import itertools
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files

END = "</w>"
_CLIP_FILE, _CLIP_MERGES = "bpe_simple_vocab_16e6.txt.gz", 48_894
_QUOTES = str.maketrans("‘’‚‛“”„‟", "''''\"\"\"\"")
_SUFFIXES = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def clean(text: str) -> str:
    """Lower case, one space between words, straight quotes, HTML entities as characters.

    CLIP also repairs text that was decoded wrongly, with ftfy; that is left out.
    """
    text = html.unescape(html.unescape(text.encode(errors="replace").decode()))  # half characters become "?"
    return " ".join(unicodedata.normalize("NFC", text).translate(_QUOTES).lower().split())


def words(text: str) -> Iterator[str]:
    """Splits clean text as CLIP does: runs of letters, single digits, runs of other characters, English suffixes."""
    at = 0
    while at < len(text):
        if suffix := next((s for s in _SUFFIXES if text.startswith(s, at)), ""):
            yield suffix
            at += len(suffix)
            continue
        kind, start = _kind(text[at]), at
        at += 1
        if kind == " ":
            continue
        while at < len(text) and kind != "N" and _kind(text[at]) == kind:
            at += 1
        yield text[start:at]


def _kind(character: str) -> str:
    """L for letters, N for numbers, a space for white space, and P for everything else."""
    if character.isspace():
        return " "
    first = unicodedata.category(character)[0]
    return first if first in "LN" else "P"


@cache
def byte_names() -> tuple[str, ...]:
    """GPT-2's printable character of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@cache
def byte_order() -> tuple[str, ...]:
    """The printable characters in the order of CLIP's ids: printable bytes first."""
    names = byte_names()
    return (*sorted(name for byte, name in enumerate(names) if name == chr(byte)), *sorted(_rest(names)))


def _rest(names: Sequence[str]) -> list[str]:
    return [name for byte, name in enumerate(names) if name != chr(byte)]


def pieces(word: str) -> tuple[str, ...]:
    """The bytes of a word, the last one marked as the end."""
    names = [byte_names()[byte] for byte in word.encode()]
    return (*names[:-1], names[-1] + END)


def merge(parts: tuple[str, ...], first: str, second: str) -> tuple[str, ...]:
    """The parts of a word, with each occurrence of a pair merged, from left to right."""
    merged, i = [], 0
    while i < len(parts):
        if i + 1 < len(parts) and parts[i] == first and parts[i + 1] == second:
            merged.append(first + second)
            i += 2
        else:
            merged.append(parts[i])
            i += 1
    return tuple(merged)


def learn(texts: Iterable[str], count: int) -> tuple[str, ...]:
    """The `count` most useful merges of texts, in order, or fewer if no pair occurs twice.

    Each time the most frequent pair is merged; the first in the alphabet among equals, so the result is unique.
    """
    counts = Counter(word for text in texts for word in words(clean(text)))
    parts = {word: pieces(word) for word in counts}
    pairs: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], set[str]] = defaultdict(set)
    for word, its in parts.items():
        for pair in itertools.pairwise(its):
            pairs[pair] += counts[word]
            where[pair].add(word)
    merges: list[str] = []
    while len(merges) < count and pairs:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] < 2:
            break
        merges.append(" ".join(best))
        for word in sorted(where.pop(best)):
            for pair in zip(parts[word], parts[word][1:], strict=False):
                pairs[pair] -= counts[word]
                if not pairs[pair]:
                    del pairs[pair]
            parts[word] = merge(parts[word], *best)
            for pair in zip(parts[word], parts[word][1:], strict=False):
                pairs[pair] += counts[word]
                where[pair].add(word)
    return tuple(merges)


@cache
def clip_merges() -> tuple[str, ...]:
    """The merges of CLIP's vocabulary: lines 2 to 48,895 of its file."""
    content = gzip.decompress((files("vitrail.tokenizers") / _CLIP_FILE).read_bytes()).decode("utf-8")
    return tuple(content.split("\n")[1 : 1 + _CLIP_MERGES])
