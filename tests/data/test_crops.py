"""Random crops of a batch: boxes, resampling, layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.crops import Crops, crop_resize, random_crops


@pytest.mark.parametrize("box", [(0.0, 0.0, 1.0, 1.0), (0.25, 0.5, 0.5, 0.25), (0.1, 0.2, 0.37, 0.61)])
@pytest.mark.parametrize("size", [(8, 8), (40, 24), (13, 50)])
def test_a_crop_equals_pillows_bilinear_resize_of_the_box(box, size):
    pixels = torch.randint(0, 256, (2, 3, 40, 32), generator=torch.Generator().manual_seed(0)).float()
    found = crop_resize(pixels, torch.tensor([box, box]), size)
    y, x, h, w = (share * side for share, side in zip(box, (40, 32, 40, 32), strict=True))
    for plane, ours in zip(pixels.flatten(0, 1), found.flatten(0, 1), strict=True):
        # Pillow ignores pixels outside the box; the filter here sees them, so only the inside must agree.
        theirs = Image.fromarray(plane.numpy()).resize(size[::-1], Image.Resampling.BILINEAR, (x, y, x + w, y + h))
        inner = (slice(1, -1), slice(1, -1)) if box[2] < 1 else (slice(None), slice(None))
        assert np.abs(np.asarray(theirs)[inner] - ours.numpy()[inner]).max() < 0.01


def test_bytes_are_rounded_and_constant_images_stay_constant():
    pixels = torch.full((3, 1, 9, 9), 77, dtype=torch.uint8)
    found = random_crops(pixels, Crops(2, (0.1, 1.0), (5, 7)), torch.Generator().manual_seed(0))
    assert found.dtype == torch.uint8
    assert found.shape == (6, 1, 5, 7)
    assert (found == 77).all()


def test_crops_of_one_image_are_a_batch_apart_and_differ():
    pixels = torch.stack([torch.full((1, 8, 8), float(i)) for i in range(4)])
    found = random_crops(pixels, Crops(3, (0.2, 0.5), (4, 4)), torch.Generator().manual_seed(0))
    assert found[:, 0, 0, 0].tolist() == pytest.approx([0, 1, 2, 3] * 3)
    noise = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    first, second = random_crops(noise, Crops(2, (0.2, 0.5), (8, 8)), torch.Generator().manual_seed(0)).split(2)
    assert not torch.allclose(first, second)


def test_areas_and_places_cover_the_asked_range():
    """Of a ramp from 0 to 1, a crop's ends tell where it was cut."""
    ramp = torch.linspace(0, 1, 256).expand(2000, 1, 256, 256)
    found = random_crops(ramp, Crops(1, (0.25, 0.25), (64, 64)), torch.Generator().manual_seed(0))
    widths = (found[:, 0, 0, -1] - found[:, 0, 0, 0]) * 64 / 63
    assert widths.min().item() == pytest.approx(0.5 * (3 / 4) ** 0.5, abs=0.02)
    assert widths.max().item() == pytest.approx(0.5 * (4 / 3) ** 0.5, abs=0.02)
    assert found[:, 0, 0, 0].min() < 0.02
    assert found[:, 0, 0, -1].max() > 0.98


def test_the_generator_decides_everything():
    pixels = torch.rand(4, 3, 12, 12)
    once, again = (random_crops(pixels, Crops(2, (0.3, 1), (8, 8)), torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(once, again)
