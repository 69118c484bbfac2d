"""What an audit of a data set gives: the images that there are, everything that is wrong, and this in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from vitrail.data.images import Pixels, read_image

FEW = 5  # images, fewer of which are few for a class
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
    "imbalance": (
        "uneven classes",
        "The model will favour the large ones. Collect more of the small, or train with --balanced-sampling.",
    ),
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
    label: str  # as it is written
    labels: tuple[str, ...]  # what it is an example of: its class, or all labels that it has
    source: Path | Callable[[], Pixels | bytes]  # where its file is, or what gives its content or its pixels

    def read(self, channels: int | None = None, bits: int | None = None) -> Pixels:
        content = self.source if isinstance(self.source, Path) else self.source()
        return read_image(content, channels, bits) if isinstance(content, Path | bytes) else content


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
        lines = [f"{self.name}: {counted(self.images, 'image')}, {counted(len(self.counts), 'class', 'classes')}"]
        if self.sizes:
            sizes = ", ".join(f"{which} {h}x{w}" for which, (h, w) in self.sizes.items())
            modes = ", ".join(f"{count:,} {mode}" for mode, count in self.modes.items())
            lines += [f"height x width: {sizes}", f"kinds: {modes}"]
        if self.counts:
            lines += ["", *self._count_lines()]
        for kind, group in groupby(self.findings, key=lambda finding: finding.kind):
            lines += ["", *self._finding_lines(kind, list(group))]
        harm = f"{counted(self.errors, 'finding')} would hurt a training run." if self.errors else ""
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


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
