"""Captions as targets: the UTF-8 bytes of each caption, (N, C, L) uint8, padded with zeros.

N images have up to C captions each. As an array of numbers they are shuffled, cached and hashed like all targets.
Before that, while data is read, the captions of an image are one text, a caption on each line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError, shown
from vitrail.tasks.scores import Targets
from vitrail.tokenizers.bpe import clean

LONGEST = 1000  # bytes of a caption that are kept; a text tower reads fewer
MOST = 1000  # captions of an image
_MAX_RATIO, _ALWAYS_ALLOWED = 64, 2**28  # of places in the array to captions, and bytes that it always may have

# Columns with captions, in order of preference.
COLUMNS = ("caption", "captions", "text", "description", "sentence", "sentences", "prompt", "alt_text")
_MANY, _FEW = 0.05, 10  # share and number of images from which one caption describes many
_WORDS, _DIFFERENT = 4, 0.5  # words of a caption on average, and the share of captions that differ


def one_line(text: str) -> str:
    """A caption with single spaces."""
    return " ".join(text.split())


def joined(captions: Sequence[str]) -> str:
    """The captions of one image as one text, each once."""
    return "\n".join(dict.fromkeys(filter(None, map(one_line, captions))))


def pack(texts: Sequence[str]) -> NDArray[np.uint8]:
    """The captions of each image, one per line, as an array.

    Captions that are the same to a tokenizer, such as "A cat" and "a cat", get the spelling of the first.
    """
    known: dict[str, bytes] = {}

    def packed_caption(caption: str) -> bytes:
        return known.setdefault(clean(caption), _cut(caption))

    rows = [list(dict.fromkeys(map(packed_caption, text.split("\n")))) for text in texts]
    most = max((len(row) for row in rows), default=1)
    longest = max((len(caption) for row in rows for caption in row), default=1)
    _check_room(rows, most, longest)
    packed = np.zeros((len(rows), most, max(longest, 1)), np.uint8)
    for i, row in enumerate(rows):
        for k, caption in enumerate(row):
            packed[i, k, : len(caption)] = np.frombuffer(caption, np.uint8)
    return packed


def _check_room(rows: Sequence[Sequence[bytes]], most: int, longest: int) -> None:
    """Raises UserError if one image has so many captions that the array would be nearly all padding."""
    places, captions = len(rows) * most, sum(map(len, rows))
    if most > MOST or (places > _MAX_RATIO * captions and places * longest > _ALWAYS_ALLOWED):
        first = max(rows, key=len)[0].decode(errors="replace")
        raise UserError(
            f"The image of {shown(first)} has {most:,} captions, and every image takes the memory of as many. At most "
            f"{MOST:,} are allowed, and fewer in large data sets. Remove some."
        )


def unpack(target: Targets) -> tuple[str, ...]:
    """The captions of one image, from a row of the array."""
    rows = (bytes(np.asarray(row, np.uint8)).rstrip(b"\0") for row in target)
    return tuple(row.decode(errors="ignore") for row in rows if row)


def _cut(caption: str) -> bytes:
    content = caption.replace("\0", " ").encode(errors="replace")[:LONGEST]  # JSON may have half a character
    return content.decode(errors="ignore").encode()  # no half of a character at the end


def are_named(column: str | None) -> bool:
    """Whether a column is named like one with captions."""
    return column is not None and column.lower() in COLUMNS


def are_captions(texts: Sequence[str]) -> bool:
    """Whether the labels of images read like captions: several words, and most of them different."""
    if not texts:
        return False
    words = sum(len(text.split()) for text in texts) / len(texts)
    return words >= _WORDS and len(set(texts)) >= _DIFFERENT * len(texts)


def caption_problems(
    captions: Sequence[tuple[str, ...]], too_long: Callable[[str], bool]
) -> Iterator[tuple[str, Literal["error", "note"], str, list[int]]]:
    """Captions without words, captions of many images, and captions that are repeated or too long, for `check`."""
    images: dict[str, list[int]] = defaultdict(list)
    for i, its in enumerate(captions):
        for text in its:
            images[text.lower()].append(i)
    for text, numbers in images.items():
        if not any(character.isalnum() for character in text):
            yield "wordless", "error", f"'{text}'", numbers
        elif len(numbers) >= max(_MANY * len(captions), _FEW):
            yield "common", "note", f"'{text}' describes {len(numbers):,} of {len(captions):,} images", numbers
    if shared := [numbers for numbers in images.values() if len(numbers) > 1]:
        first = [numbers[0] for numbers in shared]
        yield "repeated", "note", f"{len(shared):,} of {len(images):,} different captions", first
    if long := [numbers[0] for text, numbers in images.items() if too_long(text)]:
        yield "long", "note", f"{len(long):,} of {len(images):,} different captions", long
