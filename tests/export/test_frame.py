"""Resizing inside an exported graph gives the pixels that training sees."""

from __future__ import annotations

import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from vitrail.data.preprocess import Preprocess
from vitrail.export.frame import Frame
from vitrail.runs.openvino import compiled, import_openvino

SIZES = [(100, 140), (37, 20), (24, 19), (28, 22), (1, 1), (600, 31), (23, 300)]


def picture(height: int, width: int, channels: int = 3) -> np.ndarray:
    """A smooth picture with some noise, as photographs have."""
    random = np.random.default_rng(height * width)
    small = random.integers(0, 256, (7, 9, channels), np.uint8)
    planes = [
        Image.fromarray(small[:, :, c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)
    ]
    noisy = np.stack([np.asarray(plane) for plane in planes], axis=-1) + random.normal(0, 8, (height, width, channels))
    return np.rint(noisy.clip(0, 255)).astype(np.uint8)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
def test_pixels_are_those_of_training(interpolation):
    for crop in (1.0, 0.875):
        preprocess = Preprocess((24, 19), 3, crop=crop, interpolation=interpolation)
        for size in SIZES:
            image = picture(*size)
            given = Frame(preprocess)(torch.from_numpy(image[None]))[0].numpy()
            difference = np.abs(given - preprocess.pixels(image).astype(np.float32))
            assert difference.max() <= 1  # torch and Pillow round differently, too
            assert difference.mean() < 0.05


@pytest.mark.parametrize(("bits", "channels"), [(16, 1), (32, 5)])
def test_deep_images_are_not_rounded(bits, channels):
    preprocess = Preprocess((24, 19), channels, crop=0.9, bits=bits)
    image = picture(50, 70, channels).astype(np.float32) * (257 if bits == 16 else 0.1)
    stored = image.astype(np.uint16) if bits == 16 else image
    given = Frame(preprocess)(torch.from_numpy(stored.astype(np.float32)[None]))[0].numpy()
    np.testing.assert_allclose(given, preprocess.pixels(stored), rtol=1e-4, atol=1e-4 * image.max())


def test_both_runtimes_compute_the_same_pixels(tmp_path):
    preprocess, dim = Preprocess((24, 19), 3, crop=0.875), torch.export.Dim
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Frame(preprocess),
            (torch.zeros(2, 30, 40, 3, dtype=torch.uint8),),
            tmp_path / "frame.onnx",
            input_names=["pixels"],
            dynamic_shapes=({0: dim("batch"), 1: dim("height", min=1, max=4096), 2: dim("width", min=1, max=4096)},),
            dynamo=True,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(tmp_path / "frame.onnx")
    graph = compiled(import_openvino().Core().read_model(tmp_path / "frame.onnx"))
    for size in SIZES:
        image = picture(*size)
        expected = preprocess.pixels(image).astype(np.float32)
        for given in (session.run(None, {"pixels": image[None]})[0], graph([image[None]])[0]):
            assert np.abs(given[0] - expected).mean() < 0.05


def test_a_margin_is_cropped_away():
    preprocess = Preprocess((24, 19), 3, crop=0.875)
    image = picture(24, 19)
    given = preprocess.pixels(preprocess.with_margin(image[None]))[0]
    assert np.array_equal(given, image.transpose(2, 0, 1))
    assert np.array_equal(Frame(preprocess)(torch.from_numpy(preprocess.with_margin(image[None])))[0].numpy(), given)
