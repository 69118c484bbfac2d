"""`audit`: finds duplicates, leaks, label conflicts, unreadable files and class imbalance in a data set.

Every image is read once. Problems are reported as findings, not raised.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from vitrail.data.audit.findings import FEW, Audit, Finding, Item, plural, worst_first
from vitrail.data.audit.near_duplicates import MIN_SIDE, near_pairs, signatures
from vitrail.data.audit.scan import scan
from vitrail.data.balance import SEVERE_RATIO, imbalance
from vitrail.data.images import (
    THUMBNAIL,
    Pixels,
    Survey,
    UnreadableImage,
    expected_format,
    survey_image,
    survey_pixels,
)
from vitrail.data.sources import Source, full_name
from vitrail.errors import UserError
from vitrail.progress import track

BLANK = 2.0  # standard deviation in gray levels below which an image counts as blank


def audit(
    source: Source,
    data_dir: str | None = None,
    workers: int = 2,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: str | None = None,
    image_dir: str | None = None,
    mask_values: Sequence[str] | None = None,
) -> Audit:
    """Audits a data set without a model. `image_dir`, `image_column` and `label_column` apply to tables."""
    try:
        name, root, items, findings, single = scan(
            source, data_dir, image_column, label_column, task, image_dir, mask_values
        )
    except OSError as error:
        raise UserError(f"{error.filename or full_name(source)} cannot be read: {error.strerror or error}.") from error
    if not items and not findings:
        raise UserError(f"{full_name(source)} has no images. It must have one folder of images per class.")
    order = ("train", "val", "test")
    items.sort(key=lambda item: order.index(item.split))  # stable: keeps the order within a split

    good: list[Item] = []
    surveys: list[Survey] = []
    thumbnails: Pixels = np.empty((len(items), THUMBNAIL, THUMBNAIL), np.uint8)
    with ThreadPoolExecutor(workers, thread_name_prefix="vitrail-check") as pool:
        step = 1024  # images submitted at a time, to bound memory
        answers = (answer for at in range(0, len(items), step) for answer in pool.map(_survey, items[at : at + step]))
        for item, answer in zip(items, track(answers, "checking", total=len(items), unit="img"), strict=True):
            if isinstance(answer, str):
                findings.append(Finding("unreadable", "error", answer, (item.name,)))
            else:
                survey, thumbnails[len(good)] = answer
                good.append(item)
                surveys.append(survey)
    thumbnails = thumbnails[: len(good)]

    findings += _wrong_extensions(good, surveys)
    findings += _mixed(good, surveys)
    findings += _duplicates(good, surveys, thumbnails)
    findings += _odd_sizes(good, surveys)
    known = sorted({label for item in items for label in item.labels})
    counts: dict[str, dict[str, int]] = {label: {} for label in known}
    for item in good:
        for label in item.labels:
            counts[label][item.split] = counts[label].get(item.split, 0) + 1
    if single:
        findings += _class_problems(counts)
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
    """The survey and thumbnail of an image, or why it cannot be read."""
    try:
        pixels = item.source if isinstance(item.source, Path) else item.source()
        if isinstance(pixels, Path | bytes):
            return survey_image(pixels)
    except UnreadableImage as error:
        return str(error)
    return survey_pixels(pixels)


# Findings ----------------------------------------------------------------------------------------------


def _wrong_extensions(items: Sequence[Item], surveys: Sequence[Survey]) -> Iterator[Finding]:
    for item, survey in zip(items, surveys, strict=True):
        if isinstance(item.source, Path) and expected_format(item.source) != survey.format:
            yield Finding("extension", "note", f"{survey.format}, not {expected_format(item.source)}", (item.name,))


def _mixed(items: Sequence[Item], surveys: Sequence[Survey]) -> Iterator[Finding]:
    """Images whose channels or value type differ from the majority's."""
    majority = Counter(survey.kind for survey in surveys).most_common(1)
    for item, survey in zip(items, surveys, strict=True):
        if survey.kind != majority[0][0]:
            yield Finding("mixed", "error", f"{survey.kind}, not {majority[0][0]}", (item.name,))


def _duplicates(items: Sequence[Item], surveys: Sequence[Survey], thumbnails: Pixels) -> Iterator[Finding]:
    """Duplicates and near-duplicates, leaks between splits, label conflicts, and blank images."""
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
        if len(labels) > 1 and any(item.labels for item in same):
            yield Finding("conflict", "error", " and ".join(labels), names)
        if len(splits) > 1:
            yield Finding("leak", "error", f"in {' and '.join(splits)}, identical files", names)
        for split in splits:
            inside = tuple(item.name for item in same if item.split == split)
            if len(inside) > 1 and not (len(labels) > 1 and inside == names):  # not twice, as a conflict and as copies
                yield Finding("duplicate", "note", "", inside)

    blank = thumbnails.reshape(len(thumbnails), THUMBNAIL**2).std(axis=1) < BLANK
    yield from (Finding("blank", "note", "", (items[i].name,)) for i in np.flatnonzero(blank))
    compared = [i for i in first if not blank[i] and min(surveys[i].h, surveys[i].w) >= MIN_SIDE]
    for a, b, similarity in near_pairs(signatures(thumbnails[compared]), [items[i].split for i in compared]):
        one, other = items[compared[a]], items[compared[b]]
        names = (one.name, other.name)
        if one.split == other.split:
            yield Finding("near", "note", f"{similarity:.1%} similar", names)
        else:
            yield Finding("leak", "error", f"in {one.split} and {other.split}, {similarity:.1%} similar", names)


def _odd_sizes(items: Sequence[Item], surveys: Sequence[Survey]) -> Iterator[Finding]:
    """Images whose shorter side is a quarter of the median or less, or whose aspect ratio is four times the median."""
    if not surveys:
        return
    short = np.array([min(survey.h, survey.w) for survey in surveys])
    aspect = np.array([max(survey.h, survey.w) for survey in surveys]) / short
    odd = (short * 4 <= np.median(short)) | (aspect >= 4 * np.median(aspect))
    for i in sorted(np.flatnonzero(odd).tolist(), key=lambda i: int(short[i])):
        yield Finding("size", "note", f"{surveys[i].h}x{surveys[i].w}", (items[i].name,))


def _class_problems(counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    train = {label: by_split.get("train", 0) for label, by_split in counts.items()}
    for label, count in train.items():
        if not count:
            where = " and ".join(counts[label])
            detail = f"'{label}' is in {where} but not in train" if where else f"'{label}' has no readable image"
            yield Finding("class", "error", detail)
        elif count < FEW:
            yield Finding("few", "note", f"'{label}' has {plural(count, 'image')}")
    learned = {label: count for label, count in train.items() if count}
    if len(learned) == 1:
        yield Finding("class", "error", f"'{next(iter(learned))}' is the only class in train: a classifier needs two")
    elif found := imbalance(learned):
        yield Finding("imbalance", "error" if found.ratio > SEVERE_RATIO else "note", str(found))


# Summary ---------------------------------------------------------------------------------------------------

_MODES = {
    "1": "black and white",
    "L": "grey",
    "LA": "grey with transparency",
    "I;16": "16-bit grey",
    "I;16B": "16-bit grey",
    "I": "high-bit-depth grey",
    "F": "high-bit-depth grey",
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
