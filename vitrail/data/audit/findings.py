"""The result of an audit: counts, sizes and findings, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from vitrail.data.images import Pixels, read_image

FEW = 5  # a class with fewer images is reported
_SHOWN = 5  # findings per kind in the table
_ROWS = 24  # classes in the table

# Every kind of finding, worst first: its title, and what to do about it.
KINDS = {
    "layout": ("invalid folder layout", "Every split needs one folder of images per class."),
    "annotation": ("annotations that cannot be learnt from", "Say what their values mean, or repair them."),
    "leak": ("the same image in two splits", "Inflates the validation score. Remove one of each."),
    "conflict": ("the same image in two classes", "One of the labels is wrong. Correct or remove it."),
    "unreadable": (
        "unreadable files",
        "Training skips them, or stops if there are many. Repair or remove them.",
    ),
    "mixed": ("images with different channels", "All images must have the same channels. Convert or remove these."),
    "class": ("classes that cannot be learned", "Add images of them to train, or remove them."),
    "wordless": ("captions without a word", "Nothing can be learnt from them. Describe the image, or remove it."),
    "common": ("one caption for many images", "Write captions that name what is different."),
    "imbalance": (
        "class imbalance",
        "The model will favour the large classes. Collect more of the small ones, or train with --balanced-sampling.",
    ),
    "suspicious": (
        "labels that the run contradicts",
        "Look at them. The run may have memorised wrong labels of its own training images.",
    ),
    "box_empty": ("boxes without area", "They are left out of training. Draw them again, or remove them."),
    "box_outside": ("boxes outside their image", "They are left out of training. Check the image's size."),
    "box_swapped": ("boxes with swapped corners", "Training swaps them back. Correct the annotation."),
    "box_border": ("boxes that extend beyond the image", "Training cuts them off at the border."),
    "box_twice": ("boxes listed twice", "Training counts them once. Remove one of each."),
    "box_rare": ("classes with few boxes", "They are hardly learned. Add images that have them."),
    "turned": (
        "images with an EXIF orientation",
        "Their masks or boxes are taken as drawn on the image as displayed. If they lie on the stored pixels, remove "
        "the EXIF orientation; otherwise save the images upright.",
    ),
    "duplicate": ("identical files", "A random split may put copies on both sides."),
    "near": ("near-duplicates", "Each with its most similar image. A random split may separate them."),
    "empty": ("masks with one class only", "They are learnt from as they are. Look whether something was forgotten."),
    "pixels": ("the share of pixels of each class", "Rare classes need --class-weights or --loss dice."),
    "extension": (
        "wrong file extensions",
        "The content has another format. Rename the files: those without an image extension are skipped.",
    ),
    "loose": ("images outside the class folders", "They are skipped. Move them into a class folder."),
    "few": ("classes with few images", f"Fewer than {FEW} training images are hardly learned."),
    "repeated": ("captions of several images", "In a batch they are matches of each other, not mismatches."),
    "long": ("long captions", "More than 96 bytes are cut. Use a larger --context, or --tokenizer bpe."),
    "blank": ("blank images", "They have a single colour. Remove them unless that is intended."),
    "size": ("unusual sizes", "Much smaller or narrower than the others: resizing leaves little of them."),
}


@dataclass(frozen=True)
class Finding:
    """One problem; an "error" would harm a training run."""

    kind: str  # a key of KINDS
    severity: Literal["error", "note"]
    detail: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Item:
    """An image listed in a data set, readable or not."""

    name: str
    split: str
    label: str  # as text
    labels: tuple[str, ...]  # its class, or all its labels
    source: Path | Callable[[], Pixels | bytes]  # its file, or a function that returns its content or pixels

    def read(self, channels: int | None = None, bits: int | None = None) -> Pixels:
        content = self.source if isinstance(self.source, Path) else self.source()
        return read_image(content, channels, bits) if isinstance(content, Path | bytes) else content


@dataclass(frozen=True)
class Audit:
    """The content of a data set and the problems found in it."""

    name: str
    root: str  # the common prefix of the file names
    splits: tuple[str, ...]
    counts: dict[str, dict[str, int]]  # class: split: readable images
    sizes: dict[str, tuple[int, int]]  # smallest, median, largest: h, w
    modes: dict[str, int]  # images per mode: "colour", "grey", …
    findings: tuple[Finding, ...]  # worst first
    items: tuple[Item, ...] = field(repr=False)  # readable images
    sheet: Path | None = None

    @property
    def images(self) -> int:
        return len(self.items)

    @property
    def errors(self) -> int:
        """The number of findings that would harm a training run."""
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
        """The audit as text."""
        classes = f", {plural(len(self.counts), 'class', 'classes')}" if self.counts else ""
        lines = [f"{self.name}: {plural(self.images, 'image')}{classes}"]
        if self.sizes:
            sizes = ", ".join(f"{which} {h}x{w}" for which, (h, w) in self.sizes.items())
            modes = ", ".join(f"{count:,} {mode}" for mode, count in self.modes.items())
            lines += [f"height x width: {sizes}", f"kinds: {modes}"]
        if self.counts:
            lines += ["", *self._count_lines()]
        for kind, group in groupby(self.findings, key=lambda finding: finding.kind):
            lines += ["", *self._finding_lines(kind, list(group))]
        errors = f"{plural(self.errors, 'finding')} would harm a training run." if self.errors else ""
        lines += ["", errors or ("No finding would harm a training run." if self.findings else "No problems found.")]
        if self.sheet is not None:
            lines.append(f"The images are in {self.sheet}.")
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
    """Findings grouped by kind: kinds with an error first, then in the order of KINDS."""
    with_errors = {finding.kind for finding in findings if finding.severity == "error"}
    order = list(KINDS)
    return tuple(sorted(findings, key=lambda f: (f.kind not in with_errors, order.index(f.kind), f.severity)))


def plural(number: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 image", "1,200 images"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
