"""Images and annotations move together: forward and back, as pixels, as labels, and through the loader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.data.dataset import ArraySplit, Data
from vitrail.data.loader import TrainBatches, batches
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.tasks import Multiclass
from vitrail.tasks.placement import Placement, Truth, drawn, fitted

SIZES = [(40, 30), (30, 40), (7, 90), (16, 16), (1, 50), (300, 200)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_fitted_image_is_whole_at_the_top_left(size):
    placement = fitted(size, (16, 24))
    (_, _, h, w), full = placement.shown, (16, 24)
    assert placement.box == (0, 0, *size)
    assert h == full[0] or w == full[1]
    assert h <= full[0]
    assert w <= full[1]
    if min(size) > 1:
        assert abs(h / w - size[0] / size[1]) * w < 2  # the aspect ratio, to a pixel


@pytest.mark.parametrize("seed", range(8))
def test_points_come_back(seed):
    rng = np.random.default_rng(seed)
    placement = drawn((37, 61), (32, 16), 0.2, 0.5, rng)
    points = rng.uniform(0, 40, (5, 2))
    assert placement.back(placement.forward(points)) == pytest.approx(points)
    top, left, height, width = placement.box
    assert top >= 0
    assert top + height <= 37
    assert left >= 0
    assert left + width <= 61
    y, x, _h, _w = placement.shown
    corner = placement.forward(np.array([left, top]))
    assert corner == pytest.approx([16 - x if placement.mirror else x, y])


def test_labels_lie_where_the_pixels_lie():
    mask = np.random.default_rng(0).integers(0, 2, (20, 28)).astype(np.int16)
    image = np.repeat(np.repeat((mask * 255).astype(np.uint8), 4, 0), 4, 1)[..., None]
    mask = np.repeat(np.repeat(mask, 4, 0), 4, 1)
    preprocess = Preprocess((48, 48), 1, fit="pad", interpolation="bilinear")
    for seed in range(6):
        placement = drawn(mask.shape, (48, 48), 0.25, 0.5, np.random.default_rng(seed))
        pixels, labels = preprocess.place(image, placement)[0], placement.labels(mask, -1)
        seen = labels >= 0
        assert (pixels[~seen] == 0).all()
        assert (np.abs(pixels[seen] / 255 - labels[seen]) < 0.5).mean() > 0.9


def test_logits_are_restored_as_by_interpolate():
    logits = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    restored = fitted((48, 64), (24, 32)).restore(logits)
    expected = F.interpolate(torch.from_numpy(logits)[None], (48, 64), mode="bilinear")[0]
    assert restored == pytest.approx(expected.numpy(), abs=1e-5)


def test_padding_is_cut_off_before_logits_are_restored():
    placement = Placement((10, 20), (16, 16), (0, 0, 10, 20), (0, 0, 8, 16))
    logits = np.zeros((1, 16, 16), np.float32)
    logits[:, 8:] = 9  # of the padding
    assert placement.restore(logits)[:, :9].max() == 0


def test_a_padded_image_keeps_its_shape_with_torch_and_with_pillow():
    image = np.random.default_rng(0).integers(0, 256, (50, 20, 3), np.uint8)
    preprocess = Preprocess((32, 32), 3, fit="pad")
    pixels = preprocess.pixels(image)
    assert pixels.shape == (3, 32, 32)
    assert (pixels[:, :, 12:] == 0).all()
    assert pixels[:, :, :12].min() >= 0
    assert np.abs(pixels.astype(int) - preprocess.pixels_by_pillow(image)).max() <= 2
    tensor = preprocess.frame(torch.from_numpy(image).permute(2, 0, 1)[None])
    assert np.array_equal(tensor[0].numpy(), pixels)
    with pytest.raises(UserError, match="'crop' must be 1"):
        Preprocess((32, 32), 3, crop=0.9, fit="pad")


class Corner(Multiclass):
    """A made-up annotated task: the target is where a point lies."""

    annotated = True

    def placed(self, annotation, placement):
        return placement.forward(annotation).astype(np.float32)


def _split() -> ArraySplit:
    targets = np.empty(6, object)
    for i in range(6):
        targets[i] = np.array([i, 2 * i], np.float32)
    return ArraySplit(np.random.default_rng(0).integers(0, 256, (6, 12, 20, 1), np.uint8), targets, "made")


def test_the_loader_places_pixels_and_annotations_and_resumes_anywhere():
    split, preprocess = _split(), Preprocess((16, 16), 1, fit="pad")
    loader = TrainBatches(split, preprocess, 2, seed=3, crop_scale=0.25, task=Corner(), hflip=0.5)
    whole, late = list(loader.epoch(1)), list(loader.epoch(1, 2))
    assert [t.shape for _, t in whole] == [(2, 2)] * 3
    assert torch.equal(late[0][0], whole[2][0])
    assert torch.equal(late[0][1], whole[2][1])
    assert not torch.equal(whole[0][1], next(iter(loader.epoch(2)))[1])
    pixels, truths = next(batches(split, preprocess, 4, indices=[5, 5, 0]))
    assert len(pixels) == 3
    assert isinstance(truths[0], Truth)
    assert truths[1].annotation.tolist() == [5, 10]
    assert truths[0].placement == fitted((12, 20), (16, 16))


def test_the_fingerprint_sees_annotations():
    def data(split: ArraySplit) -> Data:
        return Data("made", Multiclass(("a",)), {"train": split}, (12, 20), 1, ())

    before, after = data(_split()).fingerprint(), data(_split())
    assert after.fingerprint() == before
    after.splits["train"].targets[2][0] = 99
    assert after.fingerprint() != before


def test_the_card_of_an_older_version_crops():
    document = {"img_size": [8, 8], "channels": 1, "crop": 1.0, "mean": [0.5], "std": [0.5]}
    assert Preprocess.from_json(document).fit == "crop"
