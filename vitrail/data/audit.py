"""What is wrong with a data set: every image is read once, and nothing is refused that can be reported.

A picture is recognised again, re-encoded, resized or brightened, by its signature: the low frequencies of a small
grey copy, as in a perceptual hash, but kept as numbers. The cosine of two signatures says how alike two pictures
are, and a matrix product compares all with all.

Legend: N images, S side of a thumbnail, F frequencies kept in each direction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.data.builtin import BUILT_IN
from vitrail.data.dataset import FileSplit
from vitrail.data.folder import files_below, is_image, split_folders, subfolders
from vitrail.data.images import (
    THUMBNAIL,
    Pixels,
    Survey,
    UnreadableImage,
    expected_format,
    image_format,
    read_image,
    survey_image,
    survey_pixels,
)
from vitrail.data.sources import open_data
from vitrail.errors import UserError
from vitrail.progress import track

Signatures = npt.NDArray[np.float32]

NEAR = 0.97  # cosine of two signatures from which on they are one picture
TOLD_APART = 32  # pixels of the shorter side, under which two different pictures of like things can be as near
BLANK = 2.0  # standard deviation in grey levels under which a picture shows nothing
FEW = 5  # images, fewer of which are few for a class
UNEVEN, LOPSIDED = 3, 20  # largest class over smallest: worth a note, and harmful
_FREQUENCIES = 8
_SHOWN = 5  # findings of a kind on screen
_ROWS = 24  # classes up to which every one has its line

# Every kind of finding, worst first: what it is called, and what to do about it.
KINDS = {
    "layout": ("the folder cannot be trained on as it is", "Every class needs a folder of its own, in every split."),
    "leak": ("the same picture in two splits", "The model is measured on what it learned. Remove one of each."),
    "conflict": ("the same picture in two classes", "One of the labels is wrong. Remove or correct it."),
    "unreadable": (
        "unreadable files",
        "They are left out in training, or stop it if they are many. Repair or remove them.",
    ),
    "mixed": ("images of another kind than most", "All must have the same channels. Remove or convert them."),
    "class": ("classes that cannot be learned", "Add images of them to train, or remove them."),
    "imbalance": ("uneven classes", "Collect more of the small classes: the model will favour the large ones."),
    "suspicious": (
        "labels that the run contradicts",
        "Look at them. What the run was trained on it may have learned by heart, wrong labels too.",
    ),
    "duplicate": ("files that are the same, byte for byte", "A random split may put copies on both sides."),
    "near": ("pictures that are nearly the same", "Each with the one that is closest. A random split may part them."),
    "extension": (
        "content of another format than the name says",
        "Rename them: other names than images have are skipped.",
    ),
    "loose": ("images beside the class folders", "They are left out. Move them into a class."),
    "few": ("classes with few images", f"Fewer than {FEW} in train are hardly learned."),
    "blank": ("pictures of one colour", "They show nothing. Remove them if that is a mistake."),
    "size": ("odd sizes", "Much smaller or longer than the others: after resizing little is left of them."),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong; an "error" would hurt a training run."""

    kind: str  # of KINDS
    severity: Literal["error", "note"]
    detail: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Item:
    """An image of the data set as it lies there, readable or not."""

    name: str
    split: str
    label: str
    source: Path | Pixels

    def read(self, channels: int | None = None, bits: int | None = None) -> Pixels:
        return read_image(self.source, channels, bits) if isinstance(self.source, Path) else self.source


@dataclass(frozen=True)
class Audit:
    """What a data set holds, and what is wrong with it."""

    name: str
    root: str  # what the names of files begin with
    splits: tuple[str, ...]
    counts: dict[str, dict[str, int]]  # class: split: readable images
    sizes: dict[str, tuple[int, int]]  # smallest, median, largest: h, w
    modes: dict[str, int]  # "colour", "grey", …: images
    findings: tuple[Finding, ...]  # worst first
    items: tuple[Item, ...] = field(repr=False)  # that can be read
    sheet: Path | None = None

    @property
    def images(self) -> int:
        return len(self.items)

    @property
    def errors(self) -> int:
        """How many findings would hurt a training run."""
        return sum(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.name,
            "images": self.images,
            "counts": self.counts,
            "sizes": self.sizes,
            "modes": self.modes,
            "errors": self.errors,
            "findings": [asdict(finding) for finding in self.findings],
            "sheet": None if self.sheet is None else str(self.sheet),
        }

    def table(self) -> str:
        """The audit for people."""
        lines = [f"{self.name}: {_count(self.images, 'image')}, {_count(len(self.counts), 'class', 'classes')}"]
        if self.sizes:
            sizes = ", ".join(f"{which} {h}x{w}" for which, (h, w) in self.sizes.items())
            modes = ", ".join(f"{count:,} {mode}" for mode, count in self.modes.items())
            lines += [f"height x width: {sizes}", f"kinds: {modes}"]
        if self.counts:
            lines += ["", *self._count_lines()]
        for kind, group in groupby(self.findings, key=lambda finding: finding.kind):
            lines += ["", *self._finding_lines(kind, list(group))]
        harm = f"{_count(self.errors, 'finding')} would hurt a training run." if self.errors else ""
        lines += ["", harm or ("Nothing here would hurt a training run." if self.findings else "Nothing is wrong.")]
        if self.sheet is not None:
            lines.append(f"The pictures are in {self.sheet}.")
        return "\n".join(lines)

    def _count_lines(self) -> Iterator[str]:
        rows = sorted(self.counts.items(), key=lambda row: -sum(row[1].values()))
        width = max(map(len, ["class", "total", *self.counts])) + 2
        yield "class".ljust(width) + "".join(f"{split:>9}" for split in self.splits)
        half = _ROWS // 2
        for i, (name, by_split) in enumerate(rows):
            if len(rows) <= _ROWS or i < half or i >= len(rows) - half:
                yield name.ljust(width) + "".join(f"{by_split.get(split, 0):>9,}" for split in self.splits)
            elif i == half:
                yield f"… {len(rows) - 2 * half} more …"
        totals = [sum(by_split.get(split, 0) for by_split in self.counts.values()) for split in self.splits]
        yield "total".ljust(width) + "".join(f"{total:>9,}" for total in totals)

    def _finding_lines(self, kind: str, findings: list[Finding]) -> Iterator[str]:
        title, advice = KINDS[kind]
        mark = "ERROR" if any(finding.severity == "error" for finding in findings) else "note"
        yield f"{mark:<6}{title}: {len(findings):,}"
        yield f"      {advice}"
        for finding in findings[:_SHOWN]:
            names = [name.removeprefix(self.root) for name in finding.files]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            listed = " = ".join(names[:_SHOWN]) + more
            yield "      - " + ": ".join(part for part in (listed, finding.detail) if part)
        if len(findings) > _SHOWN:
            yield f"        and {len(findings) - _SHOWN:,} more (--json lists all)"


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Kinds with an error before those without, each in the order of KINDS and together."""
    harmful = {finding.kind for finding in findings if finding.severity == "error"}
    order = list(KINDS)
    return tuple(sorted(findings, key=lambda f: (f.kind not in harmful, order.index(f.kind), f.severity)))


def audit(source: str | Path, data_dir: str | None = None, workers: int = 2) -> Audit:
    """Everything that can be found out about a data set without a model."""
    try:
        name, root, items, findings = _collect(source, data_dir)
    except OSError as error:
        raise UserError(f"{error.filename or source} cannot be read: {error.strerror or error}.") from error
    if not items and not findings:
        raise UserError(f"{source} has no images. It must hold one folder of images for every class.")
    order = ("train", "val", "test")
    items.sort(key=lambda item: order.index(item.split))  # stable: in a split they stay as they were found

    good: list[Item] = []
    surveys: list[Survey] = []
    thumbnails: Pixels = np.empty((len(items), THUMBNAIL, THUMBNAIL), np.uint8)
    with ThreadPoolExecutor(workers, thread_name_prefix="vitrail-check") as pool:
        step = 1024  # as many as are handed to the threads at a time: a million would need much memory
        answers = (answer for at in range(0, len(items), step) for answer in pool.map(_survey, items[at : at + step]))
        for item, answer in zip(items, track(answers, "checking", total=len(items), unit="img"), strict=True):
            if isinstance(answer, str):
                findings.append(Finding("unreadable", "error", answer, (item.name,)))
            else:
                survey, thumbnails[len(good)] = answer
                good.append(item)
                surveys.append(survey)
    thumbnails = thumbnails[: len(good)]

    findings += _formats(good, surveys)
    findings += _mixed(good, surveys)
    findings += _repeated(good, surveys, thumbnails)
    findings += _odd(good, surveys)
    counts: dict[str, dict[str, int]] = {label: {} for label in sorted({item.label for item in items})}
    for item in good:
        counts[item.label][item.split] = counts[item.label].get(item.split, 0) + 1
    findings += _uneven(counts)
    return Audit(
        name=name,
        root=root,
        splits=tuple(split for split in order if any(split in by_split for by_split in counts.values())),
        counts=counts,
        sizes=_sizes(surveys),
        modes=dict(Counter(_MODES.get(survey.mode, survey.mode) for survey in surveys).most_common()),
        findings=worst_first(findings),
        items=tuple(good),
    )


# What there is ----------------------------------------------------------------------------------------------


def _collect(source: str | Path, data_dir: str | None) -> tuple[str, str, list[Item], list[Finding]]:
    """The short name, what all names begin with, every image, and what is wrong with the places of files."""
    path = Path(source).expanduser()
    if path.is_dir() and not (isinstance(source, str) and source in BUILT_IN):
        return path.resolve().name, f"{path}/", *_walk(path)
    data = open_data(source, data_dir=data_dir)
    findings = [Finding("unreadable", "error", reason, (name,)) for name, reason in data.unreadable]
    items = []
    for title, split in data.splits.items():
        if title == "val" and split is data.splits.get("test"):
            continue
        for i, target in enumerate(split.targets.tolist()):
            name = split.name(i)
            stored = Path(name) if isinstance(split, FileSplit) else split.image(i)
            items.append(Item(name, title, data.classes[target], stored))
    return data.name, "", items, findings


def _walk(root: Path) -> tuple[list[Item], list[Finding]]:
    items: list[Item] = []
    findings: list[Finding] = []

    def unlisted(error: OSError) -> None:
        findings.append(Finding("unreadable", "error", error.strerror or "", (str(error.filename),)))

    try:
        folders = split_folders(root)
    except UserError as error:
        return [], [Finding("layout", "error", str(error))]
    for split, folder in folders.items():
        loose = tuple(sorted(str(child) for child in folder.iterdir() if child.is_file() and is_image(child)))
        classes = subfolders(folder)
        if loose and classes:
            findings.append(Finding("loose", "note", f"{len(loose)} in {folder}", loose))
        elif loose:
            findings.append(Finding("layout", "error", f"{folder} holds images but no class folders", loose))
        elif not classes and len(folders) > 1:
            findings.append(Finding("layout", "error", f"the {split} split has no images", (str(folder),)))
        for child in classes:
            files = sorted(files_below(child, unlisted), key=Path.as_posix)
            images = [path for path in files if is_image(path)]
            items += [Item(str(path), split, child.name, path) for path in images]
            if not images:
                findings.append(Finding("layout", "error", "the class folder has no images", (str(child),)))
            for path in files:
                if not is_image(path) and (kind := image_format(path)):
                    detail = f"{kind}, but a file that ends in '{path.suffix}' is left out"
                    findings.append(Finding("extension", "note", detail, (str(path),)))
    return items, findings


def _survey(item: Item) -> tuple[Survey, Pixels] | str:
    """The facts of an image and its thumbnail, or why it cannot be read."""
    if isinstance(item.source, Path):
        try:
            return survey_image(item.source)
        except UnreadableImage as error:
            return str(error)
    return survey_pixels(item.source)


# What is wrong ----------------------------------------------------------------------------------------------


def _formats(items: Sequence[Item], surveys: Sequence[Survey]) -> Iterator[Finding]:
    for item, survey in zip(items, surveys, strict=True):
        if isinstance(item.source, Path) and expected_format(item.source) != survey.format:
            yield Finding("extension", "note", f"{survey.format}, not {expected_format(item.source)}", (item.name,))


def _mixed(items: Sequence[Item], surveys: Sequence[Survey]) -> Iterator[Finding]:
    """Images that cannot be trained on with most of the others, because their channels are other ones."""
    kinds = Counter(survey.kind for survey in surveys).most_common(1)
    for item, survey in zip(items, surveys, strict=True):
        if survey.kind != kinds[0][0]:
            yield Finding("mixed", "error", f"{survey.kind}, not {kinds[0][0]}", (item.name,))


def _repeated(items: Sequence[Item], surveys: Sequence[Survey], thumbnails: Pixels) -> Iterator[Finding]:
    """Pictures that are there twice: in two splits, in two classes, as bytes or as what is seen."""
    copies: dict[bytes, list[Item]] = defaultdict(list)
    first: list[int] = []
    for i, (item, survey) in enumerate(zip(items, surveys, strict=True)):
        if survey.digest not in copies:
            first.append(i)
        copies[survey.digest].append(item)
    for same in copies.values():
        if len(same) == 1:
            continue
        names = tuple(item.name for item in same)
        labels, splits = sorted({item.label for item in same}), list(dict.fromkeys(item.split for item in same))
        if len(labels) > 1:
            yield Finding("conflict", "error", " and ".join(labels), names)
        if len(splits) > 1:
            yield Finding("leak", "error", f"in {' and '.join(splits)}, the same bytes", names)
        for split in splits:
            inside = tuple(item.name for item in same if item.split == split)
            if len(inside) > 1:
                yield Finding("duplicate", "note", "", inside)

    plain = thumbnails.reshape(len(thumbnails), THUMBNAIL**2).std(axis=1) < BLANK
    yield from (Finding("blank", "note", "", (items[i].name,)) for i in np.flatnonzero(plain))
    shown = [i for i in first if not plain[i] and min(surveys[i].h, surveys[i].w) >= TOLD_APART]
    for a, b, alike in closest(signatures(thumbnails[shown]), [items[i].split for i in shown]):
        one, other = items[shown[a]], items[shown[b]]
        names = (one.name, other.name)
        if one.split == other.split:
            yield Finding("near", "note", f"{alike:.1%} alike", names)
        else:
            yield Finding("leak", "error", f"in {one.split} and {other.split}, {alike:.1%} alike", names)


def signatures(thumbnails: Pixels) -> Signatures:
    """Unit vectors (N, F·F - 1) of grey thumbnails (N, S, S): their low frequencies, without the mean.

    In photographs the strength of a frequency falls with its height. Multiplied by the height, all count alike, and
    two photographs of a bright sky above dark ground are not the same.
    """
    k, n = np.arange(_FREQUENCIES)[:, None], np.arange(THUMBNAIL)[None, :]
    basis = np.cos(np.pi / THUMBNAIL * (n + 0.5) * k).astype(np.float32)  # F S
    height = np.hypot(k, k.T).astype(np.float32)
    out = np.empty((len(thumbnails), _FREQUENCIES**2 - 1), np.float32)
    for at in range(0, len(out), 4096):
        spectrum = height * (basis @ thumbnails[at : at + 4096].astype(np.float32) @ basis.T)  # N F F
        vectors = spectrum.reshape(len(spectrum), -1)[:, 1:]
        out[at : at + 4096] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return out


def closest(vectors: Signatures, splits: Sequence[str]) -> Iterator[tuple[int, int, float]]:
    """For every picture the closest one before it, in its own split and in each earlier one, if it is near enough.

    `splits` come one after the other. One pair per picture and split is all, so that a thousand pictures that are all
    alike give a thousand findings and not a million.
    """
    starts = [i for i in range(len(splits)) if i == 0 or splits[i] != splits[i - 1]]
    ranges = list(zip(starts, [*starts, len(splits)][1:], strict=True))
    tiles = [
        (at, min(at + 512, end), number) for number, (begin, end) in enumerate(ranges) for at in range(begin, end, 512)
    ]
    for top, bottom, number in track(tiles, "comparing", unit="block"):
        for begin, end in ranges[: number + 1]:
            best, where = np.full(bottom - top, NEAR, np.float32), np.full(bottom - top, -1)
            for left in range(begin, min(end, bottom), 4096):
                right = min(left + 4096, end, bottom)
                alike = vectors[top:bottom] @ vectors[left:right].T
                if right > top:  # a picture is compared with those before it
                    alike[np.arange(left, right)[None, :] >= np.arange(top, bottom)[:, None]] = 0
                better = np.flatnonzero(alike.max(axis=1) > best)
                where[better] = left + alike[better].argmax(axis=1)
                best[better] = alike[better].max(axis=1)
            for row in np.flatnonzero(where >= 0).tolist():
                yield int(where[row]), top + row, min(float(best[row]), 1.0)


def _odd(items: Sequence[Item], surveys: Sequence[Survey]) -> Iterator[Finding]:
    """Images whose shorter side is a quarter of what is usual, or that are four times as long as is usual."""
    if not surveys:
        return
    short = np.array([min(survey.h, survey.w) for survey in surveys])
    aspect = np.array([max(survey.h, survey.w) for survey in surveys]) / short
    odd = (short * 4 <= np.median(short)) | (aspect >= 4 * np.median(aspect))
    for i in sorted(np.flatnonzero(odd).tolist(), key=lambda i: int(short[i])):
        yield Finding("size", "note", f"{surveys[i].h}x{surveys[i].w}", (items[i].name,))


def _uneven(counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    train = {label: by_split.get("train", 0) for label, by_split in counts.items()}
    for label, count in train.items():
        if not count:
            where = " and ".join(counts[label])
            detail = f"'{label}' is in {where}, but not in train" if where else f"no image of '{label}' can be read"
            yield Finding("class", "error", detail)
        elif count < FEW:
            yield Finding("few", "note", f"'{label}' has {_count(count, 'image')}")
    learned = {label: count for label, count in train.items() if count}
    if len(learned) == 1:
        yield Finding("class", "error", f"'{next(iter(learned))}' is the only class in train: a classifier needs two")
    elif learned:
        most, least = max(learned, key=learned.__getitem__), min(learned, key=learned.__getitem__)
        ratio = learned[most] / learned[least]
        if ratio > UNEVEN:
            yield Finding(
                "imbalance",
                "error" if ratio > LOPSIDED else "note",
                f"'{most}' has {ratio:.0f} times the images of '{least}' ({learned[most]:,} and {learned[least]:,})",
            )


# In words ---------------------------------------------------------------------------------------------------

_MODES = {
    "1": "black and white",
    "L": "grey",
    "LA": "grey with transparency",
    "I;16": "16-bit grey",
    "I;16B": "16-bit grey",
    "I": "deep grey",
    "F": "deep grey",
    "P": "palette",
    "RGB": "colour",
    "RGBA": "colour with transparency",
}


def _sizes(surveys: Sequence[Survey]) -> dict[str, tuple[int, int]]:
    if not surveys:
        return {}
    ordered = sorted((survey.h * survey.w, survey.h, survey.w) for survey in surveys)
    places = {"smallest": 0, "median": len(ordered) // 2, "largest": -1}
    return {which: ordered[place][1:] for which, place in places.items()}


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
