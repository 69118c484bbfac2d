"""RandAugment: its operations agree with Pillow's, and each is drawn equally often."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from vitrail.data import augment as module
from vitrail.data.augment import COLOUR, OPERATIONS, matrices, randaugment, warp


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def smooth_photo(h: int, w: int) -> Tensor:
    """Coloured waves, whose interpolation depends little on how the weights are rounded: 1 3 H W."""
    y, x = torch.meshgrid(torch.arange(h) / 7, torch.arange(w) / 9, indexing="ij")
    waves = torch.stack([(y + x).sin(), (y - 2 * x).cos(), (0.5 * y * x.sin()).cos()])
    return (127.5 + 120 * waves).to(torch.uint8)[None]


def to_pil(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())


def from_pil(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def recolour(pixels: Tensor, name: str, levels: Tensor) -> Tensor:
    return module.recolour(pixels, torch.full((len(pixels),), OPERATIONS.index(name)), levels)


def largest_difference(a: Tensor, b: Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


def pillow(name: str, image: Image.Image, level: float) -> Image.Image:
    factor = 1 + 0.9 * level
    if name == "autocontrast":
        return ImageOps.autocontrast(image)
    if name == "equalize":
        return ImageOps.equalize(image)
    if name == "solarize":
        return ImageOps.solarize(image, round(256 - 256 * abs(level)))
    if name == "posterize":
        return ImageOps.posterize(image, 8 - round(4 * abs(level)))
    enhancers = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
        "sharpness": ImageEnhance.Sharpness,
    }
    return enhancers[name](image).enhance(factor)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", COLOUR)
def test_colour_operations_agree_with_pillow(name: str, channels: int) -> None:
    levels = torch.tensor([-1.0, -0.5, 0.25, 0.5, 1.0])
    # Images with a colour cast and a narrow range, else there is little to stretch.
    pixels = noise(5, channels, 256, 240) // 2 + torch.tensor([90, 40, 10])[:channels].view(-1, 1, 1).byte()
    ours = recolour(pixels, name, levels)
    assert torch.equal(ours, pixels) == (name == "saturation" and channels == 1)
    for image, result, level in zip(pixels, ours, levels.tolist(), strict=True):
        theirs = from_pil(pillow(name, to_pil(image), level))
        inner = (..., slice(1, -1), slice(1, -1))  # Pillow leaves the rim as it is when it sharpens
        assert largest_difference(result[inner], theirs[inner]) <= (2 if name == "equalize" else 1)


def test_equalize_uses_the_whole_range_of_a_tiny_image() -> None:
    pixels = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    result = recolour(pixels, "equalize", torch.ones(1)).flatten()
    assert torch.equal(result, (torch.arange(64) * 255 / 63).round().byte())


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_an_image_of_one_colour_stays_as_it_is(name: str) -> None:
    pixels = torch.full((1, 3, 8, 8), 77, dtype=torch.uint8)
    assert torch.equal(recolour(pixels, name, torch.ones(1)), pixels)


def test_saturation_leaves_other_than_three_channels_alone() -> None:
    pixels = noise(2, 4, 8, 8)
    assert torch.equal(recolour(pixels, "saturation", torch.tensor([1.0, -1.0])), pixels)


def kind(name: str) -> Tensor:
    return torch.tensor([[OPERATIONS.index(name)]])


@pytest.mark.parametrize("level", [1.0, -0.6])
@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_geometric_operations_agree_with_pillow(name: str, level: float) -> None:
    h, w = 60, 80
    pixels = smooth_photo(h, w)
    image, bilinear = to_pil(pixels[0]), Image.Resampling.BILINEAR
    if name == "rotate":
        theirs = image.rotate(30 * level, bilinear)
        inside = image.convert("L").point(lambda _: 255).rotate(30 * level, bilinear)
    else:
        coefficients = {
            "shear_x": (1, 0.3 * level, -0.3 * level * h / 2, 0, 1, 0),
            "shear_y": (1, 0, 0, 0.3 * level, 1, -0.3 * level * w / 2),
            "translate_x": (1, 0, 150 / 331 * level * w, 0, 1, 0),
            "translate_y": (1, 0, 0, 0, 1, 150 / 331 * level * h),
        }[name]
        theirs = image.transform(image.size, Image.Transform.AFFINE, coefficients, bilinear)
        blank = image.convert("L").point(lambda _: 255)
        inside = blank.transform(image.size, Image.Transform.AFFINE, coefficients, bilinear)
    ours = warp(pixels, matrices(kind(name), torch.tensor([[level]]), (h, w)))
    interior = (from_pil(inside) == 255).expand(3, h, w)
    assert interior.float().mean() > 0.4
    assert largest_difference(ours[0], pixels[0]) > 50
    assert largest_difference(ours[0][interior], from_pil(theirs)[interior]) <= 2


def test_geometric_operations_of_several_slots_become_one_map_in_their_order() -> None:
    size = 40, 40
    kinds = torch.tensor([[OPERATIONS.index(name)] for name in ("rotate", "equalize", "translate_x")])
    both = matrices(kinds, torch.ones(3, 1), size)
    # A place is led back through the translation, which came last, and then through the rotation.
    cos, sin, far = math.cos(math.pi / 6), math.sin(math.pi / 6), 150 / 331 * 40
    expected = torch.tensor([[[cos, -sin, far * cos], [sin, cos, far * sin]]])
    torch.testing.assert_close(both, expected)


@pytest.mark.parametrize("size", [(28, 28), (15, 224), (1, 7)])
def test_a_warp_that_goes_nowhere_changes_no_pixel(size: tuple[int, int]) -> None:
    pixels = noise(3, 2, *size)
    assert torch.equal(warp(pixels, matrices(kind("identity").repeat(1, 3), torch.ones(1, 3), size)), pixels)


def test_each_operation_is_drawn_equally_often_and_changes_only_its_own_images() -> None:
    count = 2800
    pixels = (noise(1, 3, 16, 16) // 2 + 30).repeat(count, 1, 1, 1)
    images = randaugment(pixels, 1, 5.0, torch.Generator().manual_seed(0))
    found, counts = torch.unique(images, dim=0, return_counts=True)
    expected = [pixels[:1]]
    for name in OPERATIONS[1:]:
        for level in (0.5, -0.5):
            if name in COLOUR:
                expected.append(recolour(pixels[:1], name, torch.tensor([level])))
            else:
                expected.append(warp(pixels[:1], matrices(kind(name), torch.tensor([[level]]), (16, 16))))
    possible = torch.unique(torch.cat(expected), dim=0)
    assert torch.equal(found, possible)
    # Five have no direction, identity among them; each of the nine others has two results for its chance.
    assert len(possible) == 5 + 9 * 2
    assert counts.min() > count / 28 * 0.6
    assert counts.max() < count / 14 * 1.4
