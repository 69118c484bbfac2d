"""ImageNet-ReaL: "Are we done with ImageNet?", https://arxiv.org/abs/2006.07159.

Its file, real.json, has a list of right classes for each of ImageNet's 50,000 validation images, in the order of their
numbers; images without a right class are not counted. Classes are numbered in the order of their WordNet ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from vitrail.device import choose_device
from vitrail.errors import UserError, shortlist
from vitrail.evaluate.predict import listed
from vitrail.files import read_text, reading, write_text
from vitrail.progress import log
from vitrail.runs import EngineName
from vitrail.runs.predictor import Predictor
from vitrail.runs.run import Run

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
_SPLITS = ("val", "validation", "valid")


@dataclass(frozen=True)
class RealScores:
    """Accuracy by ImageNet-ReaL."""

    images: int  # with a right class
    skipped: int  # without one
    top1: float
    unreadable: tuple[str, ...] = ()
    folder: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {"method": "real", "images": self.images, "skipped": self.skipped, "top1": round(self.top1, 6)}

    def table(self) -> str:
        lines = [
            "ImageNet-ReaL",
            f"images             {self.images:>7,}",
            f"without a label    {self.skipped:>7,}",
            f"top-1              {self.top1:>7.2%}",
        ]
        if self.unreadable:
            lines.append(f"{len(self.unreadable)} images could not be read: {shortlist(self.unreadable, 5)}")
        return "\n".join(lines)


@cache
def imagenet_classes() -> dict[str, str]:
    """The names of ImageNet's 1,000 classes by WordNet id, in the order of the classes. Names are WordNet's."""
    text = Path(__file__).with_name("imagenet_classes.tsv").read_text(encoding="utf-8")
    return dict(line.split("\t") for line in text.splitlines())


def evaluate_real(
    run: str | Path,
    data: str | Path | None,
    real: str | Path,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
    out: str | Path | None = None,
) -> RealScores:
    """Measures a run's predictions for ImageNet's validation images by ImageNet-ReaL."""
    if data is None:
        raise UserError("--real needs ImageNet's validation images. Give their folder.")
    right = _right(Path(real))
    files = _numbered(Path(data), len(right))
    predictor = Predictor(run, choose_device(device), engine=engine)
    place = _places(predictor.card.classes)
    wanted = [file for number, file in files.items() if right[number]]
    numbers = {file: number for number, file in files.items()}
    hits, count, unreadable = 0, 0, []
    for prediction in predictor(wanted, 1, batch_size=batch_size, workers=workers):
        if prediction.error is not None:
            unreadable.append(prediction.file)
            continue
        count += 1
        hits += place[prediction.labels[0]] in right[numbers[prediction.file]]
    if not count:
        raise UserError(f"No image in {data} has a right class and can be read.")
    scores = RealScores(count, len(files) - len(wanted), hits / count, tuple(unreadable))
    folder = Path(out) if out is not None else Run.of(run).evaluation(Path(data).name, "val", "real")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": predictor.card.model, "data": Path(data).name, "split": "val"}
    write_text(folder / "metrics.json", json.dumps(about | scores.to_json(), indent=2) + "\n")
    return replace(scores, folder=folder)


def _right(path: Path) -> list[set[int]]:
    """The right classes of each image."""
    with reading(path, "a real.json, a list of lists of classes"):
        document = json.loads(read_text(path))
    lists = document if isinstance(document, list) else [None]
    if not all(isinstance(labels, list) and all(type(n) is int and 0 <= n < 1000 for n in labels) for labels in lists):
        raise UserError(f"{path} is not a real.json: it must have a list of classes from 0 to 999 for each image.")
    return list(map(set, lists))


def _numbered(folder: Path, images: int) -> dict[int, str]:
    """The validation images by number, from 0, in the order of their numbers."""
    inner = next((folder / name for name in _SPLITS if (folder / name).is_dir()), folder)
    files = map(str, listed([inner]))
    found = {int(match[1]) - 1: file for file in files if (match := _NUMBER.search(Path(file).name))}
    if not found:
        raise UserError(f"ImageNet-ReaL needs names like ILSVRC2012_val_00000001.JPEG, but {inner} has none.")
    if max(found) >= images:
        raise UserError(f"The labels are for {images:,} images, but {found[max(found)]} has a higher number.")
    return dict(sorted(found.items()))


def _places(classes: Sequence[str]) -> dict[str, int]:
    """ImageNet's number of each class of a model, by WordNet id, by name, or by order if it has 1,000 classes."""
    known = imagenet_classes()
    ids, names = list(known), list(known.values())
    for order in (ids, names):
        if set(classes) <= set(order):
            return {name: order.index(name) for name in classes}
    if len(classes) == len(ids):
        log.info("The model's 1,000 classes are taken to be in ImageNet's order.")
        return {name: i for i, name in enumerate(classes)}
    raise UserError(
        f"ImageNet-ReaL is for ImageNet's 1,000 classes, but the model has {len(classes)}: "
        f"{shortlist(list(classes), 3)}."
    )
