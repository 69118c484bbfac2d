"""The contact sheet of an audit: the images of its findings, with duplicates side by side."""

from __future__ import annotations

import re
import warnings
from itertools import groupby

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from vitrail.charts.figures import GREY, INK, ORANGE, PALE, STYLE
from vitrail.data.audit.findings import KINDS, Audit, Finding, Item
from vitrail.data.pixels import Pixels, UnreadableImage, to_pil

_COLUMNS = 8  # images in a row
_LIMIT = 2 * _COLUMNS  # images per kind of finding
_CELL, _GAP = 1.25, 0.15  # inches
_CAPTION, _HEAD = 0.62, 0.55
_FONT_SIZE = 6.5  # points

Section = tuple[str, list[Finding]]


def sections(audit: Audit) -> list[Section]:
    """The kinds of findings that have images, each with the findings that are shown."""
    found = []
    for kind, group in groupby(audit.findings, key=lambda finding: finding.kind):
        findings, pictures = [], 0
        for finding in (finding for finding in group if finding.files and kind != "layout"):
            pictures += _pictures(finding)
            if pictures <= _LIMIT:
                findings.append(finding)
        if findings:
            found.append((kind, findings))
    return found


def contact_sheet(audit: Audit) -> Figure:
    """One section per kind of finding, worst first, with a caption under every image."""
    items = {item.name: item for item in audit.items}
    parts = [(kind, _rows(findings)) for kind, findings in sections(audit)]
    width = _COLUMNS * (_CELL + _GAP) + _GAP
    height = sum(_HEAD + len(rows) * (_CELL + _CAPTION) for _, rows in parts) + _GAP
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        y = height
        for kind, rows in parts:
            severities = [finding.severity for finding in audit.findings if finding.kind == kind]
            color = ORANGE if "error" in severities else INK
            title = KINDS[kind][0]
            figure.text(_GAP / width, (y - 0.32) / height, title, fontsize=12, weight="bold", color=color)
            count = sum(_pictures(finding) for row in rows for finding in row)
            every = sum(len(finding.files) for finding in audit.findings if finding.kind == kind)
            note = f"{count} of {every:,} images" if count < every else f"{count:,} images" if count > 1 else ""
            figure.text(1 - _GAP / width, (y - 0.32) / height, note, ha="right", color=GREY)
            y -= _HEAD
            for row in rows:
                x = _GAP
                for finding in row:
                    shown = finding.files[: _pictures(finding)]
                    # The images of one finding share a background.
                    box = (x / width, (y - _CELL) / height, _width_of(finding) / width, _CELL / height)
                    if len(shown) > 1:
                        _background(figure, box)
                    for i, name in enumerate(shown):
                        left = x + i * (_CELL + _GAP)
                        box = (left / width, (y - _CELL) / height, _CELL / width, _CELL / height)
                        item = items.get(name)
                        _draw(figure, box, item, finding)
                        caption = _caption(name.removeprefix(audit.root), finding.detail if i == 0 else "", item)
                        figure.text(
                            left / width,
                            (y - _CELL - 0.05) / height,
                            "\n".join(caption),
                            va="top",
                            fontsize=_FONT_SIZE,
                            color=INK,
                        )
                    x += _width_of(finding) + _GAP
                y -= _CELL + _CAPTION
    return figure


def _pictures(finding: Finding) -> int:
    """The number of images shown for a finding."""
    return min(len(finding.files), 4)


def _width_of(finding: Finding) -> float:
    """The width of a finding's images, in inches."""
    return _pictures(finding) * (_CELL + _GAP) - _GAP


def _rows(findings: list[Finding]) -> list[list[Finding]]:
    """Findings in rows; a finding is not broken across rows."""
    rows: list[list[Finding]] = []
    room = 0
    for finding in findings:
        if _pictures(finding) > room:
            rows.append([])
            room = _COLUMNS
        rows[-1].append(finding)
        room -= _pictures(finding)
    return rows


def _background(figure: Figure, box: tuple[float, float, float, float]) -> None:
    axes = figure.add_axes(box, facecolor=PALE)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _draw(figure: Figure, box: tuple[float, float, float, float], item: Item | None, finding: Finding) -> None:
    axes = figure.add_axes(box)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.patch.set_visible(False)
    pixels = None if item is None else _read(item)
    if pixels is None:
        axes.patch.set_visible(True)
        axes.set_facecolor(PALE)
        text = "\n".join(wrap(finding.detail if finding.kind == "unreadable" else "not shown", 5))
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=_FONT_SIZE, color=GREY)
    else:
        # Small images are shown with sharp pixels.
        few = max(pixels.shape[:2]) < 64
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest" if few else "antialiased")
        axes.set_anchor("C")


def _read(item: Item) -> Pixels | None:
    """The pixels of an item, reduced for display; None if it can no longer be read."""
    try:
        pixels = item.read()
    except UnreadableImage:
        return None
    image = to_pil(pixels)
    image.thumbnail((256, 256))
    return np.array(image)


def _caption(name: str, detail: str, item: Item | None) -> list[str]:
    """The caption of an image: its name, and the finding's detail unless that replaces the image."""
    printable = name.encode("utf-8", "backslashreplace").decode()
    if not detail or item is None:
        return wrap(printable, 4, keep_end=True)
    return wrap(printable, 2, keep_end=True) + wrap(detail, 2)


def wrap(text: str, lines: int, keep_end: bool = False) -> list[str]:
    """Text wrapped to the width of an image, after spaces, slashes, hyphens and underscores.

    Text beyond `lines` is cut at the end or, with `keep_end`, at the start: file paths differ at their end.
    """
    filled = [""]
    for word in re.findall(r"[^\s/_-]+[\s/_-]*|[\s/_-]+", text):
        if filled[-1] and _width(filled[-1] + word.rstrip()) > _CELL:
            filled.append("")
        filled[-1] += word if _width(word) <= _CELL else _elide(word)
    filled = [line.rstrip() for line in filled]
    if len(filled) <= lines:
        return filled
    if keep_end:
        return [_elide(f"…{filled[-lines]}"), *filled[len(filled) - lines + 1 :]]
    return [*filled[: lines - 1], _elide(f"{filled[lines - 1]} …")]


def _elide(line: str) -> str:
    """A line with its middle elided to fit the width of an image."""
    short, half = line, len(line) // 2
    while _width(short) > _CELL and half > 1:
        half -= 1
        short = f"{line[:half]}…{line[-half:]}"
    return short


def _width(text: str) -> float:
    """The width of a caption line in inches."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # drawn as a box, whose width is measured
        return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=_FONT_SIZE), False)[0]) / 72
