"""The contact sheet of an audit: the pictures that it complains about, side by side where they belong together."""

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
from vitrail.data.pixels import Pixels, UnreadableImage, picture

_ACROSS = 8  # pictures in a row
_MOST = 2 * _ACROSS  # pictures of a kind
_CELL, _GAP = 1.25, 0.15  # inches
_CAPTION, _HEAD = 0.62, 0.55
_SMALL = 6.5  # points

Section = tuple[str, list[Finding]]


def sections(audit: Audit) -> list[Section]:
    """The kinds of findings that have pictures, each with those that are shown."""
    found = []
    for kind, group in groupby(audit.findings, key=lambda finding: finding.kind):
        findings, pictures = [], 0
        for finding in (finding for finding in group if finding.files and kind != "layout"):
            pictures += _pictures(finding)
            if pictures <= _MOST:
                findings.append(finding)
        if findings:
            found.append((kind, findings))
    return found


def contact_sheet(audit: Audit) -> Figure:
    """One section for every kind of finding, worst first, and a caption under every picture."""
    items = {item.name: item for item in audit.items}
    parts = [(kind, _rows(findings)) for kind, findings in sections(audit)]
    width = _ACROSS * (_CELL + _GAP) + _GAP
    height = sum(_HEAD + len(rows) * (_CELL + _CAPTION) for _, rows in parts) + _GAP
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        y = height
        for kind, rows in parts:
            harmful = [finding.severity for finding in audit.findings if finding.kind == kind]
            mark = ORANGE if "error" in harmful else INK
            title = KINDS[kind][0]
            figure.text(_GAP / width, (y - 0.32) / height, title, fontsize=12, weight="bold", color=mark)
            count = sum(_pictures(finding) for row in rows for finding in row)
            every = sum(len(finding.files) for finding in audit.findings if finding.kind == kind)
            note = f"{count} of {every:,} pictures" if count < every else f"{count:,} pictures" if count > 1 else ""
            figure.text(1 - _GAP / width, (y - 0.32) / height, note, ha="right", color=GREY)
            y -= _HEAD
            for row in rows:
                x = _GAP
                for finding in row:
                    shown = finding.files[: _pictures(finding)]
                    # Those that belong together touch, on one ground.
                    ground = (x / width, (y - _CELL) / height, _across(finding) / width, _CELL / height)
                    if len(shown) > 1:
                        _ground(figure, ground)
                    for i, name in enumerate(shown):
                        left = x + i * (_CELL + _GAP)
                        box = (left / width, (y - _CELL) / height, _CELL / width, _CELL / height)
                        item = items.get(name)
                        _draw(figure, box, item, finding)
                        under = _caption(name.removeprefix(audit.root), finding.detail if i == 0 else "", item)
                        figure.text(
                            left / width,
                            (y - _CELL - 0.05) / height,
                            "\n".join(under),
                            va="top",
                            fontsize=_SMALL,
                            color=INK,
                        )
                    x += _across(finding) + _GAP
                y -= _CELL + _CAPTION
    return figure


def _pictures(finding: Finding) -> int:
    """How many pictures of a finding are shown."""
    return min(len(finding.files), 4)


def _across(finding: Finding) -> float:
    return _pictures(finding) * (_CELL + _GAP) - _GAP


def _rows(findings: list[Finding]) -> list[list[Finding]]:
    """Findings in lines, none of which is broken."""
    rows: list[list[Finding]] = []
    room = 0
    for finding in findings:
        if _pictures(finding) > room:
            rows.append([])
            room = _ACROSS
        rows[-1].append(finding)
        room -= _pictures(finding)
    return rows


def _ground(figure: Figure, box: tuple[float, float, float, float]) -> None:
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
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=_SMALL, color=GREY)
    else:
        # A picture of a few pixels is shown as these.
        few = max(pixels.shape[:2]) < 64
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest" if few else "antialiased")
        axes.set_anchor("C")


def _read(item: Item) -> Pixels | None:
    """The pixels of an item, no more than are needed; None where it has gone meanwhile."""
    try:
        pixels = item.read()
    except UnreadableImage:
        return None
    image = picture(pixels)
    image.thumbnail((256, 256))
    return np.array(image)


def _caption(name: str, detail: str, item: Item | None) -> list[str]:
    """The lines under a picture: its name, and what is wrong with it unless that stands in the picture's place."""
    printable = name.encode("utf-8", "backslashreplace").decode()
    if not detail or item is None:
        return wrap(printable, 4, keep_end=True)
    return wrap(printable, 2, keep_end=True) + wrap(detail, 2)


def wrap(text: str, lines: int, keep_end: bool = False) -> list[str]:
    """Text in lines as wide as a picture, broken behind spaces and the marks that part the words of a file's name.

    What is too much is left out at the end, or at the beginning: the end of a path tells files apart.
    """
    filled = [""]
    for word in re.findall(r"[^\s/_-]+[\s/_-]*|[\s/_-]+", text):
        if filled[-1] and _width(filled[-1] + word.rstrip()) > _CELL:
            filled.append("")
        filled[-1] += word if _width(word) <= _CELL else _without_middle(word)
    filled = [line.rstrip() for line in filled]
    if len(filled) <= lines:
        return filled
    if keep_end:
        return [_without_middle(f"…{filled[-lines]}"), *filled[len(filled) - lines + 1 :]]
    return [*filled[: lines - 1], _without_middle(f"{filled[lines - 1]} …")]


def _without_middle(line: str) -> str:
    """A line, without so much of its middle as makes it wider than a picture."""
    short, half = line, len(line) // 2
    while _width(short) > _CELL and half > 1:
        half -= 1
        short = f"{line[:half]}…{line[-half:]}"
    return short


def _width(text: str) -> float:
    """How many inches a line of a caption takes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it is as wide as the box in its place
        return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=_SMALL), False)[0]) / 72
