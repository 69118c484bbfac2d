"""The contact sheet of an audit: the pictures that it complains about, side by side where they belong together."""

from __future__ import annotations

import textwrap
from itertools import groupby

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from vitrail.data.audit import KINDS, Audit, Finding, Item
from vitrail.data.pixels import Pixels, UnreadableImage, picture
from vitrail.evaluate.figures import GREY, INK, ORANGE, PALE, STYLE

_ACROSS = 8  # pictures in a row
_MOST = 2 * _ACROSS  # pictures of a kind
_CELL, _GAP = 1.25, 0.15  # inches
_CAPTION, _HEAD = 0.62, 0.55
_LETTERS = 22  # that fit under a picture in a line

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
                        _draw(figure, box, items.get(name), finding)
                        caption = _caption(name.removeprefix(audit.root), 2 if i == 0 and finding.detail else 4)
                        under = caption + (["\n".join(_wrap(finding.detail, 2))] if i == 0 and finding.detail else [])
                        figure.text(
                            left / width,
                            (y - _CELL - 0.05) / height,
                            "\n".join(under),
                            va="top",
                            fontsize=6.5,
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
        text = "\n".join(_wrap(finding.detail if finding.kind == "unreadable" else "not shown", 5))
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=7, color=GREY)
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


def _caption(name: str, lines: int) -> list[str]:
    """A path in lines; of one that is too long the beginning is left out, for its end tells files apart."""
    printable = name.encode("utf-8", "backslashreplace").decode()
    most = lines * _LETTERS
    if len(printable) > most:
        printable = "…" + printable[1 - most :]
    return [printable[at : at + _LETTERS] for at in range(0, len(printable), _LETTERS)]


def _wrap(text: str, lines: int) -> list[str]:
    return textwrap.wrap(text, _LETTERS, max_lines=lines, placeholder=" …")
