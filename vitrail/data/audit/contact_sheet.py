"""The contact sheet of an audit: the images of its findings, with duplicates side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.figure import Figure
from PIL import Image

from vitrail.charts.style import INK, ORANGE
from vitrail.charts.tiles import Caption, Section, Tile, sheet
from vitrail.data.audit.findings import KINDS, Audit, Finding, Item
from vitrail.data.pixels import UnreadableImage, thumbnail

_COLUMNS = 8  # images in a row
_LIMIT = 2 * _COLUMNS  # images per kind of finding
_PER_FINDING = 4  # images of one finding


def sections(audit: Audit) -> list[tuple[str, list[Finding]]]:
    """The kinds of findings that have images, each with the findings that are shown."""
    found = []
    for kind, group in groupby(audit.findings, key=lambda finding: finding.kind):
        findings, images = [], 0
        for finding in (finding for finding in group if finding.files and kind != "layout"):
            images += len(_files(finding))
            if images <= _LIMIT:
                findings.append(finding)
        if findings:
            found.append((kind, findings))
    return found


def contact_sheet(audit: Audit) -> Figure:
    """One section per kind of finding, worst first."""
    items = {item.name: item for item in audit.items}
    return sheet(*(_section(audit, items, kind, findings) for kind, findings in sections(audit)))


def _section(audit: Audit, items: Mapping[str, Item], kind: str, findings: Sequence[Finding]) -> Section:
    every = [finding for finding in audit.findings if finding.kind == kind]
    shown, total = sum(len(_files(finding)) for finding in findings), sum(len(finding.files) for finding in every)
    note = f"{shown} of {total:,} images" if shown < total else f"{shown} image{'s' if shown > 1 else ''}"
    colour = ORANGE if any(finding.severity == "error" for finding in every) else INK
    rows: list[list[Tile]] = []
    for finding in findings:
        tiles = _tiles(finding, items, audit.root)
        if not rows or len(rows[-1]) + len(tiles) > _COLUMNS:  # no finding is broken over two rows
            rows.append([])
        rows[-1] += tiles
    return Section(KINDS[kind][0], note, rows, colour)


def _files(finding: Finding) -> tuple[str, ...]:
    """The files of a finding that are shown."""
    return finding.files[:_PER_FINDING]


def _tiles(finding: Finding, items: Mapping[str, Item], root: str) -> list[Tile]:
    """The images of a finding; its detail is the caption of the first, or replaces one that cannot be read."""
    files, tiles = _files(finding), []
    for number, name in enumerate(files):
        item = items.get(name)
        path = name.removeprefix(root).encode("utf-8", "backslashreplace").decode()  # a file name may be no text
        detail = finding.detail if number == 0 and item is not None else ""
        captions = [Caption(path, lines=2 if detail else 4, keep_end=True), *([Caption(detail)] if detail else [])]
        image = _read(item) or (finding.detail if finding.kind == "unreadable" else "not shown")
        tiles.append(Tile(image, captions, joined=number + 1 < len(files)))
    return tiles


def _read(item: Item | None) -> Image.Image | None:
    """The image of an item; None if there is none or it cannot be read."""
    try:
        return None if item is None else thumbnail(item.read())
    except UnreadableImage:
        return None
