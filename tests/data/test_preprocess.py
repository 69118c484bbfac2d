"""Images become the model's pixels exactly."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(h: int, w: int, channels: int = 3) -> np.ndarray:
    image = Image.fromarray(noise(h // 10 + 2, w // 10 + 2, 3)).resize((w, h), Image.Resampling.BICUBIC)
    return np.asarray(image)[:, :, :channels]


# Preprocessing


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_that_fits_is_only_transposed(channels):
    image = noise(12, 16, channels)
    assert np.array_equal(Preprocess((12, 16), channels).pixels(image), image.transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(300, 400), (401, 299), (64, 64), (50, 300), (20, 30)])
@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_resizing_the_short_side_and_cropping_the_centre(size, crop, channels):
    h, w = size
    short = int(64 / crop)
    resized = (short, short * w // h) if h <= w else (short * h // w, short)
    y, x = round((resized[0] - 64) / 2), round((resized[1] - 64) / 2)
    image = smooth(h, w, channels)
    picture = Image.fromarray(image.squeeze()).resize(resized[::-1], Image.Resampling.BICUBIC)
    expected = np.asarray(picture.crop((x, y, x + 64, y + 64))).reshape(64, 64, channels).transpose(2, 0, 1)
    found = Preprocess((64, 64), channels, crop).pixels(image)
    assert found.shape == (channels, 64, 64)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    difference = np.abs(found.astype(int) - expected)
    assert difference.max() <= 2
    assert difference.mean() < 0.05


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
def test_images_are_resized_as_the_preprocessing_says(interpolation, bits):
    plane = smooth(90, 120, 1)
    image = plane.astype({8: np.uint8, 16: np.uint16, 32: np.float32}[bits])
    picture = Image.fromarray(plane.squeeze()).resize((64, 48), Image.Resampling[interpolation.upper()])
    found = Preprocess((48, 64), 1, bits=bits, interpolation=interpolation).pixels(image)
    assert np.abs(found[0].astype(float).clip(0, 255) - np.asarray(picture)).max() <= 2  # floats may overshoot
    others = {Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS}
    others -= {Image.Resampling[interpolation.upper()]}
    sharp = noise(90, 120, 1)
    found = Preprocess((48, 64), 1, interpolation=interpolation).pixels(sharp)
    for other in others:
        picture = Image.fromarray(sharp.squeeze()).resize((64, 48), other)
        assert np.abs(found[0].astype(int) - np.asarray(picture)).max() > 5


def test_a_rectangle_is_covered_from_either_side():
    image = np.zeros((100, 100, 1), dtype=np.uint8)
    image[25:75] = 255  # what a wide model sees of a square image
    assert Preprocess((20, 40), 1).pixels(image).min() > 200
    image = np.zeros((100, 100, 1), dtype=np.uint8)
    image[:, 25:75] = 255
    assert Preprocess((40, 20), 1).pixels(image).min() > 200


@pytest.mark.parametrize("shape", [(1, 30_000, 3), (30_000, 1, 3), (1, 1, 3)])
def test_extreme_shapes_are_read_without_an_enormous_image_in_between(shape):
    assert (Preprocess((224, 224), 3).pixels(np.full(shape, 77, dtype=np.uint8)) == 77).all()


def test_every_size_can_be_brought_to_every_other():
    for h in range(1, 12):
        for w in range(1, 12):
            for crop in (1.0, 0.9, 0.3):
                assert Preprocess((7, 5), 1, crop).pixels(np.full((h, w, 1), 9, dtype=np.uint8)).shape == (1, 7, 5)


def test_grey_is_repeated_and_colour_becomes_luma():
    grey = noise(8, 8, 1)
    assert np.array_equal(Preprocess((8, 8), 3).pixels(grey), np.repeat(grey.transpose(2, 0, 1), 3, axis=0))
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]], dtype=np.uint8)
    assert Preprocess((1, 4), 1).pixels(colours).tolist() == [[[76, 150, 29, 255]]]


def test_a_box_is_cut_out_and_resized():
    image = noise(40, 30, 3)
    whole_box = Preprocess((10, 8), 3).crop_pixels(image, (5, 7, 10, 8))
    assert np.array_equal(whole_box, image[5:15, 7:15].transpose(2, 0, 1))
    halves = np.zeros((20, 20, 1), dtype=np.uint8)
    halves[10:] = 200
    assert (Preprocess((6, 6), 1).crop_pixels(halves, (12, 0, 8, 20)) == 200).all()


def test_normalise_centres_and_scales_every_channel():
    pixels = torch.from_numpy(noise(2, 3, 4, 5))
    preprocess = Preprocess((4, 5), 3, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    found = preprocess.normalise(pixels)
    assert found.dtype == torch.float32
    for c in range(3):
        expected = (pixels[:, c].double() / 255 - preprocess.mean[c]) / preprocess.std[c]
        torch.testing.assert_close(found[:, c].double(), expected, rtol=1e-5, atol=1e-6)
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    assert Preprocess((1, 2), 1).normalise(ends).flatten().tolist() == [-1, 1]


def test_a_call_gives_what_the_model_reads():
    preprocess = Preprocess((8, 8), 1)
    image = smooth(30, 40)
    expected = preprocess.normalise(torch.from_numpy(preprocess.pixels(image))[None])[0]
    assert torch.equal(preprocess(image), expected)


def test_json_and_back_is_the_same():
    preprocess = Preprocess((8, 9), 3, 0.9, (0.1, 0.2, 0.3), (1.0,), interpolation="lanczos")
    assert Preprocess.from_json(json.loads(json.dumps(asdict(preprocess)))) == preprocess


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crops": 1}, "There is no setting 'crops'. Did you mean 'crop'"),
        ({"mean": None}, "'mean' must be a list of numbers"),
        ({"mean": ["a"]}, "'mean' must be a list of numbers"),
        ({"std": [0.5, 0.5]}, "'std' must have one number, or one for each"),
        ({"std": [0.0]}, "'std' must be above 0"),
        ({"mean": [float("nan")]}, "'mean' must be finite"),
        ({"channels": 0}, "'channels' must be at least 1"),
        ({"bits": 12}, "'bits' must be 8, 16, or 32"),
        ({"interpolation": "cubic"}, "'interpolation' must be one of bicubic, bilinear, lanczos"),
        ({"channels": "three"}, "'channels' must be a whole number"),
        ({"crop": 1.5}, "'crop' must be from 0.01 to 1"),
        ({"img_size": [0, 8]}, "'img_size' must be a size"),
    ],
)
def test_ill_preprocessing_is_a_user_error(changes, message):
    with pytest.raises(UserError, match=message):
        Preprocess.from_json(asdict(Preprocess((8, 8), 3)) | changes)


@pytest.mark.parametrize("name", ["img_size", "channels", "crop", "mean", "std"])
def test_missing_preprocessing_is_a_user_error(name):
    document = asdict(Preprocess((8, 8), 3))
    del document[name]
    with pytest.raises(UserError, match=f"'{name}' is missing"):
        Preprocess.from_json(document)


def test_older_files_without_bits_have_eight_and_were_resized_bicubic():
    document = asdict(Preprocess((8, 8), 3))
    del document["bits"], document["interpolation"]
    assert Preprocess.from_json(document) == Preprocess((8, 8), 3)


# Resizing


def photograph() -> np.ndarray:
    from sklearn.datasets import load_sample_image

    return load_sample_image("china.jpg")


@pytest.mark.parametrize("box", [(0, 0, 427, 640), (100, 50, 300, 290), (200, 300, 60, 80)])
def test_a_crop_of_a_photograph_is_resized_as_pillow_does(box):
    y, x, h, w = box
    picture = Image.fromarray(photograph()[y : y + h, x : x + w]).resize((128, 96), Image.Resampling.BICUBIC)
    found = Preprocess((96, 128), 3).crop_pixels(photograph(), box)
    assert np.abs(found.astype(int) - np.asarray(picture).transpose(2, 0, 1)).mean() < 0.05


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_one_size_are_resized_together_as_each_alone(channels):
    images, preprocess = noise(2, 5, 20, 30, 3), Preprocess((16, 12), channels, 0.9)
    together = preprocess.pixels(images)
    assert together.shape == (2, 5, channels, 16, 12)
    assert np.array_equal(together[1, 3], preprocess.pixels(images[1, 3]))


def test_arrays_that_torch_cannot_share_are_read_too():
    image = noise(30, 40, 3)
    expected = Preprocess((8, 8), 3).pixels(image[:, ::-1].copy())
    locked = image.copy()
    locked.flags.writeable = False
    assert np.array_equal(Preprocess((8, 8), 3).pixels(image[:, ::-1]), expected)
    assert np.array_equal(Preprocess((8, 8), 3).pixels(locked[:, ::-1]), expected)


def test_the_middle_of_a_very_long_image_is_kept():
    image = np.zeros((10, 1001, 1), dtype=np.uint8)
    image[:, 495:506] = 200
    found = Preprocess((20, 20), 1).pixels(image)
    assert (found[0, :, 2:18] == 200).all()
    assert np.array_equal(found, found[:, :, ::-1])


def test_a_large_batch_is_normalised_as_each_image_alone():
    pixels = torch.from_numpy(noise(7, 3, 200, 210))
    preprocess = Preprocess((200, 210), 3, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    assert torch.equal(preprocess.normalise(pixels), torch.cat([preprocess.normalise(image[None]) for image in pixels]))
    assert preprocess.normalise(pixels[:0]).shape == (0, 3, 200, 210)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize(
    ("shape", "channels", "bits"),
    [((50, 37, 3), 3, 8), ((20, 300, 1), 3, 8), ((8, 8, 1), 1, 8), ((33, 60, 1), 1, 16), ((33, 60, 2), 2, 32)],
)
def test_pillow_preprocesses_as_torch_does(shape, channels, bits, interpolation):
    values = np.random.default_rng(0).standard_normal(shape) * 60 + 128
    image = values.astype(np.float32) if bits == 32 else (values * (257 if bits == 16 else 1)).clip(0, 2**bits - 1)
    image = image.astype({8: np.uint8, 16: np.uint16, 32: np.float32}[bits])
    preprocess = Preprocess((16, 24), channels, crop=0.9, bits=bits, interpolation=interpolation)
    ours, theirs = preprocess.pixels_by_pillow(image), preprocess.pixels(image)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert np.abs(ours.astype(np.float64) - theirs).max() <= (1 if bits == 8 else 0.1 if bits == 16 else 1e-3)


def test_arrays_are_normalised_as_tensors_are():
    preprocess = Preprocess((4, 4), 3, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 4), dtype=np.uint8)
    assert (preprocess.normalise_array(pixels) == preprocess.normalise(torch.from_numpy(pixels)).numpy()).all()
