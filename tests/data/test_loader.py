"""Batches are the same whatever was read before them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import ArraySplit, FileSplit, Split
from vitrail.data.loader import TrainBatches, batches, random_crop
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(h: int, w: int, channels: int = 3) -> np.ndarray:
    image = Image.fromarray(noise(h // 10 + 2, w // 10 + 2, 3)).resize((w, h), Image.Resampling.BICUBIC)
    return np.asarray(image)[:, :, :channels]


# Batches in order


def array_split(n: int = 20, size: int = 8, channels: int = 1) -> ArraySplit:
    """Image i is noise with i in its first pixel, and so is its target."""
    pixels = noise(n, size, size, channels)
    pixels[:, 0, 0] = np.arange(n)[:, None]
    return ArraySplit(pixels, np.arange(n), "noise")


def file_split(folder: Path, n: int = 20) -> FileSplit:
    paths = []
    for i in range(n):
        paths.append(folder / f"{i:02}.png")
        Image.fromarray(noise(12 + i, 40 - i, 3, seed=i)).save(paths[-1])
    return FileSplit(paths, np.arange(n), 3)


class Watched(Split):
    """A split that notes which images are asked for."""

    def __init__(self, split: ArraySplit):
        self.split, self.targets, self.asked = split, split.targets, []

    def __len__(self) -> int:
        return len(self.split)

    def image(self, i: int) -> np.ndarray:
        self.asked.append(i)
        return self.split.image(i)

    def name(self, i: int) -> str:
        return self.split.name(i)


def test_batches_hold_every_image_in_order(tmp_path):
    split, preprocess = file_split(tmp_path), Preprocess((8, 8), 3)
    found = list(batches(split, preprocess, 8))
    assert [len(images) for images, _ in found] == [8, 8, 4]
    images, targets = torch.cat([images for images, _ in found]), torch.cat([targets for _, targets in found])
    assert targets.tolist() == list(range(20))
    assert (images.dtype, targets.dtype) == (torch.uint8, torch.int64)
    for i in range(20):
        assert np.array_equal(images[i].numpy(), preprocess.pixels(split.image(i)))


@pytest.mark.parametrize("channels", [1, 3])
def test_gathering_a_whole_batch_gives_what_reading_one_by_one_gives(channels):
    split, preprocess = array_split(channels=channels), Preprocess((8, 8), channels)
    gathered = list(batches(split, preprocess, 8))
    watched = Watched(split)
    read = list(batches(watched, preprocess, 8))
    assert sorted(watched.asked) == list(range(20))
    for (a, a_targets), (b, b_targets) in zip(gathered, read, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert torch.equal(a_targets, b_targets)


@pytest.mark.parametrize("preprocess", [Preprocess((6, 6), 1), Preprocess((8, 8), 3), Preprocess((8, 8), 1, 0.5)])
def test_arrays_that_do_not_fit_are_preprocessed(preprocess):
    split = array_split()
    images, _ = next(batches(split, preprocess, 20))
    assert np.array_equal(images[7].numpy(), preprocess.pixels(split.image(7)))


def test_batches_of_chosen_images():
    found = list(batches(array_split(), Preprocess((8, 8), 1), 2, indices=[5, 3, 3]))
    assert [targets.tolist() for _, targets in found] == [[5, 3], [3]]
    assert [images[:, 0, 0, 0].tolist() for images, _ in found] == [[5, 3], [3]]
    assert list(batches(array_split(), Preprocess((8, 8), 1), 2, indices=[])) == []


# Epochs


def contents(loader: TrainBatches, number: int, start: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(loader.epoch(number, start))


def same(a: list[tuple[torch.Tensor, torch.Tensor]], b: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def targets_of(epoch: list[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return [int(target) for _, targets in epoch for target in targets]


def test_an_epoch_has_each_image_once_in_full_batches():
    loader = TrainBatches(array_split(20), Preprocess((8, 8), 1), 5, seed=0)
    epoch = contents(loader, 0)
    assert len(loader) == len(epoch) == 4
    assert sorted(targets_of(epoch)) == list(range(20))
    assert [int(images[0, 0, 0, 0]) for images, _ in epoch] == [int(targets[0]) for _, targets in epoch]
    loader = TrainBatches(array_split(20), Preprocess((8, 8), 1), 6, seed=0)
    assert [len(targets) for _, targets in contents(loader, 0)] == [6, 6, 6]
    assert len(loader) == 3


def test_fewer_images_than_a_batch_are_one_batch():
    loader = TrainBatches(array_split(20), Preprocess((8, 8), 1), 64, seed=0)
    assert len(loader) == 1
    assert [len(targets) for _, targets in contents(loader, 3)] == [20]


def test_the_order_depends_on_seed_and_epoch():
    split, preprocess = array_split(20), Preprocess((8, 8), 1)
    first = targets_of(contents(TrainBatches(split, preprocess, 5, seed=0), 0))
    assert first == targets_of(contents(TrainBatches(split, preprocess, 5, seed=0), 0))
    assert first != targets_of(contents(TrainBatches(split, preprocess, 5, seed=1), 0))
    assert first != targets_of(contents(TrainBatches(split, preprocess, 5, seed=0), 1))


@pytest.mark.parametrize("crop_scale", [1.0, 0.3])
def test_an_epoch_can_begin_anywhere_with_any_number_of_workers(tmp_path, crop_scale):
    preprocess = Preprocess((8, 8), 3)
    for split in (file_split(tmp_path), array_split(20, 8, 3)):
        whole = contents(TrainBatches(split, preprocess, 3, seed=7, crop_scale=crop_scale, workers=1), 2)
        for start, workers in ((0, 4), (1, 2), (5, 3), (6, 0)):
            loader = TrainBatches(split, preprocess, 3, seed=7, crop_scale=crop_scale, workers=workers)
            assert same(contents(loader, 2, start), whole[start:])


def test_nothing_before_the_start_is_read():
    split = Watched(array_split(20))
    loader = TrainBatches(split, Preprocess((8, 8), 1), 5, seed=0)
    later = targets_of(contents(loader, 0, start=3))
    assert sorted(split.asked) == sorted(later)
    assert len(later) == 5


def test_random_crops_differ_by_epoch_and_image_and_stay_in_the_image():
    split = ArraySplit(np.repeat(smooth(40, 40)[None], 8, axis=0), np.arange(8), "copies")
    loader = TrainBatches(split, Preprocess((16, 16), 3), 8, seed=0, crop_scale=0.2)
    (first, _), (second, order) = next(loader.epoch(0)), next(loader.epoch(1))
    assert len(torch.unique(first, dim=0)) == 8
    assert not torch.equal(first, second)
    again, _ = next(TrainBatches(split, Preprocess((16, 16), 3), 8, seed=0, crop_scale=0.2, workers=5).epoch(1))
    assert torch.equal(second, again)
    alone = ArraySplit(split.pixels[:3], split.targets[:3], "fewer")
    fewer, names = next(TrainBatches(alone, Preprocess((16, 16), 3), 3, seed=0, crop_scale=0.2).epoch(1))
    for image, target in zip(fewer, names.tolist(), strict=True):  # the crop depends on the image's number alone
        assert torch.equal(image, second[order.tolist().index(target)])


def test_repeated_augmentation_shows_fewer_images_several_times():
    """Copies follow each other, each with its own number, and so with its own crop."""
    loader = TrainBatches(array_split(20), Preprocess((8, 8), 1), 6, seed=0, repeats=3)
    assert len(loader) == 3
    numbers = np.concatenate(loader.numbers(0))
    assert len(np.unique(numbers)) == len(numbers) == 18
    shown = (numbers % 20).reshape(6, 3)
    assert (shown == shown[:, :1]).all()
    assert len(np.unique(shown)) == 6
    assert not np.array_equal(shown, np.concatenate(loader.numbers(1)).reshape(6, 3) % 20)
    resumed = loader.numbers(1, start=2)
    assert np.array_equal(resumed, loader.numbers(1)[2:])


def test_copies_of_an_image_are_cropped_independently():
    split = array_split(12)
    pixels, targets = next(TrainBatches(split, Preprocess((8, 8), 1), 3, seed=0, crop_scale=0.2, repeats=3).epoch(0))
    assert len(targets.unique()) == 1
    assert len({image.numpy().tobytes() for image in pixels}) == 3


@pytest.mark.parametrize(("height", "width"), [(100, 100), (60, 90), (7, 5), (1, 1)])
def test_a_random_crop_has_the_area_and_the_aspect_asked_for(height, width):
    rng = np.random.default_rng(0)
    boxes = [random_crop(height, width, 0.25, rng) for _ in range(300)]
    for y, x, h, w in boxes:
        assert y >= 0
        assert y + h <= height
        assert x >= 0
        assert x + w <= width
        assert h >= 1
        assert w >= 1
    if min(height, width) > 50:
        areas = np.array([h * w for _, _, h, w in boxes]) / (height * width)
        aspects = np.array([w / h for _, _, h, w in boxes])
        assert 0.24 <= areas.min() < 0.35
        assert 0.85 < areas.max() <= 1
        assert 0.73 < aspects.min() < 0.85
        assert 1.2 < aspects.max() < 1.36
        assert len({(y, x) for y, x, _, _ in boxes}) > 150


def test_a_shape_that_holds_no_such_crop_gives_its_centre():
    rng = np.random.default_rng(0)
    assert random_crop(30, 300, 0.9, rng) == (0, 130, 30, 40)
    assert random_crop(300, 30, 0.9, rng) == (130, 0, 40, 30)


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"crop_scale": 0.0}, {"crop_scale": 1.2}])
def test_impossible_settings_are_user_errors(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        TrainBatches(
            **{"split": array_split(), "preprocess": Preprocess((8, 8), 1), "batch_size": 4, "seed": 0} | settings
        )


def test_the_numbers_of_a_batch_are_those_of_its_images():
    targets = np.arange(50) % 7
    pixels = np.repeat(np.arange(50, dtype=np.uint8), 64).reshape(50, 8, 8, 1)
    for balanced in (False, True):
        loader = TrainBatches(ArraySplit(pixels, targets, "x"), Preprocess((8, 8), 1), 8, seed=3, balanced=balanced)
        for (images, _), numbers in zip(loader.epoch(2, 1), loader.numbers(2, 1), strict=True):
            assert images[:, 0, 0, 0].tolist() == (numbers % 50).tolist()


# Threads


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitrail-read")]


def test_a_file_that_became_unreadable_is_named(tmp_path):
    split = file_split(tmp_path)
    Path(split.paths[13]).write_bytes(b"")
    with pytest.raises(UserError, match=r"13\.png was readable before but is no longer: empty file"):
        list(batches(split, Preprocess((8, 8), 3), 4))
    assert readers() == []


def test_only_a_few_batches_are_read_ahead_and_threads_end_with_the_loader():
    split = Watched(array_split(200))
    found = batches(split, Preprocess((8, 8), 3), 5)
    next(found)
    assert readers()
    found.close()
    assert len(split.asked) <= 5 * 5
    assert readers() == []
