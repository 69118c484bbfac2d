"""What is wrong with a data set: every image is read once, and nothing is refused that can be reported."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from vitrail.data.audit.findings import FEW, Audit, Finding, Item, counted, worst_first
from vitrail.data.audit.near_duplicates import TOLD_APART, closest, signatures
from vitrail.data.audit.scan import gather
from vitrail.data.balance import LOPSIDED, imbalance
from vitrail.data.images import (
    THUMBNAIL,
    Pixels,
    Survey,
    UnreadableImage,
    expected_format,
    survey_image,
    survey_pixels,
)
from vitrail.errors import UserError
from vitrail.progress import track

BLANK = 2.0  # standard deviation in grey levels under which a picture shows nothing


def audit(
    source: str | Path,
    data_dir: str | None = None,
    workers: int = 2,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: str | None = None,
) -> Audit:
    """Everything that can be found out about a data set without a model; the columns are those of a table."""
    try:
        name, root, items, findings, single = gather(source, data_dir, image_column, label_column, task)
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
    known = sorted({label for item in items for label in item.labels})
    counts: dict[str, dict[str, int]] = {label: {} for label in known}
    for item in good:
        for label in item.labels:
            counts[label][item.split] = counts[label].get(item.split, 0) + 1
    if single:
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


def _survey(item: Item) -> tuple[Survey, Pixels] | str:
    """The facts of an image and its thumbnail, or why it cannot be read."""
    try:
        pixels = item.source if isinstance(item.source, Path) else item.source()
        if isinstance(pixels, Path | bytes):
            return survey_image(pixels)
    except UnreadableImage as error:
        return str(error)
    return survey_pixels(pixels)


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
        labels = sorted({item.label for item in same})
        splits = list(dict.fromkeys(item.split for item in same))
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
            yield Finding("few", "note", f"'{label}' has {counted(count, 'image')}")
    learned = {label: count for label, count in train.items() if count}
    if len(learned) == 1:
        yield Finding("class", "error", f"'{next(iter(learned))}' is the only class in train: a classifier needs two")
    elif found := imbalance(learned):
        yield Finding("imbalance", "error" if found.ratio > LOPSIDED else "note", str(found))


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
