"""Hugging Face `datasets`: from the hub, from `save_to_disk`, or from Parquet and Arrow files.

`datasets` only delivers the encoded images. We decode them, so that orientation, transparency and damaged files are
handled as for every other source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vitrail.data.dataset import Found, reads_labels
from vitrail.data.download import offline_if_unreachable
from vitrail.data.folder import SPLITS, check_regular, named_splits, subfolders
from vitrail.data.images import ImageFacts, UnreadableImage, inspect_image
from vitrail.data.labels import labelled_splits
from vitrail.data.masks import unnamed_masks
from vitrail.data.packed import PackedPart, from_stores
from vitrail.data.rows import GlobalRows
from vitrail.data.stream import StreamSplit
from vitrail.data.verify import verify
from vitrail.errors import UserError, nearest
from vitrail.files import open_regular
from vitrail.progress import log, track
from vitrail.tasks import Task
from vitrail.tasks.captions import COLUMNS as CAPTIONS
from vitrail.tasks.captions import are_named

PREFIX = "hf:"
FILES = (".parquet", ".arrow")

_LABEL_NAMES = ("label", "labels", "class", "target", "category", "y", "tags", *CAPTIONS)
_MASK_NAMES = ("mask", "masks", "annotation", "label", "segmentation", "labels", "semantic_mask", "segmentation_mask")
_PEEK = 64  # images of a stream from which size and channels are taken

T = TypeVar("T")
Features = Mapping[str, Any]  # the columns of a data set and their types
Columns = tuple[str, str | None, tuple[str, ...] | None]  # of images, of labels if they are read; class names


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    names = {child.name for child in folder.iterdir()}
    return "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names


def holds_images(path: Path) -> bool:
    """Whether a Parquet or Arrow file, or a folder of them, contains the images themselves instead of paths."""
    if path.is_dir():
        folders = [path, *(child for child in subfolders(path) if child.name.lower() in (*SPLITS, "data"))]
        files = sorted(file for folder in folders for end in FILES for file in folder.glob(f"*{end}"))
        return bool(files) and holds_images(files[0])
    if not path.is_file() or path.suffix == ".arrow":
        return path.is_file()
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return False  # opening it as a table reports the missing package
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


def open_hub(
    source: str, image_column: str | None, label_column: str | None, streaming: bool, task: type[Task] | None
) -> Found:
    """A data set of the hub, `hf:name` or `hf:name:config`. Uses the cache and offline mode of `datasets`."""
    datasets = _import_datasets(source)
    name, _, config = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(f"'{source}' has no data set name. Write hf:NAME or hf:NAME:CONFIG, such as hf:ylecun/mnist.")
    title = "-".join(filter(None, [name.rstrip("/").rpartition("/")[2], config]))
    load = partial(datasets.load_dataset_builder, name, config or None)
    with offline_if_unreachable(datasets):
        return _open(source, title, load, partial(_columns, source, image_column, label_column, task), streaming)


def open_files(
    path: Path, image_column: str | None, label_column: str | None, streaming: bool, task: type[Task] | None
) -> Found:
    """A Parquet or Arrow file, or a folder of them, with embedded images."""
    datasets = _import_datasets(path)
    check_regular(path)
    if path.is_dir():
        load = partial(datasets.load_dataset_builder, str(path))
    else:
        load = partial(datasets.load_dataset_builder, path.suffix[1:], data_files={"train": str(path)})
    title = path.resolve().name if path.is_dir() else path.stem
    return _open(str(path), title, load, partial(_columns, str(path), image_column, label_column, task), streaming)


def open_saved(folder: Path, image_column: str | None, label_column: str | None, task: type[Task] | None) -> Found:
    """A folder written by `save_to_disk`, with one split or several; its files are memory-mapped."""
    datasets = _import_datasets(folder)
    check_regular(folder)
    loaded = _call(str(folder), datasets.load_from_disk, str(folder))
    loaded = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    splits = {split: loaded[name] for split, name in named_splits(loaded, str(folder)).items()}
    choose = partial(_columns, str(folder), image_column, label_column, task)
    return _rows(str(folder), folder.resolve().name, splits, choose)


def open_dataset(
    source: Any,
    name: str,
    where: str,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    task: type[Task] | None,
) -> Found:
    """A `datasets.Dataset` or `DatasetDict` in memory. Its format and transforms are not applied."""
    datasets = _import_datasets(where)
    if isinstance(source, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise UserError(
            f"{where} is streamed, so it has no random access. Give its name with streaming=True, as in "
            "vitrail.train('hf:NAME', streaming=True)."
        )
    if label_column is not None and not isinstance(label_column, str):
        (label_column,) = label_column
    loaded = source if isinstance(source, datasets.DatasetDict) else {"train": source}
    splits = {split: loaded[theirs] for split, theirs in named_splits(loaded, where).items()}
    return _rows(where, name, splits, partial(_columns, where, image_column, label_column, task))


def _import_datasets(source: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{source}: Hugging Face data sets need `datasets`: pip install 'vitrail[data]'") from error
    return datasets


def _call(source: str, function: Callable[..., T], *args: Any, **settings: Any) -> T:
    """Calls a function of `datasets`; any exception becomes a UserError."""
    try:
        return function(*args, **settings)
    except ConnectionError as error:
        raise UserError(
            f"{source} is not in the cache of `datasets`, and the hub cannot be reached. Load it once while online, "
            "or give a folder written by `save_to_disk`."
        ) from error
    except Exception as error:  # `datasets` has many exception classes, and passes on those of other packages
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"{source} cannot be opened by `datasets`: {reason}.") from error


def _open(
    source: str, title: str, load: Callable[..., Any], choose: Callable[[Features | None], Columns], streaming: bool
) -> Found:
    builder = _call(source, load)
    if streaming:
        return _stream(source, title, builder, load, choose)
    _call(source, builder.download_and_prepare)
    loaded = _call(source, builder.as_dataset)
    splits = {split: loaded[name] for split, name in named_splits(loaded, source).items()}
    return _rows(source, title, splits, choose)


# Columns


def _columns(
    source: str, image: str | None, label: str | None, task: type[Task] | None, features: Features | None
) -> Columns:
    """The image column, the label column if labels are read, and the class names if the labels have them."""
    from datasets import ClassLabel, Image, Value

    if features is None:
        raise UserError(f"{source} does not declare its columns, so it cannot be streamed. Drop --streaming.")
    for given in (image, label):
        if given is not None and given not in features:
            raise UserError(
                f"{source} has no column '{given}'.{nearest(given, features)} It has {', '.join(features)}."
            )
    images = [name for name, kind in features.items() if isinstance(kind, Image)]
    named = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
    plain = [name for name, kind in features.items() if isinstance(kind, Value) and kind.dtype != "binary"]
    lists = [name for name, kind in features.items() if isinstance(getattr(kind, "feature", None), ClassLabel | Value)]
    image = image or _only(images) or next((name for name in ("image", "img") if name in features), None)
    if image is None:
        raise UserError(
            f"{source}: which of the columns {', '.join(features)} contains the images? Set --image-column."
        )
    if not reads_labels(task):
        log.info("%s: images are in the column '%s'.", source, image)
        return image, None, None
    masks = [name for name in images if name != image and name in _MASK_NAMES]
    label = (
        label
        or _only(named)
        or _usual(named)
        or _only(masks)
        or (None if named else _usual(plain + lists) or _only(plain + lists))
    )
    if label is None:
        raise UserError(
            f"{source}: which of the columns {', '.join(features)} contains the labels? Set --label-column."
        )
    log.info("%s: images are in the column '%s', labels in '%s'.", source, image, label)
    kind = features[label]
    kind = getattr(kind, "feature", kind)  # of a list of labels
    return image, label, tuple(map(str, kind.names)) if isinstance(kind, ClassLabel) else None


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _usual(names: Sequence[str]) -> str | None:
    return next((name for name in _LABEL_NAMES if name in names), None)


def _content(cell: Mapping[str, Any] | None) -> bytes:
    """The encoded image in a cell; empty if there is none."""
    content, path = (None, None) if cell is None else (cell["bytes"], cell["path"])
    if content is not None or path is None:
        return content or b""
    with open_regular(path) as file:
        return file.read()


# Random access


@dataclass(frozen=True, eq=False)
class _Rows:
    """The images of a split in memory-mapped Arrow files."""

    rows: Any
    column: str
    title: str

    def read(self, row: int) -> bytes:
        try:
            return _content(self.rows[row][self.column])
        except OSError as error:
            raise UnreadableImage(str(error.strerror or error).lower()) from error
        except ValueError as error:  # a path that no file can have
            raise UnreadableImage(str(error)) from error

    def inspect(self, row: int) -> ImageFacts:
        return inspect_image(self.read(row))

    def identity(self) -> Callable[[int], tuple[str, str]] | None:
        """What the images are remembered by once they are verified; None if they may change unnoticed."""
        version = self.version() if len(self.rows) else None
        return None if version is None else lambda row: (f"{self.column}/{row}", version)

    def name(self, row: int) -> str:
        return f"{self.title}/{row}"

    def version(self) -> str | None:
        first = self.rows[0][self.column]
        if first is None or first["bytes"] is None:
            return None  # the rows contain paths, and `datasets` does not track changes of those files
        return str(self.rows._fingerprint)


def _rows(source: str, title: str, splits: Mapping[str, Any], choose: Callable[[Features | None], Columns]) -> Found:
    from datasets import Image

    features = next(iter(splits.values())).features
    image, label, names = choose(features)

    def store_of(split: str, column: str) -> _Rows:
        rows = splits[split].select_columns([column]).with_format(None)
        return _Rows(_call(source, rows.cast_column, column, Image(decode=False)), column, f"{title}/{split}")

    if label is not None and isinstance(features[label], Image):
        masks = {split: (store_of(split, image), store_of(split, label), len(rows)) for split, rows in splits.items()}
        return unnamed_masks(title, masks, source)
    labels = {
        split: rows.select_columns([label]).with_format("arrow")[:][label].to_pylist() if label else [""] * len(rows)
        for split, rows in splits.items()
    }
    task, targets = labelled_splits(labels, names, source, are_named(label))
    parts = {}
    for split, numbers in targets.items():
        store = store_of(split, image)
        parts[split] = PackedPart(store, numbers, verify(range(len(numbers)), store.inspect, store.identity()))
    return from_stores(title, task, parts, source)


# Streaming


@dataclass(frozen=True, eq=False)
class _Shards:
    """The shards of a streamed split."""

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
            except Exception as error:  # from the network, the files or `datasets`
                raise UserError(f"{self.name}: the stream was interrupted: {error}. Continue with --resume.") from error
            yield content


def _stream(
    source: str,
    title: str,
    builder: Any,
    load: Callable[..., Any],
    choose: Callable[[Features | None], Columns],
) -> Found:
    from datasets import Image
    from datasets.packaged_modules.parquet.parquet import ParquetConfig

    loaded = _call(source, builder.as_streaming_dataset)
    theirs = named_splits(loaded, source)
    splits = {split: loaded[name] for split, name in theirs.items()}
    image, label, names = choose(next(iter(splits.values())).features)
    parquet = isinstance(builder.config, ParquetConfig)
    if label is None:
        files = {split: builder.config.data_files[name] if parquet else None for split, name in theirs.items()}
        read = {split: _call(source, _no_labels, splits[split], image, files[split], split) for split in splits}
    else:
        labels = {split: rows.select_columns([label]) for split, rows in splits.items()}
        if parquet:  # it allows reading a single column
            column = _call(source, _call(source, load, columns=[label]).as_streaming_dataset)
            labels = {split: column[name] for split, name in theirs.items()}
        read = {split: _call(source, _read_labels, rows, label, split) for split, rows in labels.items()}
    every_label = {split: list(chain(*shards)) for split, shards in read.items()}
    task, targets = labelled_splits(every_label, names, source, are_named(label))
    if targets.keys() == {"train"}:
        log.info("%s has no validation split: the held-out images are read in a second pass over the stream.", source)
    streams = {}
    for split in targets:
        rows = splits[split].select_columns([image])
        rows = _call(source, rows.cast_column, image, Image(decode=False))
        streams[split] = _Shards(rows, image, f"{title}/{split}", [len(shard) for shard in read[split]])
    first = next(iter(streams.values()))
    every = GlobalRows([(stream, len(targets[split])) for split, stream in streams.items()])
    try:
        facts = [inspect_image(content) for content in islice(first.read(0), _PEEK)]
    except UnreadableImage as error:
        raise UserError(
            f"One of the first images of {source} cannot be read: {error}. Drop --streaming to skip such images."
        ) from error
    if not facts:
        raise UserError(f"{source} has no images.")
    return Found(
        name=title,
        task=task,
        parts={split: (rows, targets[split]) for split, rows in zip(streams, every.rows(), strict=True)},
        make=lambda _, rows, numbers: StreamSplit(*every.locate(rows), numbers),
        size=(int(np.median([fact.h for fact in facts])), int(np.median([fact.w for fact in facts]))),
        channels=1 if all(fact.grey for fact in facts) else 3,
    )


def _read_labels(rows: Any, label: str, split: str) -> list[list[Any]]:
    """The labels, by shard."""
    shards = (rows.shard(num_shards=rows.num_shards, index=i) for i in range(rows.num_shards))
    return [
        [value for batch in shard.iter(batch_size=1000) for value in batch[label]]
        for shard in track(shards, f"labels of {split}", total=rows.num_shards, unit="shard")
    ]


def _no_labels(rows: Any, image: str, files: Sequence[str] | None, split: str) -> list[list[Any]]:
    """The label "" for every image, by shard. Images are counted by the footers of Parquet files, or read once."""
    from datasets.utils.file_utils import xopen
    from pyarrow.parquet import read_metadata  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def count(shard: int) -> int:
        if files is not None:  # one per shard
            with xopen(files[shard], "rb") as file:
                return int(read_metadata(file).num_rows)
        part = rows.select_columns([image]).with_format("arrow").shard(num_shards=rows.num_shards, index=shard)
        return sum(len(batch) for batch in part.iter(batch_size=1000))

    shards = track(range(rows.num_shards), f"images of {split}", total=rows.num_shards, unit="shard")
    return [[""] * count(shard) for shard in shards]
