"""How targets are stored: in the index, from which vitrail reads them, and in a file beside each image, for others.

Masks are the exception: the index has only their places and the pixels of each class. Boxes are padded to the most that
an image has.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.dataset import Array, Targets
from vitrail.data.masks.raw import Values, read_values
from vitrail.data.masks.values import Classes, Mask, Seen
from vitrail.data.pixels import UnreadableImage
from vitrail.data.shards.split import Shards
from vitrail.tasks import Boxes, Masks, Task
from vitrail.tasks.captions import unpack
from vitrail.tasks.mask_scores import IGNORE
from vitrail.tasks.placement import object_array

_PLACE = 5  # numbers of a mask before those of its classes: offset, bytes, height, width, pixels without a class

Stored = tuple[bytes, str, Callable[[int], Any]]  # a file, its extension, and the row of the index by the file's offset


def column(task: Task, targets: Targets) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The type and shape of a target in the index."""
    if isinstance(task, Masks):
        return np.dtype("<i8"), (_PLACE + len(task.classes),)
    if isinstance(task, Boxes):
        return np.dtype("<f4"), (max(1, *map(len, targets)), max(boxes.shape[1] for boxes in targets))
    return targets.dtype.newbyteorder("<"), targets.shape[1:]


def stored(task: Task, target: Any, shape: tuple[int, ...]) -> Stored:
    """The target of an image as a file of the shard and as a row of the index, of this shape."""
    if isinstance(task, Masks):
        return _stored_mask(target, len(task.classes))
    if isinstance(task, Boxes):
        row = np.full(shape, np.nan, np.float32)
        row[: len(target), : target.shape[1]] = target
        objects = [
            {"class": task.classes[int(kind)], "box": box, "ignored": bool(ignored)}
            | ({"area": area[0]} if area else {})
            for kind, *box, ignored, area in ((*each[:6], each[6:]) for each in target.tolist())
        ]
        return json.dumps({"objects": objects}).encode(), ".json", lambda _: row
    if task.single:
        return str(int(target)).encode(), ".cls", lambda _: target
    if task.several:
        return "\n".join(unpack(target)).encode(), ".txt", lambda _: target
    ((text, _),) = task.describe(target[None])
    return json.dumps({"label": text, "target": target.tolist()}).encode(), ".json", lambda _: target


def restored(kind: type[Task], targets: Array, classes: Sequence[str], store: Shards, start: int) -> Targets:
    """The targets of the rows of an index, which begin at row `start` of a store; raises ValueError for bad ones."""
    form, count = (targets.dtype.str, targets.shape[1:]), len(classes)
    if kind is Masks:
        good = form == ("<i8", (_PLACE + count,)) and bool((targets >= 0).all())
        good = good and bool((targets[:, 2] * targets[:, 3] == targets[:, 4:].sum(axis=1)).all())
    elif kind is Boxes:
        good = form[0] == "<f4" and form[1][1:] in ((6,), (7,)) and _are_boxes(targets, count)
    elif kind.single:
        good = form == ("<i8", ()) and bool(((targets >= 0) & (targets < count)).all())
    elif kind.several:
        good = form[0] == "|u1" and len(form[1]) == 2
    else:
        good = form == ("<f4", (count,)) and bool(np.isfinite(targets).all())
    if not good:
        raise ValueError(f"its targets are not those of {kind.title} with {count} {kind.many}")
    if kind is Masks:
        return _masks(targets, classes, store, start)
    if kind is Boxes:
        return object_array([row[: np.count_nonzero(~np.isnan(row[:, 0]))] for row in targets])
    return targets


def _are_boxes(rows: Array, classes: int) -> bool:
    """Whether rows (N, M, 6 or 7) have boxes first, with a class and ordered corners, and NaN behind them."""
    there = ~np.isnan(rows[..., 0])
    boxes = rows[there]
    first = there == (np.arange(rows.shape[1]) < there.sum(axis=1)[:, None])
    known = (boxes[:, 0] >= 0) & (boxes[:, 0] < classes) & (boxes[:, 0] % 1 == 0)
    ordered = (boxes[:, 1:3] < boxes[:, 3:5]).all(axis=1) & np.isfinite(boxes).all(axis=1)
    return bool(first.all() and (known & ordered).all())


# Masks


@dataclass(frozen=True, eq=False)
class ShardMask:
    """A PNG file of class numbers in a shard, that of the image in a row."""

    store: Shards
    row: int
    place: tuple[int, int]  # offset and size
    size: tuple[int, int]  # height and width

    @property
    def name(self) -> str:
        return f"the mask of {self.store.name(self.row)}"

    def values(self) -> Values:
        values = read_values(io.BytesIO(self.store.member(self.row, *self.place)))
        if values.shape != self.size:
            raise UnreadableImage(f"its shape is {values.shape}, but {self.size} in the index")
        return values

    def __repr__(self) -> str:
        return f"{self.place}"


def _nowhere(classes: int) -> int:
    """The value of pixels without a class."""
    return 2**8 - 1 if classes < 2**8 else 2**16 - 1


def _stored_mask(mask: Any, classes: int) -> Stored:
    labels, stream, nowhere = mask.labels(), io.BytesIO(), _nowhere(classes)
    kind = np.uint8 if nowhere < 2**8 else np.uint16
    Image.fromarray(np.where(labels == IGNORE, nowhere, labels).astype(kind)).save(stream, "PNG")
    content, counts = stream.getvalue(), np.bincount(labels[labels != IGNORE].ravel(), minlength=classes)
    rest = np.count_nonzero(labels == IGNORE)
    return content, ".mask.png", lambda offset: (offset, len(content), *labels.shape, rest, *counts)


def _masks(rows: Array, classes: Sequence[str], store: Shards, start: int) -> Targets:
    nowhere = _nowhere(len(classes))
    known = Classes(tuple(classes), {k: k for k in range(len(classes))} | {nowhere: IGNORE})
    found = []
    for i, (offset, size, h, w, *counts) in enumerate(rows.tolist()):
        pixels = dict(zip((nowhere, *range(len(classes))), counts, strict=True))
        seen = Seen((h, w), {value: count for value, count in pixels.items() if count})
        found.append(Mask(ShardMask(store, start + i, (offset, size), (h, w)), known, seen))
    return object_array(found)
