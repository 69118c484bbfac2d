"""Batch augmentation, between the loader's pixels and the model.

Every transform runs on the whole batch, on the batch's device, with its own parameters for each image. Random numbers
are drawn on the CPU from one generator: CPU and GPU runs draw the same ones, and a resumed run restores only the
generator's state.

Geometric transforms pad by reflection. Black borders would add strong edges that no real image has, and blank whole
patches of a small image; a plain background, as around a digit, stays plain.

RandAugment: https://arxiv.org/abs/1909.13719. 3-Augment: https://arxiv.org/abs/2204.07118.
Random erasing: https://arxiv.org/abs/1708.04896.
Mixup: https://arxiv.org/abs/1710.09412. CutMix: https://arxiv.org/abs/1905.04899.

Legend: B batch, C channels, H height, W width, K classes, S RandAugment operations per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.data.draws import rand, randint
from vitrail.world import world

ERASED = (0.02, 1 / 3)  # range of the erased fraction of the area
ASPECT = (0.3, 3.3)  # range of the erased rectangle's aspect ratio, relative to the image's


def augment(
    pixels: Tensor,
    labels: Tensor,
    config: AugmentConfig,
    normalise: Callable[[Tensor], Tensor],
    classes: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Pixels B C H W and class indices (B,) → normalised float images and target distributions (B, K).

    Multi-label and regression targets (B, K) are used as they are. Pixels stay uint8 (float32 for higher bit depths)
    until `normalise`, so it gets the same input as in evaluation.
    """
    assert pixels.dtype in (torch.uint8, torch.float32), pixels.dtype
    if config.shift or config.hflip:
        pixels = shift_and_flip(pixels, config.shift, config.hflip, generator)
    if config.randaug:
        pixels = randaugment(pixels, config.randaug, config.magnitude, generator)
    if config.three_augment:
        pixels = three_augment(pixels, config.three_augment, generator)
    if config.color_jitter:
        pixels = jitter(pixels, config.color_jitter, generator)
    images = normalise(pixels)
    if config.reprob:
        images = erase(images, config.reprob, generator)
    targets = (F.one_hot(labels, classes) if labels.ndim == 1 else labels).to(images.dtype)
    if (config.mixup or config.cutmix) and torch.rand((), generator=generator) < config.mix_prob:
        images, targets = mix(images, targets, config.mixup, config.cutmix, generator)
    choices = classes if labels.ndim == 1 else 2  # each label of a multi-label target is binary
    return images, targets * (1 - config.smoothing) + config.smoothing / choices


def is_deterministic(config: AugmentConfig) -> bool:
    """Whether loader and augmentation produce the same image in every epoch."""
    mixes = (config.mixup or config.cutmix) and config.mix_prob
    moves = (config.shift, config.hflip, config.randaug, config.three_augment, config.color_jitter, config.reprob)
    return config.crop_scale == 1 and config.aug_repeats == 1 and not mixes and not any(moves)


def shift_and_flip(pixels: Tensor, shift: int, hflip: float, generator: torch.Generator) -> Tensor:
    """Random translation by up to `shift` whole pixels and horizontal flip, without interpolation."""
    b, c, h, w = pixels.shape
    down, right = randint(-shift, shift + 1, (2, b), generator)[..., None]
    flips = rand(b, generator=generator) < hflip
    if shift:
        rows = _reflect(torch.arange(h) - down, h).to(pixels.device)
        cols = _reflect(torch.arange(w) - right, w).to(pixels.device)
        source = rows[:, :, None] * w + cols[:, None, :]  # B H W
        pixels = pixels.flatten(2).gather(2, source.view(b, 1, h * w).expand(-1, c, -1)).view_as(pixels)
    if hflip:
        chosen = zip(pixels.unbind(), flips.tolist(), strict=True)
        pixels = torch.stack([image.flip(2) if flip else image for image, flip in chosen])
    return pixels


def _reflect(indices: Tensor, side: int) -> Tensor:
    """Reflects indices outside 0 … side - 1 at the edges of the image."""
    indices = indices % (2 * side)
    return torch.minimum(indices, 2 * side - 1 - indices)


# RandAugment ----------------------------------------------------------------------------------------------
#
# An operation has a level from 0 to 1; its sign is the direction of operations that have one.
# Colour operations take floats 0 … 255 and levels (B, 1, 1, 1); `recolour` rounds and clips. Images of more than
# 8 bits, whose sensors seldom use the full range, get only `ANY_DEPTH`, the operations that need no white point.


def _autocontrast(images: Tensor, level: Tensor) -> Tensor:  # noqa: ARG001  # has no level
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = high == low
    return (images - low.masked_fill(flat, 0)) * (255 / (high - low)).masked_fill(flat, 1)


def _equalize(images: Tensor, level: Tensor) -> Tensor:  # noqa: ARG001  # has no level
    """Histogram equalisation: a pixel's new value is the fraction of darker pixels.

    Pillow rounds the pixels per gray level to an integer, which turns a third of a 20×20 image white and leaves
    images below 16×16 unchanged; this divides exactly.
    """
    values = images.flatten(2).long()
    counts = torch.zeros(*values.shape[:2], 256, device=images.device)
    counts.scatter_add_(2, values, counts.new_ones(()).expand_as(values))
    darker = counts.cumsum(2) - counts
    most = torch.where(counts > 0, darker, 0).amax(2, keepdim=True)
    new = torch.where(most > 0, darker * 255 / most, torch.arange(256, device=images.device))
    return new.gather(2, values).view_as(images)


def _solarize(images: Tensor, level: Tensor) -> Tensor:
    return (images - 255 * (images >= 256 - 256 * level.abs())).abs_()


def _posterize(images: Tensor, level: Tensor) -> Tensor:
    step = torch.exp2((4 * level.abs()).round())
    return (images / step).floor_() * step


def _brightness(images: Tensor, level: Tensor) -> Tensor:
    return images * (1 + 0.9 * level)


def _contrast(images: Tensor, level: Tensor) -> Tensor:
    return _extrapolate(images, _grayscale(images.mean((2, 3), keepdim=True)), level)


def _saturation(images: Tensor, level: Tensor) -> Tensor:
    return _extrapolate(images, _grayscale(images), level) if images.shape[1] == 3 else images


def _sharpness(images: Tensor, level: Tensor) -> Tensor:
    # Pillow's smoothing kernel is 5 at the centre and 1 around it, over 13. At the border the 3 × 3 sum is rescaled to
    # 9 pixels. Separable sums take a third of the time of `avg_pool2d`.
    around, count = images, torch.ones_like(images[:1, :1])
    for dim in (2, 3):
        around, count = _sum3(around, dim), _sum3(count, dim)
    return _extrapolate(images, (around * (9 / count) + 4 * images) / 13, level)


def _sum3(values: Tensor, dim: int) -> Tensor:
    """The sum of each value and its two neighbours along a dimension."""
    side = values.shape[dim]
    sums = values.clone()
    sums.narrow(dim, 1, side - 1).add_(values.narrow(dim, 0, side - 1))
    sums.narrow(dim, 0, side - 1).add_(values.narrow(dim, 1, side - 1))
    return sums


def _extrapolate(images: Tensor, degenerate: Tensor, level: Tensor) -> Tensor:
    """From `degenerate` through the image and beyond: Pillow's `enhance` with a factor of 0.1 to 1.9."""
    return degenerate + (images - degenerate) * (1 + 0.9 * level)


def _grayscale(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * images.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)


COLOUR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "solarize": _solarize,
    "posterize": _posterize,
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "sharpness": _sharpness,
}
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = ("identity", *GEOMETRIC, *COLOUR)
ANY_DEPTH = ("identity", *GEOMETRIC, "brightness", "contrast", "sharpness")


def randaugment(pixels: Tensor, count: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """Applies `count` operations to each image, drawn uniformly from `OPERATIONS` or, above 8 bits, from `ANY_DEPTH`.

    The geometric ones come first, composed into one warp, so that an image is interpolated only once.
    """
    shape = count, len(pixels)
    allowed = torch.tensor([OPERATIONS.index(name) for name in (OPERATIONS if _is_8bit(pixels) else ANY_DEPTH)])
    kinds = allowed[randint(0, len(allowed), shape, generator)]
    levels = magnitude / 10 * (randint(0, 2, shape, generator) * 2 - 1)
    places = torch.arange(len(pixels))

    def arrange(order: Tensor) -> None:  # groups the images by operation, in a single copy
        nonlocal pixels, kinds, levels, places
        pixels = pixels.index_select(0, order.to(pixels.device))
        kinds, levels, places = kinds[:, order], levels[:, order], places[order]

    moves = ((kinds > 0) & (kinds <= len(GEOMETRIC))).any(0)
    arrange(moves.int().argsort(descending=True))
    moved = int(moves.sum())
    maps = matrices(kinds[:, :moved], levels[:, :moved], (pixels.shape[2], pixels.shape[3]))
    pixels[:moved] = warp(pixels[:moved], maps)
    for slot in range(count):
        arrange(kinds[slot].argsort())
        pixels = recolour(pixels, kinds[slot], levels[slot])
    return pixels.index_select(0, places.argsort().to(pixels.device))


def recolour(pixels: Tensor, kinds: Tensor, levels: Tensor) -> Tensor:
    """Applies the operations of `COLOUR` to images sorted by `kinds`; other kinds do nothing."""
    counts = kinds.bincount(minlength=len(OPERATIONS)).tolist()
    others, counts = sum(counts[: -len(COLOUR)]), counts[-len(COLOUR) :]
    images, levels = pixels[others:].float(), levels[others:].to(pixels.device).view(-1, 1, 1, 1)
    groups = zip(COLOUR.values(), torch.split(images, counts), torch.split(levels, counts), strict=True)
    for operation, group, level in groups:
        if len(group):
            group.copy_(operation(group, level))
    return torch.cat([pixels[:others], _to_dtype(images, pixels)])


def _recolour_all(pixels: Tensor, name: str, levels: Tensor) -> Tensor:
    return recolour(pixels, torch.full((len(pixels),), OPERATIONS.index(name)), levels)


def _to_dtype(images: Tensor, pixels: Tensor) -> Tensor:
    """Float images in the dtype of `pixels`: rounded and clipped to uint8, or unchanged. Overwrites `images`."""
    return _to_uint8(images.clamp_(0, 255)) if _is_8bit(pixels) else images


def _to_uint8(images: Tensor) -> Tensor:
    """Rounds in place and converts by way of int32, which is three times as fast in torch."""
    return images.round_().int().to(torch.uint8)


def _is_8bit(pixels: Tensor) -> bool:
    """Whether pixels are 8-bit; higher bit depths are floats of unknown range."""
    return pixels.dtype == torch.uint8


def matrices(kinds: Tensor, levels: Tensor, size: tuple[int, int]) -> Tensor:
    """The composed affine maps (B, 2, 3) of the geometric operations among `kinds` (S, B).

    A map takes output coordinates to input coordinates: x and y in pixels from the centre.
    """

    def amount(name: str, largest: float) -> Tensor:
        return torch.where(kinds == OPERATIONS.index(name), largest * levels.double(), 0.0)

    h, w = size
    angle = amount("rotate", math.radians(30))
    steps = torch.zeros(*kinds.shape, 3, 3, dtype=torch.float64)  # one operation per slot and image
    steps[..., 0, 0] = steps[..., 1, 1] = angle.cos()
    steps[..., 0, 1] = amount("shear_x", 0.3) - angle.sin()
    steps[..., 1, 0] = amount("shear_y", 0.3) + angle.sin()
    steps[..., 0, 2] = amount("translate_x", 150 / 331 * w)  # AutoAugment: 150 pixels at a size of 331
    steps[..., 1, 2] = amount("translate_y", 150 / 331 * h)
    steps[..., 2, 2] = 1
    total = steps[0]
    for step in steps[1:]:
        total = total @ step
    return total[:, :2].float()


def warp(pixels: Tensor, maps: Tensor) -> Tensor:
    """Warps images by maps (B, 2, 3) as from `matrices`: bilinear, with reflection padding."""
    h, w = pixels.shape[2:]
    y = (torch.arange(h) - (h - 1) / 2)[:, None]
    x = torch.arange(w) - (w - 1) / 2
    across, down, offset = (maps * maps.new_tensor([[2 / w], [2 / h]]))[..., None, None].unbind(2)
    rows, columns = (down * y + offset).to(pixels.device), (across * x).to(pixels.device)
    grid = (rows + columns).permute(0, 2, 3, 1)  # B H W 2
    images = F.grid_sample(pixels.float(), grid, padding_mode="reflection", align_corners=False)
    return _to_uint8(images) if _is_8bit(pixels) else images


# 3-Augment and colour jitter ------------------------------------------------------------------------------

BLUR = (0.1 / 224, 2 / 224)  # range of the standard deviation, as a fraction of the shorter side


def three_augment(pixels: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Grayscale, solarization or Gaussian blur, one of the three with equal probability, as in DeiT III.

    `probability` is that of changing an image; DeiT III uses 1. Images of more than 8 bits are not solarized, which
    needs a white point, but blurred.
    """
    b = len(pixels)
    kinds = randint(0, 3, (b,), generator)
    if not _is_8bit(pixels):
        kinds[kinds == 1] = 2
    draw, strength = rand(2, b, generator=generator)
    deviations = (BLUR[0] + strength * (BLUR[1] - BLUR[0])) * min(pixels.shape[2:])
    kinds[draw >= probability] = 3
    pixels = pixels.clone()
    for kind in range(3):
        chosen = (kinds == kind).nonzero().flatten()
        if len(chosen):
            index = chosen.to(pixels.device)
            images = pixels[index]
            if kind == 0:
                pixels[index] = _to_dtype(_grayscale(images.float()), pixels).expand_as(images)
            elif kind == 1:
                pixels[index] = _recolour_all(images, "solarize", torch.full((len(chosen),), 0.5))
            else:
                pixels[index] = blur(images, deviations[chosen])
    return pixels


def blur(pixels: Tensor, deviations: Tensor) -> Tensor:
    """Gaussian blur with a standard deviation per image and replicate padding."""
    b, c, h, w = pixels.shape
    radius = max(math.ceil(3 * BLUR[1] * min(h, w)), 1)
    offsets = torch.arange(-radius, radius + 1)
    kernels = (-0.5 * (offsets / deviations[:, None]) ** 2).softmax(1).to(pixels.device).repeat_interleave(c, 0)
    images = F.pad(pixels.float().view(1, b * c, h, w), (radius, radius, radius, radius), mode="replicate")
    images = F.conv2d(images, kernels[:, None, :, None], groups=b * c)
    images = F.conv2d(images, kernels[:, None, None, :], groups=b * c)
    return _to_dtype(images.view(b, c, h, w), pixels)


def jitter(pixels: Tensor, largest: float, generator: torch.Generator) -> Tensor:
    """Colour jitter: scales brightness, contrast and saturation of each image by random factors around 1."""
    for name in ("brightness", "contrast", "saturation"):
        change = largest * (2 * rand(len(pixels), generator=generator) - 1)
        pixels = _recolour_all(pixels, name, change / 0.9)  # level 1 is a change of 0.9
    return pixels


# On normalised images -------------------------------------------------------------------------------------


def erase(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Random erasing: fills a rectangle in some images with 0, the mean colour."""
    b, _, h, w = images.shape
    draw, area, aspect, y, x = rand(5, b, generator=generator)
    area = ERASED[0] + area * (ERASED[1] - ERASED[0])
    aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** aspect
    tall = (h * (area * aspect).sqrt()).round().clamp(1, h)
    wide = (w * (area / aspect).sqrt()).round().clamp(1, w)
    rows = _span((y * (h - tall + 1)).floor(), tall * (draw < probability), h)
    cols = _span((x * (w - wide + 1)).floor(), wide, w)
    return images.masked_fill(_box(rows, cols, images.device), 0.0)


def mix(
    images: Tensor, targets: Tensor, mixup: float, cutmix: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mixes each image and target with another of the batch, by mixup or CutMix; one at random if both are on."""
    b, _, h, w = images.shape
    both = mixup > 0 and cutmix > 0
    cut = bool(torch.rand((), generator=generator) < 0.5) if both else cutmix > 0
    alpha = cutmix if cut else mixup
    # torch cannot sample Beta from a given generator; numpy can, seeded from it.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    beta = partial(np.random.default_rng(seed).beta, alpha, alpha)
    keep = world().drawn(lambda rows: torch.from_numpy(beta(rows)).float(), b)
    partner = torch.randperm(b * world().size, generator=generator)
    others = world().fetch(images, partner)
    if cut:
        y, x = rand(2, b, generator=generator)
        tall, wide = (h * (1 - keep).sqrt()).round(), (w * (1 - keep).sqrt()).round()
        rows = _span((y * h - tall / 2).round(), tall, h)
        cols = _span((x * w - wide / 2).round(), wide, w)
        images = torch.where(_box(rows, cols, images.device), others, images)
        keep = 1 - rows.sum(1) * cols.sum(1) / (h * w)  # the actual area: the box is rounded and clipped
    else:
        images = others.lerp_(images, keep.to(images).view(b, 1, 1, 1))
    return images, torch.lerp(world().fetch(targets, partner), targets, keep.to(images).view(b, 1))


def _span(start: Tensor, length: Tensor, side: int) -> Tensor:
    """A mask of the `length` positions from `start` on, of `side`: B side."""
    positions = torch.arange(side)
    return (positions >= start[:, None]) & (positions < (start + length)[:, None])


def _box(rows: Tensor, cols: Tensor, device: torch.device) -> Tensor:
    """A mask of the pixels in a span of rows and a span of columns: B 1 H W."""
    return rows.to(device)[:, None, :, None] & cols.to(device)[:, None, None, :]
