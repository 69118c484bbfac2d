"""Images that are no pictures: NumPy files and TIFF bands, 16 bits and floats, from the file to the model."""

from __future__ import annotations

import sys
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import torch
from bands import BANDS, DEEP, folder_of, npy, tiff
from PIL import Image

from vitrail.config import AugmentConfig
from vitrail.data import ArraySplit, open_data
from vitrail.data.augment import ANY_DEPTH, OPERATIONS, augment, randaugment
from vitrail.data.images import UnreadableImage, inspect_image, read_image
from vitrail.data.loader import TrainBatches, batches
from vitrail.data.preprocess import Preprocess
from vitrail.data.statistics import mean_and_std
from vitrail.errors import UserError

RNG = np.random.default_rng(0)


def reason(path: Path, *wanted: int) -> str:
    with pytest.raises(UnreadableImage) as caught:
        read_image(path, *wanted)
    return str(caught.value)


# Files


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 1), (6, 8, 3), (6, 8, 5), (4, 4, 4)])
def test_a_numpy_file_is_read_as_it_is(tmp_path, shape, dtype):
    values = RNG.integers(0, 256, shape).astype(dtype)
    found = read_image(npy(tmp_path / "a.npy", values))
    assert (found.dtype, found.ndim) == (dtype, 3)
    assert np.array_equal(found.reshape(shape), values)


def test_channels_that_come_first_in_a_numpy_file_are_put_last(tmp_path):
    assert np.array_equal(read_image(npy(tmp_path / "a.npy", DEEP.transpose(2, 0, 1))), DEEP)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[True, False]]), np.array([255, 0], np.uint8)),
        (np.array([[3, 500]], dtype=">u2"), np.array([3, 500], np.uint16)),
        (np.array([[-1000, 2000]], dtype=np.int16), np.array([-1000, 2000], np.float32)),
        (np.array([[0.25, np.nan, np.inf]]), np.array([0.25, 0, 0], np.float32)),
        (np.array([[7, 255]], dtype=np.int64), np.array([7, 255], np.float32)),
    ],
)
def test_every_type_of_number_becomes_one_of_three(tmp_path, values, expected):
    found = read_image(npy(tmp_path / "a.npy", values))[0, :, 0]
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


def test_what_is_no_image_in_a_numpy_file_is_said(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([[{}]], dtype=object), allow_pickle=True)
    assert reason(path) == "an array of Python objects, which could run code"
    assert reason(npy(path, np.zeros(5))) == "an array of shape (5,), not (height, width, channels)"
    assert reason(npy(path, np.zeros((2, 0, 3)))) == "an array of shape (2, 0, 3), not (height, width, channels)"
    assert reason(npy(path, np.array([["a"]]))) == "values of type <U1, not numbers"
    whole = npy(path, DEEP).read_bytes()
    for length in (20, 200, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "damaged" in reason(path)


@pytest.mark.parametrize(
    "options",
    [
        BANDS,
        BANDS | {"compression": "zlib", "predictor": True},
        BANDS | {"compression": "lzw"},
        BANDS | {"tile": (16, 16), "byteorder": ">", "bigtiff": True},
        {},  # tifffile makes pages of it
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_all_bands_of_a_tiff_file_are_read(tmp_path, dtype, options):
    values = (DEEP // 300).astype(dtype)
    path = tiff(tmp_path / "a.tif", values, **options)
    assert read_image(path).dtype == dtype
    assert np.array_equal(read_image(path), values)
    facts = inspect_image(path)
    assert (facts.h, facts.w, facts.bands, facts.bits) == (12, 16, 5, 8 * values.itemsize)


@pytest.mark.parametrize("options", [{"planarconfig": "separate"}, {}, {"imagej": True, "metadata": {"axes": "CYX"}}])
def test_bands_of_a_tiff_file_may_come_one_after_the_other(tmp_path, options):
    path = tiff(tmp_path / "a.tif", DEEP.transpose(2, 0, 1), photometric="minisblack", **options)
    assert np.array_equal(read_image(path), DEEP)


def test_a_fourth_band_is_no_transparency_and_colour_keeps_sixteen_bits(tmp_path):
    near_infrared = (DEEP[:, :, :4] >> 8).astype(np.uint8)
    path = tiff(tmp_path / "a.tif", near_infrared, photometric="rgb", extrasamples=["unspecified"])
    assert np.array_equal(read_image(path), near_infrared)
    see_through = tiff(tmp_path / "b.tif", near_infrared, photometric="rgb", extrasamples=["unassalpha"])
    assert read_image(see_through).shape == (12, 16, 3)
    assert np.array_equal(read_image(see_through, 4), near_infrared)
    colour = tiff(tmp_path / "c.tif", DEEP[:, :, :3], photometric="rgb")
    assert np.array_equal(read_image(colour), DEEP[:, :, :3])
    assert (inspect_image(colour).bands, inspect_image(colour).bits) == (0, 16)


def test_a_colour_png_keeps_sixteen_bits(tmp_path):
    path = tmp_path / "deep.png"
    path.write_bytes(imagecodecs.png_encode(DEEP[:, :, :3].copy()))
    assert np.array_equal(read_image(path), DEEP[:, :, :3])
    with Image.open(path) as seen:
        assert np.abs(read_image(path, bits=8).astype(int) - np.asarray(seen)).max() <= 1
    assert (inspect_image(path).bands, inspect_image(path).bits) == (0, 16)
    path.write_bytes(path.read_bytes()[:-60])
    assert "damaged" in reason(path)


def test_a_cut_tiff_file_of_bands_is_unreadable(tmp_path):
    path = tiff(tmp_path / "a.tif", DEEP, **BANDS)
    whole = path.read_bytes()
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "damaged" in reason(path)


def test_without_a_decoder_the_extra_is_named(tmp_path, monkeypatch):
    bands = tiff(tmp_path / "a.tif", DEEP, **BANDS)
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(DEEP[:, :, :3].copy()))
    for name in ("tifffile", "imagecodecs"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'vitrail[data]'" in reason(bands)
    assert "pip install 'vitrail[data]'" in reason(tmp_path / "a.png")


def test_other_channels_and_bits_are_made_where_they_can_be(tmp_path):
    colour = npy(tmp_path / "c.npy", DEEP[:, :, :3])
    eight = npy(tmp_path / "e.npy", (DEEP[:, :, :3] >> 8).astype(np.uint8))
    grey = read_image(colour, 1)[:, :, 0]
    assert np.abs(grey - DEEP[:, :, :3] @ np.array([0.299, 0.587, 0.114])).max() < 1
    pillow = np.asarray(Image.fromarray(read_image(eight)).convert("L"))
    assert np.array_equal(read_image(eight, 1)[:, :, 0], pillow)
    assert (read_image(colour, 4)[:, :, 3] == 65535).all()
    assert np.array_equal(read_image(read_to(tmp_path, read_image(eight, bits=16)), bits=8), read_image(eight))
    bands = npy(tmp_path / "b.npy", DEEP)
    assert reason(bands, 3) == "5 channels, which cannot be converted to 3"
    assert reason(colour, 3, 32) == "16-bit values, which cannot be converted to floating-point"
    assert reason(npy(tmp_path / "f.npy", np.zeros((2, 2))), 1, 16).startswith(
        "floating-point values, which cannot be converted to 16-bit"
    )


def read_to(folder: Path, image: np.ndarray) -> Path:
    assert (image.dtype, image.max()) == (np.uint16, 65535)
    return npy(folder / "sixteen.npy", image)


# To the model


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_bands_are_resized_alike_and_keep_their_depth(channels, bits):
    y, x = np.mgrid[:30, :40]
    ramp = np.stack([(y + x * c) / 200 for c in range(channels)], axis=2)  # in 0..1, and straight
    white, dtype = {8: (255, np.uint8), 16: (65535, np.uint16), 32: (1, np.float32)}[bits]
    image = (np.rint(ramp * white) if bits < 32 else ramp).astype(dtype)
    found = Preprocess((12, 12), channels, bits=bits).pixels(image)
    assert (found.shape, found.dtype) == ((channels, 12, 12), np.uint8 if bits == 8 else np.float32)
    for band, values in zip(found, ramp.transpose(2, 0, 1), strict=True):
        single = Image.fromarray(values.astype(np.float32)).resize((12, 12), Image.Resampling.BICUBIC, (5, 0, 35, 30))
        assert np.abs(band / white - np.asarray(single)).max() <= (1.01 / white if bits < 32 else 1e-6)


def test_sixteen_bits_are_not_squeezed_to_eight():
    preprocess = Preprocess((1, 4), 1, bits=16)
    image = np.array([[0, 1, 300, 65535]], dtype=np.uint16)[:, :, None]
    assert preprocess.pixels(image)[0, 0].tolist() == [0, 1, 300, 65535]
    expected = torch.tensor([0, 1, 300, 65535]) / 65535 * 2 - 1
    torch.testing.assert_close(preprocess(image)[0, 0], expected)


def test_overshoot_of_the_resize_is_cut_off():
    image = np.zeros((8, 8, 1), np.uint16)
    image[:, 4:] = 65535
    found = Preprocess((16, 16), 1, bits=16).pixels(image)
    assert (found.min(), found.max()) == (0, 65535)


def test_an_image_of_other_channels_is_refused_by_the_model():
    with pytest.raises(UserError, match="expects 3 channels of 16 bits, but got 5 channels"):
        Preprocess((4, 4), 3, bits=16).pixels(DEEP)


def deep_split(count: int = 12) -> ArraySplit:
    return ArraySplit(RNG.integers(0, 4096, (count, 8, 8, 5), dtype=np.uint16), np.arange(count), "deep")


def test_a_whole_batch_of_deep_arrays_is_what_they_are_one_by_one():
    split, preprocess = deep_split(), Preprocess((8, 8), 5, bits=16)
    pixels, _ = next(batches(split, preprocess, 12))
    assert pixels.dtype == torch.float32
    assert np.array_equal(pixels.numpy(), np.stack([preprocess.pixels(split.image(i)) for i in range(12)]))
    shallow, _ = next(batches(split, Preprocess((8, 8), 5), 12))
    assert (shallow.dtype, shallow.max().item()) == (torch.uint8, 16)


@pytest.mark.parametrize("crop_scale", [1.0, 0.5])
def test_deep_batches_go_through_every_augmentation(crop_scale):
    preprocess = Preprocess((8, 8), 5, mean=(0.03,), std=(0.02,), bits=16)
    config = AugmentConfig(
        crop_scale=crop_scale,
        shift=2,
        hflip=0.5,
        randaug=2,
        three_augment=1.0,
        reprob=0.5,
        mixup=0.8,
        cutmix=1.0,
        smoothing=0.1,
    )
    for pixels, targets in TrainBatches(deep_split(), preprocess, 6, 0, crop_scale).epoch(0):
        images, _ = augment(pixels, targets, config, preprocess.normalise, 12, torch.Generator().manual_seed(0))
        assert images.shape == (6, 5, 8, 8)
        assert images.isfinite().all()


def test_randaugment_leaves_out_what_needs_a_white_point():
    pixels = torch.rand(400, 5, 6, 6) * 1e-3  # as bytes, all of this would be black
    found = randaugment(pixels.clone(), 1, 9, torch.Generator().manual_seed(0))
    assert not torch.equal(found, pixels)
    assert 0.2e-3 < found.mean() < 0.8e-3
    assert set(OPERATIONS) - set(ANY_DEPTH) == {"autocontrast", "equalize", "solarize", "posterize", "saturation"}


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_mean_and_std_are_those_of_the_pixels(bits):
    pixels = RNG.integers(0, 200, (70, 8, 8, 3)).astype({8: np.uint8, 16: np.uint16, 32: np.float32}[bits])
    pixels[..., 1] += 50
    pixels[..., 2] = 7
    mean, std = mean_and_std(ArraySplit(pixels, np.zeros(70, np.int64), "x"), Preprocess((8, 8), 3, bits=bits))
    values = pixels.reshape(-1, 3) / {8: 255, 16: 65535, 32: 1}[bits]
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-3)
    np.testing.assert_allclose(std, [*values.std(axis=0)[:2], 1], rtol=1e-3)


# Data sets


def test_the_channels_and_bits_of_a_folder_are_found(tmp_path):
    data = open_data(folder_of(tmp_path / "deep"))
    assert (data.channels, data.bits, data.size) == (5, 16, (8, 8))
    assert data.splits["train"].image(0).dtype == np.uint16
    npy(tmp_path / "deep" / "dark" / "9.npy", np.zeros((8, 8, 4), np.uint16))
    with pytest.raises(UserError, match=r"same channels, but .*\.npy is 5 bands and .*9\.npy is 4 bands"):
        open_data(tmp_path / "deep")


def test_eight_bit_pictures_beside_deeper_ones_are_brought_to_their_bits(tmp_path):
    for label in ("a", "b"):
        npy(tmp_path / label / "1.npy", np.full((4, 4), 65535, np.uint16))
        Image.new("RGB", (4, 4), (255, 0, 1)).save(tmp_path / label / "2.png")
    data = open_data(tmp_path, val_fraction=0.5)
    assert (data.channels, data.bits) == (3, 16)
    tops = {split.image(i).max() for split in data.splits.values() for i in range(len(split))}
    assert tops == {65535}
    npy(tmp_path / "a" / "3.npy", np.zeros((4, 4, 3), np.float32))
    with pytest.raises(UserError, match=r"3\.npy is grey or colour, floats"):
        open_data(tmp_path)


def test_a_table_may_list_arrays(tmp_path):
    folder_of(tmp_path, count=3)
    lines = [f"{label}/{i}.npy,{label}" for label in ("dark", "bright") for i in range(3)]
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *lines]))
    assert open_data(tmp_path / "t.csv").channels == 5


def test_an_npz_may_hold_bands_of_sixteen_bits(tmp_path):
    x, y = RNG.integers(0, 4096, (8, 6, 6, 7), dtype=np.uint16), np.arange(8) % 2
    np.savez(tmp_path / "a.npz", images=x, labels=y)
    data = open_data(tmp_path / "a.npz")
    assert (data.channels, data.bits) == (7, 16)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_val=x[..., :4], y_val=y)
    with pytest.raises(UserError, match="all splits must have the same number of channels"):
        open_data(tmp_path / "a.npz")


def test_a_model_of_other_channels_or_bits_is_refused(tmp_path):
    data = open_data(folder_of(tmp_path / "deep"))
    with pytest.raises(UserError, match="have 5 channels and cannot be converted to 3: 'channels' must be 5"):
        data.read_as(3, 16)
    with pytest.raises(UserError, match="16-bit and cannot be converted to floating-point"):
        data.read_as(5, 32)
    assert data.read_as(5, 8).splits["val"].image(0).dtype == np.uint8
