"""`vitrail shard`: writes a data set as tar shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data import Source
    from vitrail.data.shards.manifest import Manifest


def shard(
    data: str | Path | Source,
    out: str | Path,
    *,
    shard_size: str = "256MB",
    unlabelled: bool = False,
    val_fraction: float = 0.2,
    seed: int = 0,
    data_dir: str | None = None,
    image_dir: str | Path | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: str | None = None,
    mask_values: str | Sequence[str] | None = None,
    max_pixels: int | None = None,
    workers: int = 2,
) -> Manifest:
    """Write a data set as tar shards, with an index, checksums and a manifest.

    Image files are copied byte for byte, arrays are encoded without loss. Training images are shuffled. After a kill,
    the same command keeps the finished shards and writes the others.

    Args:
        data: folder, .npz or .npy file, table, tar shards, hf:NAME or built-in data set
        out (FOLDER): new folder for the shards
        shard_size (SIZE): size of a shard: 256MB, 1GB, or a number of images
        unlabelled: leave the labels out, for pretrain
        val_fraction: share of images held out for validation, if the data has no val split
        seed: seed of the shuffle and the hold-out
        data_dir (FOLDER): folder of the built-in data sets
        image_dir (FOLDER): folder of a table's images (default: that of the table)
        image_column (NAME): table column with the image paths (default: detected)
        label_column (NAME[,…]): table column with the labels, or several: x,y (default: detected)
        task: multiclass, multilabel, regression, masks, boxes or pairs (default: detected)
        mask_values (VALUE=CLASS[,…]): class of each value of the masks, as in 0=ground,255=nucleus
        max_pixels: pixels of the largest image to read (default: 178956970)
        workers: threads that write shards
    """
    from vitrail.config.options import coerce_names
    from vitrail.data import open_data
    from vitrail.data.shards.write import write_shards
    from vitrail.tasks import METHODS

    if workers < 1:
        raise UserError(f"'workers' must be at least 1, but it is {workers}.")
    if unlabelled and (task is not None or label_column is not None):
        raise UserError("--unlabelled leaves the labels out. Remove it, or --task and --label-column.")
    opened = open_data(
        data,
        val_fraction=val_fraction,
        seed=seed,
        data_dir=data_dir,
        image_dir=None if image_dir is None else str(image_dir),
        image_column=image_column,
        label_column=None if label_column is None else coerce_names("label_column", label_column),
        task=METHODS[0] if unlabelled else task,
        mask_values=None if mask_values is None else coerce_names("mask_values", mask_values),
        max_pixels=max_pixels,
    )
    try:
        return write_shards(opened, Path(out), shard_size, seed, workers)
    except OSError as error:
        raise UserError(f"The shards cannot be written to {out}: {error.strerror or error}.") from error


def show(manifest: Manifest, *, out: str | Path) -> int:
    """Print how many images and shards each split has."""
    from vitrail.charts.measure import count

    for name, split in manifest.splits.items():
        size = sum(part.bytes for part in split.shards)
        print(f"{out}/{name}: {count(split.index.images)} in {count(len(split.shards), 'shard')}, {size / 1e6:,.1f} MB")
    return 0
