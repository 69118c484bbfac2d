"""Data sets of the package `datasets`: from the Hugging Face hub, in a folder that it saved, or in Parquet files.

Only what it stores is asked of it. Images are decoded by us, so that they are turned, flattened and refused alike,
whatever they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vitrail.data.arrays import class_numbers
from vitrail.data.dataset import Array, Found, Parts
from vitrail.data.folder import SPLITS, subfolders
from vitrail.data.images import ImageFacts, UnreadableImage, inspect_image
from vitrail.data.packed import Stored, from_stores
from vitrail.data.stream import StreamSplit
from vitrail.data.verify import verify
from vitrail.errors import UserError, nearest
from vitrail.progress import log, track
from vitrail.tasks import Multiclass

PREFIX = "hf:"
FILES = (".parquet", ".arrow")

_LABEL_NAMES = ("label", "labels", "class", "target", "category", "y")
_PEEK = 64  # images of a stream that tell how large they are

T = TypeVar("T")


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved this folder with `save_to_disk`."""
    names = {child.name for child in folder.iterdir()}
    return "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names


def holds_images(path: Path) -> bool:
    """Whether images lie in the Parquet or Arrow file itself, or in such files of the folder, instead of paths."""
    if path.is_dir():
        folders = [path, *(child for child in subfolders(path) if child.name.lower() in (*SPLITS, "data"))]
        files = sorted(file for folder in folders for end in FILES for file in folder.glob(f"*{end}"))
        return bool(files) and holds_images(files[0])
    if path.suffix == ".arrow":
        return True
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return False  # whoever opens the table says what is missing
    try:
        kinds = pyarrow.parquet.read_schema(path).types
    except (pyarrow.ArrowInvalid, OSError):
        return False
    types = pyarrow.types
    return any(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or (types.is_struct(kind) and "bytes" in [field.name for field in kind])
        for kind in kinds
    )


def open_hub(source: str, image_column: str | None, label_column: str | None, streaming: bool) -> Found:
    """A data set of the hub by its name, `hf:name` or `hf:name:config`; its cache and offline mode are respected."""
    datasets = _package(source)
    name, _, config = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(f"'{source}' names no data set: write hf:name or hf:name:config, as in hf:ylecun/mnist.")
    title = "-".join(filter(None, [name.rstrip("/").rpartition("/")[2], config]))
    load = partial(datasets.load_dataset_builder, name, config or None)
    return _open(source, title, load, image_column, label_column, streaming)


def open_files(path: Path, image_column: str | None, label_column: str | None, streaming: bool) -> Found:
    """A Parquet file, or a folder of Parquet or Arrow files, that hold the images themselves."""
    datasets = _package(path)
    if path.is_dir():
        load = partial(datasets.load_dataset_builder, str(path))
    else:
        load = partial(datasets.load_dataset_builder, path.suffix[1:], data_files={"train": str(path)})
    title = path.resolve().name if path.is_dir() else path.stem
    return _open(str(path), title, load, image_column, label_column, streaming)


def open_saved(folder: Path, image_column: str | None, label_column: str | None) -> Found:
    """A folder that `save_to_disk` wrote, of one split or several; its files are mapped into memory as they are."""
    datasets = _package(folder)
    loaded = _ask(str(folder), datasets.load_from_disk, str(folder))
    loaded = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    splits = {split: loaded[name] for split, name in _name_splits(loaded, str(folder)).items()}
    return _rows(str(folder), folder.resolve().name, splits, image_column, label_column)


def _package(source: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{source}: Hugging Face data sets need 'datasets': pip install 'vitrail[data]'") from error
    return datasets


def _ask(source: str, load: Callable[..., T], *given: Any, **settings: Any) -> T:
    """What the package answers; whatever it raises becomes a sentence."""
    try:
        return load(*given, **settings)
    except ConnectionError as error:
        raise UserError(
            f"{source} cannot be had: it is not in the cache of 'datasets', and the hub cannot be reached. Load it "
            "once where there is a network, or give a folder that `save_to_disk` wrote."
        ) from error
    except Exception as error:  # it has a class of its own for nearly every mistake, and passes others' on
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"{source} cannot be opened by 'datasets': {reason}.") from error


def _open(
    source: str,
    title: str,
    load: Callable[..., Any],
    image_column: str | None,
    label_column: str | None,
    streaming: bool,
) -> Found:
    builder = _ask(source, load)
    if streaming:
        return _stream(source, title, builder, load, image_column, label_column)
    _ask(source, builder.download_and_prepare)
    loaded = _ask(source, builder.as_dataset)
    splits = {split: loaded[name] for split, name in _name_splits(loaded, source).items()}
    return _rows(source, title, splits, image_column, label_column)


def _name_splits(splits: Iterable[str], source: str) -> dict[str, str]:
    """The names of the splits by ours. A single one is train, if its name is unknown; others of such names are left."""
    theirs = list(splits)
    if len(theirs) == 1:
        return {SPLITS.get(theirs[0].lower(), "train"): theirs[0]}
    named: dict[str, str] = {}
    for name in theirs:
        split = SPLITS.get(name.lower())
        if split is None:
            log.info("%s: the split '%s' is none of train, val and test, and is left out.", source, name)
        elif split in named:
            raise UserError(f"{source} has two {split} splits. Rename one.")
        else:
            named[split] = name
    if not named:
        raise UserError(f"{source} must have splits called train, validation or test, but has {', '.join(theirs)}.")
    return named


# Columns


def _columns(
    features: Mapping[str, Any] | None, source: str, image: str | None, label: str | None
) -> tuple[str, str, tuple[str, ...] | None]:
    """The columns of the images and the labels, and the names of the classes if they have some."""
    from datasets import ClassLabel, Image, Value

    if features is None:
        raise UserError(f"{source} does not say which columns it has, so it cannot be streamed. Leave --streaming out.")
    for given in (image, label):
        if given is not None and given not in features:
            raise UserError(
                f"{source} has no column '{given}'.{nearest(given, features)} It has {', '.join(features)}."
            )
    images = [name for name, kind in features.items() if isinstance(kind, Image)]
    named = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
    plain = [name for name, kind in features.items() if isinstance(kind, Value) and kind.dtype != "binary"]
    image = image or _only(images) or next((name for name in ("image", "img") if name in features), None)
    if image is None:
        raise UserError(f"{source}: which of its columns {', '.join(features)} has the images? Say --image-column.")
    label = label or _only(named) or _usual(named) or (None if named else _usual(plain) or _only(plain))
    if label is None:
        raise UserError(f"{source}: which of its columns {', '.join(features)} has the labels? Say --label-column.")
    log.info("%s: images are in the column '%s', labels in '%s'.", source, image, label)
    kind = features[label]
    return image, label, tuple(kind.names) if isinstance(kind, ClassLabel) else None


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _usual(names: Sequence[str]) -> str | None:
    return next((name for name in _LABEL_NAMES if name in names), None)


def _labelled(
    labels: Mapping[str, Sequence[Any]], names: tuple[str, ...] | None, source: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The classes, and the class numbers of every split that has labels: those of public test sets may be secret."""
    arrays: dict[str, Array] = {}
    for split, values in labels.items():
        if split != "train" and len(values) and all(value in (None, -1) for value in values):
            log.info("%s: the %s split has no labels and is left out.", source, split)
            continue
        if None in values:
            raise UserError(f"{source}: row {values.index(None)} of the {split} split has no label. Remove it.")
        if strange := [value for value in values if not isinstance(value, int | str)]:
            raise UserError(
                f"{source}: a label must be one number or text, but one of the {split} split is {strange[0]!r}. Say "
                "--label-column to take another column."
            )
        arrays[split] = np.array([int(value) if isinstance(value, bool) else value for value in values])
    classes, numbers = class_numbers(list(arrays.values()), names, source)
    return classes, dict(zip(arrays, numbers, strict=True))


def _content(cell: Mapping[str, Any] | None) -> bytes:
    """What an image's file holds; nothing if there is no image."""
    if cell is None:
        return b""
    if cell["bytes"] is not None:
        content: bytes = cell["bytes"]
        return content
    return Path(cell["path"]).read_bytes()


# Random access


@dataclass(frozen=True, eq=False)
class _Rows:
    """The images of a split, found by Arrow in files that are mapped into memory."""

    rows: Any
    column: str
    title: str

    def read(self, row: int) -> bytes:
        try:
            return _content(self.rows[row][self.column])
        except OSError as error:
            raise UnreadableImage(str(error.strerror or error).lower()) from error

    def inspect(self, row: int) -> ImageFacts:
        return inspect_image(self.read(row))

    def identity(self) -> Callable[[int], tuple[str, str]] | None:
        """What the images are remembered by once they are verified; None if they may change unnoticed."""
        version = self.version() if len(self.rows) else None
        return None if version is None else lambda row: (f"{self.column}/{row}", version)

    def name(self, row: int) -> str:
        return f"{self.title}/{row}"

    def version(self) -> str | None:
        if self.rows[0][self.column]["bytes"] is None:
            return None  # the rows hold the paths of files, of which `datasets` knows nothing
        return str(self.rows._fingerprint)


def _rows(
    source: str, title: str, splits: Mapping[str, Any], image_column: str | None, label_column: str | None
) -> Found:
    from datasets import Image

    image, label, names = _columns(next(iter(splits.values())).features, source, image_column, label_column)
    columns = {split: rows.select_columns([label]).with_format("arrow")[:][label] for split, rows in splits.items()}
    classes, targets = _labelled({split: column.to_pylist() for split, column in columns.items()}, names, source)
    parts = {}
    for split, numbers in targets.items():
        rows = splits[split].select_columns([image]).with_format(None)
        store = _Rows(_ask(source, rows.cast_column, image, Image(decode=False)), image, f"{title}/{split}")
        parts[split] = Stored(store, numbers, verify(range(len(numbers)), store.inspect, store.identity()))
    return from_stores(title, classes, parts, source)


# Streaming


@dataclass(frozen=True, eq=False)
class _Shards:
    """The shards of a split that is streamed."""

    rows: Any
    column: str
    name: str
    counts: Sequence[int]

    def read(self, shard: int) -> Iterator[bytes]:
        rows = iter(self.rows.shard(num_shards=len(self.counts), index=shard))
        while True:
            try:
                row = next(rows, None)
                if row is None:
                    return
                content = _content(row[self.column])
            except Exception as error:  # of the network, of the files, or of the package
                raise UserError(f"{self.name}: the stream broke off: {error}. Go on with --resume.") from error
            yield content


def _stream(
    source: str,
    title: str,
    builder: Any,
    load: Callable[..., Any],
    image_column: str | None,
    label_column: str | None,
) -> Found:
    from datasets import Image
    from datasets.packaged_modules.parquet.parquet import ParquetConfig

    loaded = _ask(source, builder.as_streaming_dataset)
    theirs = _name_splits(loaded, source)
    splits = {split: loaded[name] for split, name in theirs.items()}
    image, label, names = _columns(next(iter(splits.values())).features, source, image_column, label_column)
    if isinstance(builder.config, ParquetConfig):  # of which a column can be read alone
        column = _ask(source, _ask(source, load, columns=[label]).as_streaming_dataset)
        labels = {split: column[name] for split, name in theirs.items()}
    else:
        labels = {split: rows.select_columns([label]) for split, rows in splits.items()}
    read = {split: _ask(source, _read_labels, rows, label, f"labels of {split}") for split, rows in labels.items()}
    classes, targets = _labelled({split: list(chain(*shards)) for split, shards in read.items()}, names, source)
    if targets.keys() == {"train"}:
        log.info("%s has no split to validate on: what is held out is found by reading the stream again.", source)
    streams = {}
    for split in targets:
        rows = splits[split].select_columns([image])
        rows = _ask(source, rows.cast_column, image, Image(decode=False))
        streams[split] = _Shards(rows, image, f"{title}/{split}", [len(shard) for shard in read[split]])
    first = next(iter(streams.values()))
    every = Parts([(stream, len(targets[split])) for split, stream in streams.items()])
    try:
        facts = [inspect_image(content) for content in islice(first.read(0), _PEEK)]
    except UnreadableImage as error:
        raise UserError(
            f"One of the first images of {source} cannot be read: {error}. Without --streaming it is left out."
        ) from error
    if not facts:
        raise UserError(f"{source} has no images.")
    return Found(
        name=title,
        task=Multiclass(classes),
        parts={split: (rows, targets[split]) for split, rows in zip(streams, every.rows(), strict=True)},
        make=lambda _, rows, numbers: StreamSplit(*every.find(rows), numbers),
        size=(int(np.median([fact.h for fact in facts])), int(np.median([fact.w for fact in facts]))),
        channels=1 if all(fact.grey for fact in facts) else 3,
    )


def _read_labels(rows: Any, label: str, title: str) -> list[list[Any]]:
    """The labels of every shard."""
    shards = (rows.shard(num_shards=rows.num_shards, index=i) for i in range(rows.num_shards))
    return [
        [value for batch in shard.iter(batch_size=1000) for value in batch[label]]
        for shard in track(shards, title, total=rows.num_shards, unit="shard")
    ]
