"""Sheets of captioned images: galleries, nearest neighbours, the contact sheet of an audit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from PIL import Image

from vitrail.charts.style import GREY, INK, PALE, short, styled

_CELL, _GAP = 1.25, 0.15  # inches
_HEAD, _LINE, _FOOT = 0.75, 0.115, 0.2  # height of a section title, of a caption line, and below captions
_SMALL = 6.5  # points
_FEW = 64  # smaller images are drawn without smoothing

Box = tuple[float, float, float, float]


class Caption(NamedTuple):
    """Text below an image, with a maximum number of lines."""

    text: str
    colour: str = INK
    lines: int = 2
    keep_end: bool = False  # elide the beginning of long text, as the end of a path identifies the file


@dataclass(frozen=True)
class Tile:
    """A captioned image, or a text in place of a missing image."""

    image: Image.Image | str
    captions: Sequence[Caption]
    frame: str | None = None  # colour of the frame
    joined: bool = False  # shares a background with the next tile


@dataclass(frozen=True)
class Section:
    """Rows of tiles under a title and a note."""

    title: str
    note: str
    rows: Sequence[Sequence[Tile]]
    colour: str = INK  # of the title


@styled
def sheet(*sections: Section) -> Figure:
    """Draws sections below each other, as wide as the longest row."""
    captions = [[[_wrapped(tile) for tile in row] for row in section.rows] for section in sections]
    feet = [[max(map(len, row)) * _LINE + _FOOT for row in rows] for rows in captions]
    width = max(len(row) for section in sections for row in section.rows) * (_CELL + _GAP) + _GAP
    height = sum(_HEAD + sum(_CELL + foot for foot in rows) for rows in feet)
    figure = Figure(figsize=(width, height))
    top = height
    for section, of_section, rows in zip(sections, captions, feet, strict=True):
        figure.text(_GAP / width, (top - 0.3) / height, section.title, fontsize=12, weight="bold", color=section.colour)
        figure.text(_GAP / width, (top - 0.52) / height, section.note, color=GREY)
        top -= _HEAD
        for row, lines, foot in zip(section.rows, of_section, rows, strict=True):
            _row(figure, row, lines, top)
            top -= _CELL + foot
    return figure


def _row(figure: Figure, row: Sequence[Tile], captions: Sequence[list[tuple[str, str]]], top: float) -> None:
    width, height = figure.get_size_inches()
    lefts = [_GAP + column * (_CELL + _GAP) for column in range(len(row))]
    y = (top - _CELL) / height
    for tile, left in zip(row, lefts, strict=True):
        if tile.joined:
            _blank(figure, (left / width, y, (2 * _CELL + _GAP) / width, _CELL / height), PALE)
    for tile, lines, left in zip(row, captions, lefts, strict=True):
        _picture(figure, (left / width, y, _CELL / width, _CELL / height), tile)
        for number, (line, colour) in enumerate(lines):
            below = (top - _CELL - 0.05 - number * _LINE) / height
            figure.text(left / width, below, line, va="top", fontsize=_SMALL, color=colour)


def _blank(figure: Figure, box: Box, colour: str) -> None:
    axes = figure.add_axes(box, facecolor=colour)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _picture(figure: Figure, box: Box, tile: Tile) -> None:
    axes = figure.add_axes(box)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(tile.frame is not None)
    axes.spines[:].set(color=tile.frame, linewidth=2)
    if isinstance(tile.image, str):
        axes.set_facecolor(PALE)
        axes.text(0.5, 0.5, "\n".join(wrap(tile.image, 5)), ha="center", va="center", fontsize=_SMALL, color=GREY)
        return
    axes.patch.set_visible(False)
    few = max(tile.image.size) < _FEW
    axes.imshow(tile.image, cmap="gray", vmin=0, vmax=255, interpolation="nearest" if few else "antialiased")
    axes.set_anchor("C")


def _wrapped(tile: Tile) -> list[tuple[str, str]]:
    """The caption lines of a tile, wrapped to its width, and their colours."""
    return [
        (line, caption.colour)
        for caption in tile.captions
        for line in wrap(
            caption.text if caption.keep_end else short(" ".join(caption.text.split()), 30 * caption.lines),
            caption.lines,
            caption.keep_end,
        )
    ]


def wrap(text: str, lines: int, keep_end: bool = False) -> list[str]:
    """Wraps text to the width of a tile, breaking after spaces, slashes, underscores and hyphens.

    Excess text is elided at the end, or at the beginning with `keep_end`.
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
    """Elides the middle of a line to fit the width of a tile."""
    fitting, half = line, len(line) // 2
    while _width(fitting) > _CELL and half > 1:
        half -= 1
        fitting = f"{line[:half]}…{line[-half:]}"
    return fitting


def _width(text: str) -> float:
    """Width of a caption line in inches."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # drawn as a box of the same width
        return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=_SMALL), False)[0]) / 72
