"""Labels or numbers for image files: read ahead by threads, predicted in batches, written as they come.

However many files there are, the pixels of three batches are the most that is in memory.
"""

from __future__ import annotations

import csv
import glob
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
from torch import Tensor

from vitrail.config import Task
from vitrail.data.folder import images_below, is_image
from vitrail.data.images import Pixels, UnreadableImage, read_image
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import Model
from vitrail.progress import log
from vitrail.weights import Card

Format = Literal["table", "csv", "json"]

_TOP = 5  # classes per image, by default


@dataclass(frozen=True)
class Prediction:
    """What a model says of a file; one that could not be read has an error instead.

    The likeliest classes, or all labels above their thresholds, best first; or the names of numbers with `values`.
    """

    file: str
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    values: tuple[float, ...] = ()  # of a regression, in the units of the data
    task: Task = "multiclass"


def classify(
    model: Model,
    card: Card,
    files: Iterable[str],
    top: int | None,
    batch_size: int,
    workers: int,
    device: str,
) -> Iterator[Prediction]:
    """The predictions of an open model, one by one: `files` is consumed only as far as it is needed."""
    with closing(run_files(model, files, card.preprocess, batch_size, workers, device)) as answers:
        for file, outputs in answers:
            if isinstance(outputs, UnreadableImage):
                yield Prediction(file, error=str(outputs), task=card.task)
            else:
                yield say(file, outputs, card, top)


def run_files(
    compute: Callable[[Tensor], Tensor],
    files: Iterable[str],
    preprocess: Preprocess,
    batch_size: int,
    workers: int,
    device: str,
) -> Generator[tuple[str, Tensor | UnreadableImage], None, None]:
    """What `compute`, a model or a method of it, makes of every file; or why a file cannot be read."""
    with closing(read_ahead(files, preprocess, workers, ahead=2 * batch_size)) as read:
        while batch := list(islice(read, batch_size)):
            good = [pixels for _, pixels in batch if not isinstance(pixels, UnreadableImage)]
            outputs = iter(_outputs(compute, preprocess, good, device) if good else ())
            for file, pixels in batch:
                yield file, pixels if isinstance(pixels, UnreadableImage) else next(outputs)


def _outputs(compute: Callable[[Tensor], Tensor], preprocess: Preprocess, pixels: list[Pixels], device: str) -> Tensor:
    with torch.inference_mode():
        return compute(preprocess.normalise(torch.from_numpy(np.stack(pixels)).to(device))).float().cpu()


def say(file: str, outputs: Tensor, card: Card, top: int | None) -> Prediction:
    """What a model's outputs for an image mean, by its task."""
    if card.task == "regression":
        scaled = zip(outputs.tolist(), card.target_std, card.target_mean, strict=True)
        values = tuple(output * std + mean for output, std, mean in scaled)
        return Prediction(file, card.classes, values=values, task=card.task)
    if card.task == "multilabel":
        chances = outputs.double().sigmoid().tolist()
        given = [i for i, threshold in enumerate(card.thresholds) if chances[i] >= threshold]
    else:
        chances = outputs.softmax(dim=0).tolist()
        given, top = list(range(len(chances))), top or _TOP
    best = sorted(given, key=lambda i: -chances[i])[:top]
    return Prediction(file, tuple(card.classes[i] for i in best), tuple(chances[i] for i in best), task=card.task)


def read_ahead(
    files: Iterable[str], preprocess: Preprocess, workers: int, ahead: int
) -> Generator[tuple[str, Pixels | UnreadableImage], None, None]:
    """Reads files in threads and in order, at most `ahead` of them before they are asked for."""

    def read(file: str) -> Pixels | UnreadableImage:
        try:
            return preprocess.pixels(read_image(file, preprocess.channels, preprocess.bits))
        except UnreadableImage as error:
            return error

    waiting: deque[tuple[str, Future[Pixels | UnreadableImage]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read")
    try:
        for file in files:
            waiting.append((file, pool.submit(read, file)))
            if len(waiting) == ahead:
                first, pixels = waiting.popleft()
                yield first, pixels.result()
        for rest, pixels in waiting:
            yield rest, pixels.result()
    finally:
        pool.shutdown(cancel_futures=True)


def listed(images: Sequence[str | Path]) -> Iterator[str]:
    """The image files in files, folders and globs, in their order; a UserError at once if one of them holds none."""
    if not images:
        raise UserError("There are no images: give image files, folders or globs.")
    sources = [str(source) for source in images]
    for source in sources:
        if next(find(source), None) is None:
            raise UserError(_nothing(source))
    return chain.from_iterable(map(find, sources))


def find(source: str) -> Iterator[str]:
    """The image files that a path or a glob (*, ?, **) stands for; a file that is named is taken as it is."""
    if Path(source).is_dir():
        yield from map(str, images_below(source, _left_out))
    elif Path(source).exists():
        yield source
    else:
        pattern = source.replace("[", "[[]")  # brackets are more often part of a name than a pattern
        for match in sorted(glob.iglob(pattern, recursive=True)):  # noqa: PTH207  # Path globs no absolute paths
            if not Path(match).is_dir():
                yield from [match] if is_image(match) else []
            elif "**" not in source:  # ** finds by itself what is in a folder
                yield from map(str, images_below(match, _left_out))


def _left_out(error: OSError) -> None:
    log.warning("%s cannot be read and is left out: %s.", error.filename, error.strerror)


def _nothing(source: str) -> str:
    if Path(source).is_dir():
        return f"The folder {source} holds no image, nor does any folder in it."
    if "*" in source or "?" in source:
        return f"No image matches {source}. Only names that end like images do are matched: .jpg, .png, .webp, …"
    return f"There is no file or folder {source}."


def write(predictions: Iterable[Prediction], format: Format, stream: TextIO) -> int:
    """Writes predictions as they come and returns the number of files that could not be read."""
    failures = 0

    def counted() -> Iterator[Prediction]:
        nonlocal failures
        for prediction in predictions:
            failures += prediction.error is not None
            yield prediction
            stream.flush()

    {"table": _write_table, "csv": _write_csv, "json": _write_json}[format](counted(), stream)
    return failures


def _write_table(predictions: Iterator[Prediction], stream: TextIO, block: int = 32) -> None:
    """For people: columns are aligned over a block of lines, so a table need not end before it is shown."""
    widths = [0, 0]
    while lines := list(islice(predictions, block)):
        widths[0] = max(widths[0], *(len(p.file) for p in lines))
        widths[1] = max(widths[1], *(len(p.labels[0]) for p in lines if p.labels), 0)
        for p in lines:
            file = p.file.ljust(widths[0])
            if p.error is not None:
                stream.write(f"{file}  — unreadable: {p.error}\n")
            elif p.values:
                pairs = zip(p.labels, p.values, strict=True)
                stream.write(f"{file}  {'  '.join(f'{name} {value:.6g}' for name, value in pairs)}\n")
            elif not p.labels:
                stream.write(f"{file}  (no label)\n")
            else:
                shares = zip(p.labels[1:], p.probabilities[1:], strict=True)
                others = ", ".join(f"{label} {probability:.1%}" for label, probability in shares)
                line = f"{file}  {p.labels[0].ljust(widths[1])}  {p.probabilities[0]:6.1%}  {others}"
                stream.write(line.rstrip() + "\n")


def _write_csv(predictions: Iterator[Prediction], stream: TextIO) -> None:
    """The first file that could be read tells the columns, so failures before it have to wait."""
    first: list[Prediction] = []
    for p in predictions:
        first.append(p)
        if p.error is None:
            break
    task = first[0].task if first else "multiclass"
    ranks = max([1, *(len(p.labels) for p in first)])
    pairs = [["label", "probability"], *([f"label_{i}", f"probability_{i}"] for i in range(2, ranks + 1))]
    columns = {
        "multiclass": [*chain(*pairs)],
        "multilabel": ["labels", "probabilities"],
        "regression": list(first[-1].labels) if first else [],
    }[task]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["file", *columns, "error"])
    for p in chain(first, predictions):
        shares = [f"{share:.6f}" for share in p.probabilities]
        if p.error is not None:
            cells = []
        elif task == "multilabel":  # as a table that can be trained on has them
            cells = ["|".join(p.labels), "|".join(shares)]
        elif task == "regression":
            cells = [f"{value:.8g}" for value in p.values]
        else:
            cells = [*chain(*zip(p.labels, shares, strict=True))]
        writer.writerow([p.file, *cells, *[""] * (len(columns) - len(cells)), p.error or ""])


def _write_json(predictions: Iterator[Prediction], stream: TextIO) -> None:
    for p in predictions:
        if p.task == "regression":
            said: dict[str, object] = {"values": dict(zip(p.labels, p.values, strict=True))}
        else:
            said = {"labels": p.labels, "probabilities": p.probabilities}
        stream.write(json.dumps({"file": p.file, **said, "error": p.error}) + "\n")
