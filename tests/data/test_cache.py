"""Pixels that are kept are those that would have been read, whatever happens to the cache."""

from __future__ import annotations

import io
import os
import resource
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from vitrail.data import ArraySplit, FileSplit, Split, open_data
from vitrail.data.cache import once, root
from vitrail.data.loader import TrainBatches, batches
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError

SMALL = Preprocess((16, 16), 3)
EXACT = 20 * 3 * 16 * 16 / 2**30  # GiB of the images below as SMALL


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """An empty cache for every test."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


def arrays(n: int = 20, size: int = 10, channels: int = 1) -> ArraySplit:
    pixels = np.random.default_rng(0).integers(0, 256, (n, size, size, channels), dtype=np.uint8)
    return ArraySplit(pixels, np.arange(n), "noise")


def files(folder: Path, n: int = 20) -> FileSplit:
    """Images of different shapes, some of more than twice the size of SMALL."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{i:02}.{'jpg' if i % 2 else 'png'}" for i in range(n)]
    for i, path in enumerate(paths):
        pixels = np.random.default_rng(i).integers(0, 256, (4 + i, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((60 + 9 * i, 90 - i)).save(path)
    return FileSplit(paths, np.arange(n), 3)


def spoil(split: FileSplit) -> None:
    """Makes the files unreadable in a way that a cache cannot see."""
    for path in split.paths:
        facts = path.stat()
        path.write_bytes(b"x" * facts.st_size)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def epoch(split: Split, preprocess: Preprocess = SMALL, crop_scale: float = 1.0) -> list[torch.Tensor]:
    loader = TrainBatches(split, preprocess, 6, seed=0, crop_scale=crop_scale)
    return [tensor for batch in loader.epoch(1) for tensor in batch]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) and y.is_contiguous() for x, y in zip(a, b, strict=True))


def caches(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


# Arrays


@pytest.mark.parametrize("preprocess", [Preprocess((14, 12), 1), Preprocess((10, 10), 3), Preprocess((8, 8), 1, 0.5)])
def test_arrays_of_another_size_are_resized_once(place, preprocess):
    split = arrays()
    direct = epoch(split, preprocess)
    kept = once(split, preprocess, False, 0)
    split.pixels[:] = 0  # what is not kept is lost now
    assert same(direct, epoch(kept, preprocess))
    assert caches(place) == []


def test_arrays_that_need_no_resizing_are_not_copied():
    split = arrays()
    assert once(split, Preprocess((10, 10), 1), False, 1) is split
    assert once(split, Preprocess((20, 20), 1), True, 1) is split


def test_kept_pixels_serve_only_the_preprocessing_that_made_them():
    split, other = arrays(), Preprocess((14, 14), 1, 0.8)
    kept = once(split, Preprocess((14, 14), 1), False, 1)
    (found, _), (expected, _) = next(batches(kept, other, 20)), next(batches(split, other, 20))
    assert torch.equal(found, expected)


# Files


@pytest.mark.parametrize("crop_scale", [1.0, 0.3])
@pytest.mark.parametrize("preprocess", [SMALL, Preprocess((24, 16), 1, 0.8)])
def test_kept_read_anew_or_not_kept_the_pixels_are_the_same(tmp_path, place, preprocess, crop_scale):
    split, crops = files(tmp_path / "files"), crop_scale < 1
    direct = epoch(once(split, preprocess, crops, 0), preprocess, crop_scale)
    assert caches(place) == []
    assert same(direct, epoch(once(split, preprocess, crops, 1), preprocess, crop_scale))
    assert len(caches(place)) == 1
    spoil(split)
    assert same(direct, epoch(once(split, preprocess, crops, 1), preprocess, crop_scale))


def test_with_crops_large_images_are_kept_in_small(tmp_path):
    split = files(tmp_path / "files")
    kept = once(split, SMALL, True, 1)
    for i in range(20):
        (h, w), (full_h, full_w) = kept.image(i).shape[:2], split.image(i).shape[:2]
        factor = 2 if min(full_h, full_w) >= 64 else 1
        assert (h, w) == (-(-full_h // factor), -(-full_w // factor))
    assert {kept.image(i).shape[0] for i in range(20)} > {90, 45 - 3}


def test_a_file_that_changes_is_read_again(tmp_path, place):
    split = files(tmp_path / "files")
    before = epoch(once(split, SMALL, False, 1))
    Image.new("RGB", (90, 90), "red").save(split.paths[7])
    after = epoch(once(split, SMALL, False, 1))
    assert not same(before, after)
    assert same(epoch(split), after)
    assert len(caches(place)) == 2


def test_other_preprocessing_has_a_cache_of_its_own(tmp_path, place):
    split = files(tmp_path / "files")
    others = [SMALL, Preprocess((16, 16), 3, 0.9), Preprocess((16, 16), 1), Preprocess((16, 24), 3)]
    for preprocess in others:
        assert same(epoch(split, preprocess), epoch(once(split, preprocess, False, 1), preprocess))
    once(split, SMALL, True, 1)
    assert len(caches(place)) == len(others) + 1


def test_two_runs_at_once_share_one_cache(tmp_path, place):
    split = files(tmp_path / "files")
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: epoch(once(split, SMALL, False, 1)), range(6)))
    assert all(same(epoch(split), other) for other in found)
    assert len(caches(place)) == 1


@pytest.mark.parametrize("crops", [False, True])
def test_a_damaged_cache_is_made_anew(tmp_path, place, crops):
    split, crop_scale = files(tmp_path / "files"), 0.3 if crops else 1.0
    before = epoch(once(split, SMALL, crops, 1), SMALL, crop_scale)
    for name in ("pixels", "table.npy") if crops else ("pixels",):
        (file,) = place.glob(f"*/{name}")
        file.write_bytes(file.read_bytes()[:-10])
        assert same(before, epoch(once(split, SMALL, crops, 1), SMALL, crop_scale))
    for table in ([], [1, 2]) if crops else ():
        np.save(file, np.array(table))
        assert same(before, epoch(once(split, SMALL, crops, 1), SMALL, crop_scale))


@pytest.mark.parametrize("crops", [False, True])
def test_a_cache_that_becomes_shorter_in_use(tmp_path, place, crops):
    kept = once(files(tmp_path / "files"), SMALL, crops, 1)
    (file,) = place.glob("*/pixels")
    os.truncate(file, 100)
    with pytest.raises(UserError, match=r"pixels has become shorter while it was in use\. Run the command again"):
        epoch(kept, SMALL, 0.3 if crops else 1.0)


# The budget, and the lack of room


def test_what_is_above_the_budget_is_not_kept(tmp_path, place, caplog):
    split = files(tmp_path / "files")
    with caplog.at_level("INFO", "vitrail"):
        assert once(split, SMALL, False, EXACT * 0.99) is split
    assert "more than --cache-gb" in caplog.text
    assert caches(place) == []
    assert once(split, SMALL, False, EXACT) is not split
    assert same(epoch(once(split, SMALL, True, 0), SMALL, 0.3), epoch(once(split, SMALL, True, EXACT), SMALL, 0.3))


def test_the_caches_that_were_longest_unused_make_room(tmp_path, place):
    splits = [files(tmp_path / name) for name in "abcd"]
    names = []
    for number, split in enumerate(splits[:3]):
        once(split, SMALL, False, 3 * EXACT)
        (new,) = set(caches(place)) - set(names)
        names.append(new)
        os.utime(place / new / "pixels", (number, number))
    once(splits[0], SMALL, False, 3 * EXACT)  # used just now
    kept = once(splits[1], SMALL, False, 3 * EXACT)
    os.utime(place / names[1] / "pixels", (1, 1))
    once(splits[3], SMALL, False, 3 * EXACT)
    left = set(caches(place))
    assert len(left) == 3
    assert left >= {names[0], names[2]}
    if os.name == "posix":  # a run goes on with the cache that it has open
        assert same(epoch(splits[1]), epoch(kept))


def test_without_room_images_are_read_anew_and_nothing_is_left_behind(tmp_path, place, caplog):
    split = files(tmp_path / "files")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a disk that becomes full on the way
    try:
        kept = once(split, SMALL, False, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept is split
    assert "cannot be cached" in caplog.text
    assert caches(place) == []


def test_a_place_that_cannot_be_written_is_only_a_warning(tmp_path, monkeypatch, caplog):
    split = files(tmp_path / "files")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file" / "cache"))
    assert once(split, SMALL, False, 1) is split
    assert "cannot be cached" in caplog.text


def tar_of(split: FileSplit, path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for i, file in enumerate(split.paths):
            tar.add(file, f"{i:02}{file.suffix}")
            label = tarfile.TarInfo(f"{i:02}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(b"%d" % (i % 2)))
    return path


@pytest.mark.parametrize("crop_scale", [1.0, 0.3])
def test_images_of_shards_are_kept_too_until_a_shard_changes(tmp_path, place, crop_scale):
    path = tar_of(files(tmp_path / "files"), tmp_path / "x.tar")
    split = open_data(path).splits["train"]
    first = once(split, SMALL, crop_scale < 1, 1)
    assert len(caches(place)) == 1
    expected = epoch(first, crop_scale=crop_scale)
    facts = path.stat()
    path.write_bytes(b"x" * facts.st_size)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert same(epoch(once(split, SMALL, crop_scale < 1, 1), crop_scale=crop_scale), expected)
    path.touch()
    with pytest.raises(UserError, match="is no longer"):
        once(split, SMALL, crop_scale < 1, 1)


def test_images_of_hugging_face_sets_are_kept_too_if_the_set_holds_them(tmp_path, place):
    paths = files(tmp_path / "files").paths
    inside = [{"bytes": path.read_bytes(), "path": None} for path in paths]
    rows = datasets.Dataset.from_dict({"image": inside, "label": [0, 1] * 10}).cast_column("image", datasets.Image())
    rows.save_to_disk(tmp_path / "saved")
    for _ in range(2):
        kept = once(open_data(tmp_path / "saved").splits["train"], SMALL, False, 1)
        assert len(caches(place)) == 1
    assert same(epoch(kept), epoch(open_data(tmp_path / "saved").splits["train"]))

    beside = [{"bytes": None, "path": str(path)} for path in paths]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    table = pyarrow.table({"image": pyarrow.array(beside, kind), "label": [0, 1] * 10})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    once(open_data(tmp_path / "set.parquet").splits["train"], SMALL, False, 1)
    assert len(caches(place)) == 1  # files beside it may change, and nobody would tell


def test_caches_lie_where_such_things_belong(monkeypatch):
    monkeypatch.delenv("VITRAIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert root() == Path("/somewhere/vitrail/images")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert root() == Path.home() / ".cache" / "vitrail" / "images"
