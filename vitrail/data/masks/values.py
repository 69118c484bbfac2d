"""The values of all masks of a data set, and the class of each: what is meant is said, never guessed.

Every mask is read once; its values are remembered in the cache folder. A mask of values 0 and 255, colours where
indices were meant or numbers of instances would train without an error and mean nothing, so they need `--mask-values`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import Numbers, files_version
from vitrail.data.download import cache_folder
from vitrail.data.masks.raw import COLOUR, MaskFile, RawMask
from vitrail.data.masks.raw import Values as RawValues
from vitrail.data.pixels import UnreadableImage
from vitrail.errors import UserError, shortlist
from vitrail.files import ANNOTATIONS, read_text, write_text
from vitrail.progress import track
from vitrail.tasks.mask_scores import IGNORE

IGNORED = "ignore"  # the name of values that count nowhere
WHITE = 255  # usually "no label", unless it is the only value besides 0
REST = "*"  # all other values
_MANY = 64  # more distinct values are numbers of instances, not of classes
_SOME = 8  # more may be either
_VERSION = 2


@dataclass(frozen=True)
class Seen:
    """The size of a mask and the pixels of each of its values."""

    size: tuple[int, int]
    pixels: dict[int, int]


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of a data set, and the class of each value."""

    names: tuple[str, ...]
    table: Mapping[int, int]  # value to class, or IGNORE
    rest: int | None = None  # the class of all other values; None if they are errors

    def number(self, value: int) -> int | None:
        """The class of a value; None if it has none. A mask without any colour may be grey among coloured ones."""
        if value <= WHITE and value not in self.table:
            return self.table.get(COLOUR + value * 0x010101, self.rest)
        return self.table.get(value, self.rest)


@dataclass(frozen=True, eq=False)
class Mask:
    """The annotation of an image: a mask with the classes of its values."""

    raw: RawMask
    classes: Classes
    seen: Seen
    numbers: tuple[int, ...] = ()  # of a model's classes, if it has others
    known: int = 0  # classes of that model

    @property
    def counts(self) -> Numbers:
        """The pixels of each class, (K,)."""
        found = np.zeros(self.known or len(self.classes.names), np.int64)
        for value, pixels in self.seen.pixels.items():
            k = self.classes.number(value)
            if k is not None and k != IGNORE:
                found[self.numbers[k] if self.numbers else k] += pixels
        return found

    def labels(self) -> NDArray[np.int16]:
        """The class of every pixel, (H, W); -1 where there is none."""
        try:
            values = self.raw.values()
        except UnreadableImage as error:
            raise UserError(f"{self.raw.name} was readable before but is no longer: {error}.") from error
        found = np.array(sorted(self.seen.pixels), np.int64)
        classes = [self.classes.number(value) for value in found.tolist()]
        known = np.array([IGNORE if k is None else k for k in classes], np.int64)
        if self.numbers:
            known = np.where(known == IGNORE, IGNORE, np.array(self.numbers)[known])
        if len(found) and found[-1] < 1 << 16:
            table = np.full(int(found[-1]) + 1, IGNORE, np.int16)
            table[found] = known
            if values.max(initial=0) <= found[-1]:
                return np.asarray(table[values])
        places = np.searchsorted(found, values).clip(max=max(len(found) - 1, 0))
        return np.asarray(known[places], np.int16)

    def renumbered(self, numbers: Numbers, classes: int) -> Mask:
        """The mask with class k as `numbers[k]` of a model's `classes`."""
        before = self.numbers or range(len(self.classes.names))
        return replace(self, numbers=tuple(int(numbers[k]) for k in before), known=classes)

    def __repr__(self) -> str:
        return f"{self.raw!r} {sorted(self.seen.pixels.items())} {self.numbers}"


def survey(masks: Sequence[RawMask]) -> list[Seen | str]:
    """The values of every mask, or the reason why it cannot be read; remembered for files that have not changed."""
    files = [mask.path for mask in masks if isinstance(mask, MaskFile)]
    memory = None
    if len(files) == len(masks) and all(path.exists() for path in files):
        kinds = "".join(f"{mask.colours:d}{mask.turn}" for mask in masks if isinstance(mask, MaskFile))
        key = hashlib.blake2b(f"{_VERSION} {files_version(files)} {kinds}".encode(), digest_size=16).hexdigest()
        memory = cache_folder() / "masks" / f"{key}.json"
        with suppress(Exception):  # not there yet, or damaged
            checksum, _, text = read_text(memory, ANNOTATIONS).partition("\n")
            if checksum == _checksum(text):
                return [_recalled(each) for each in json.loads(text)]

    def look(mask: RawMask) -> Seen | str:
        try:
            values = mask.values()
        except UnreadableImage as error:
            return str(error)
        return Seen((values.shape[0], values.shape[1]), _counted(values))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(track(pool.map(look, masks), "reading masks", total=len(masks), unit="mask"))
    if memory is not None and not any(isinstance(each, str) for each in found):
        with suppress(OSError, UserError):  # a full or read-only disk: they are read again
            memory.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps([[*each.size, list(each.pixels.items())] for each in found])  # type: ignore[union-attr]
            write_text(memory, f"{_checksum(text)}\n{text}")
    return found


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _recalled(row: Any) -> Seen:
    h, w, pairs = row
    return Seen((int(h), int(w)), {int(value): int(pixels) for value, pixels in pairs})


def _counted(values: RawValues) -> dict[int, int]:
    if values.dtype.itemsize <= 2:
        counts = np.bincount(values.ravel())
        there = np.flatnonzero(counts)
        return dict(zip(there.tolist(), counts[there].tolist(), strict=True))
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class Layout:
    """What a layout says of the values: names by value, and values that count nowhere."""

    names: Mapping[int, str] = field(default_factory=dict)
    ignored: tuple[int, ...] = ()
    title: str = "masks"


def decide(
    masks: Sequence[RawMask], seen: Sequence[Seen], given: Sequence[str] | None, layout: Layout, source: object
) -> Classes:
    """The classes of all values: those given, else those of the layout, else one for each value."""
    pixels: Counter[int] = Counter()
    for each in seen:
        pixels.update(each.pixels)
    if given is not None:
        return _checked(_given(given), pixels, masks, seen, f"--mask-values of {source}")
    if layout.names:
        names = tuple(dict.fromkeys(layout.names.values()))
        table = {value: names.index(name) for value, name in layout.names.items()}
        return _checked(
            Classes(names, table | dict.fromkeys(layout.ignored, IGNORE)), pixels, masks, seen, layout.title
        )
    return _plain(pixels, seen, source)


def _plain(pixels: Counter[int], seen: Sequence[Seen], source: object) -> Classes:
    """One class for each value, if that is what the values look like; else a UserError with the option to give."""
    values = sorted(pixels)
    if any(value >= COLOUR for value in values):
        shown = [_shown(value) for value, _ in pixels.most_common(8)]
        more = f" and {len(values) - 8:,} more" if len(values) > 8 else ""
        if len(values) > 4 * _MANY:
            raise UserError(
                f"The masks of {source} have {len(values):,} colours, so they are photographs, drawings with soft "
                "edges or compressed pictures. A mask needs one exact colour or value per class, in a PNG file."
            )
        example = ",".join(f"{colour}=name{i}" for i, colour in enumerate(shown[:3], 1))
        raise UserError(
            f"The masks of {source} are colours, not class indices: {', '.join(shown)}{more}. Say what each means: "
            f"--mask-values '{example},…'."
        )
    if len(values) == 1:
        raise UserError(
            f"All pixels of the masks of {source} have the value {values[0]}. Segmentation needs at least two classes."
        )
    if set(values) == {0, WHITE}:
        raise UserError(
            f"The masks of {source} have the values 0 and 255, and 255 usually means 'no label'. Name both: "
            "--mask-values 0=ground,255=object."
        )
    if are_instances([{*each.pixels} for each in seen]):
        if _numbered(seen):
            raise UserError(
                f"The masks of {source} have {len(values):,} values, {values[0]} to {values[-1]}, which look like one "
                "number per object. Make them one class: --mask-values '0=ground,*=object'. Or find the objects: "
                "--task boxes."
            )
        raise UserError(
            f"The masks of {source} have {len(values):,} different values, from {values[0]} to {values[-1]}, which "
            "cannot be class indices. Map those that are: --mask-values '0=ground,1=road,*=ignore'."
        )
    named = [value for value in values if value != WHITE or len(values) == 2]
    names = tuple(f"class {value}" for value in named)
    table = {value: i for i, value in enumerate(named)}
    return Classes(names, table | ({WHITE: IGNORE} if WHITE not in named else {}))


def are_instances(masks: Sequence[set[int]]) -> bool:
    """Whether the values of masks are too many for classes, or some and 1 to n in each mask: classes leave gaps."""
    values: set[int] = set().union(*masks)
    present = [sorted(each - {0}) for each in masks]
    gapless = all(each == list(range(1, len(each) + 1)) for each in present) and len({*map(len, present)}) > 2
    return len(values) > _MANY or (len(values) > _SOME and gapless)


def _numbered(seen: Sequence[Seen]) -> bool:
    """Whether most masks have the values 1 to n, without gaps."""
    dense = [max(each.pixels) < 2 * len(each.pixels) for each in seen if len(each.pixels) > 2]
    return bool(dense) and float(np.mean(dense)) > 0.5


def _checked(
    classes: Classes, pixels: Counter[int], masks: Sequence[RawMask], seen: Sequence[Seen], rule: str
) -> Classes:
    """The classes, if every value has one."""
    unknown = [value for value, _ in pixels.most_common() if classes.number(value) is None]
    if unknown:
        where = next(mask.name for mask, each in zip(masks, seen, strict=True) if unknown[0] in each.pixels)
        share = pixels[unknown[0]] / pixels.total()
        shown = shortlist([_shown(value) for value in unknown], 8)
        raise UserError(
            f"No class for the mask value {shown} ({_shown(unknown[0])}: {share:.1%} of the pixels, as in {where}): "
            f"{rule} has {shortlist([_shown(value) for value in sorted(classes.table)], 12)}. Add it to --mask-values, "
            "as a class or as 'ignore'."
        )
    return classes


def _given(given: Sequence[str]) -> Classes:
    """The classes of --mask-values: 0=ground, 255=nucleus, #ff0000=road, *=ignore."""
    table: dict[int, int] = {}
    names: list[str] = []
    rest: int | None = None
    for part in given:
        key, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise UserError(f"--mask-values must be as in 0=ground,255=nucleus, but it has {part!r}.")
        if name != IGNORED and name not in names:
            names.append(name)
        number = IGNORE if name == IGNORED else names.index(name)
        if key == REST:
            if rest is not None:
                raise UserError("--mask-values has '*' twice: it stands for all other values.")
            rest = number
            continue
        value = _value(key)
        if value in table:
            raise UserError(f"--mask-values has the value {key} twice. Each value has one class.")
        table[value] = number
    if len(names) < 2:
        raise UserError(f"--mask-values must name at least two classes, but it names {shortlist(names, 3) or 'none'}.")
    return Classes(tuple(names), table, rest)


def _value(key: str) -> int:
    digits = key.removeprefix("#")
    try:
        if key.startswith("#") and len(digits) == 6:
            return COLOUR + int(digits, 16)
        if key.isascii() and key.isdigit():
            return int(key)
    except ValueError:
        pass
    raise UserError(f"A mask value must be a number, a colour like #ff0000 or '*', but it is {key!r}.")


def _shown(value: int) -> str:
    return f"#{value - COLOUR:06x}" if value >= COLOUR else str(value)
