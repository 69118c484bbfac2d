from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.data.augment import augment, blur, is_deterministic

CLASSES = 10
EVERYTHING = AugmentConfig(
    shift=2,
    hflip=0.5,
    randaug=2,
    three_augment=0.8,
    color_jitter=0.3,
    reprob=0.5,
    mixup=0.8,
    cutmix=1.0,
    mix_prob=0.9,
    smoothing=0.1,
)


def normalise(pixels: Tensor) -> Tensor:
    return pixels.float() / 255 - 0.5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def run(pixels: Tensor, config: AugmentConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    labels = torch.arange(len(pixels)) % CLASSES
    return augment(pixels, labels, config, normalise, CLASSES, torch.Generator().manual_seed(seed))


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


def largest_difference(a: Tensor, b: Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


# Off, determinism, shapes


def test_everything_off_is_normalising_and_one_hot() -> None:
    pixels = noise(12, 3, 8, 6)
    images, targets = run(pixels, AugmentConfig())
    assert torch.equal(images, normalise(pixels))
    assert torch.equal(targets, torch.eye(CLASSES)[torch.arange(12) % CLASSES])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 24), (4, 9, 5), (3, 2, 2)])
def test_everything_on_keeps_shape_and_range_for_any_channels_and_size(shape: tuple[int, ...]) -> None:
    pixels = noise(40, *shape)
    before = pixels.clone()
    for seed in range(4):
        images, targets = run(pixels, EVERYTHING, seed)
        assert images.shape == pixels.shape
        assert images.dtype == torch.float32
        assert images.min() >= -0.5
        assert images.max() <= 0.5
        assert (targets >= 0).all()
        torch.testing.assert_close(targets.sum(1), torch.ones(40))
    assert torch.equal(pixels, before), "the loader's own tensor was changed"


def test_the_generator_alone_decides() -> None:
    pixels = noise(16, 3, 12, 12)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  # the global state is the point
    state = torch.get_rng_state()
    first = run(pixels, EVERYTHING)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002  # likewise
    again, other = run(pixels, EVERYTHING), run(pixels, EVERYTHING, seed=1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_a_restored_generator_goes_on_where_it_was() -> None:
    pixels, labels = noise(8, 1, 8, 8), torch.arange(8)
    generator = torch.Generator().manual_seed(5)
    augment(pixels, labels, EVERYTHING, normalise, CLASSES, generator)
    state = generator.get_state()
    expected, _ = augment(pixels, labels, EVERYTHING, normalise, CLASSES, generator)
    resumed = torch.Generator()
    resumed.set_state(state)
    assert torch.equal(augment(pixels, labels, EVERYTHING, normalise, CLASSES, resumed)[0], expected)


def test_another_device_gets_its_numbers_without_being_waited_for() -> None:
    """The meta device refuses tensors of the CPU, and has no values that could be waited for."""
    pixels = torch.empty(64, 3, 8, 6, dtype=torch.uint8, device="meta")
    labels = torch.empty(64, dtype=torch.long, device="meta")
    for seed in range(8):  # some with mixup, some with CutMix
        generator = torch.Generator().manual_seed(seed)
        images, targets = augment(pixels, labels, EVERYTHING, normalise, CLASSES, generator)
        assert images.device == targets.device == pixels.device


@pytest.mark.parametrize(
    "config",
    [
        AugmentConfig(shift=3),
        AugmentConfig(hflip=0.5),
        AugmentConfig(randaug=1),
        AugmentConfig(reprob=1.0),
        AugmentConfig(color_jitter=0.3),
    ],
)
def test_copies_of_an_image_in_a_batch_come_out_different(config: AugmentConfig) -> None:
    images, _ = run(noise(1, 3, 10, 10).repeat(64, 1, 1, 1), config)
    different = len(torch.unique(images, dim=0))
    assert different == 2 if config.hflip else different >= 10


@pytest.mark.parametrize("config", [AugmentConfig(mixup=1.0), AugmentConfig(cutmix=1.0)])
def test_images_of_a_batch_are_mixed_in_shares_of_their_own(config: AugmentConfig) -> None:
    _, targets = run(noise(64, 3, 10, 10), config)
    assert len(torch.unique(targets.amax(1).round(decimals=3))) > 15


def test_images_that_are_augmented_in_any_way_are_not_still():
    assert is_deterministic(AugmentConfig(smoothing=0.1, magnitude=3.0))
    assert is_deterministic(AugmentConfig(mixup=1.0, mix_prob=0.0))
    for field in fields(AugmentConfig):
        if field.name not in ("magnitude", "mix_prob", "smoothing"):
            value = {"crop_scale": 0.5, "aug_repeats": 2}.get(field.name, 1)
            assert not is_deterministic(replace(AugmentConfig(), **{field.name: value})), field.name


# Shift and flip


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 12, 20), (4, 3, 2)])
def test_shifts_and_flips_are_exact_and_all_occur(shape: tuple[int, ...]) -> None:
    shift = 2
    pixels = noise(1, *shape)
    padded = np.pad(pixels[0].numpy(), ((0, 0), (shift, shift), (shift, shift)), mode="symmetric")
    _, h, w = shape
    possible = {
        window[:, :, ::direction].tobytes()
        for y in range(2 * shift + 1)
        for x in range(2 * shift + 1)
        for direction in (1, -1)
        for window in [padded[:, y : y + h, x : x + w]]
    }
    images, _ = run(pixels.repeat(1000, 1, 1, 1), AugmentConfig(shift=shift, hflip=0.5))
    restored = ((images + 0.5) * 255).round().to(torch.uint8)
    seen = {image.numpy().tobytes() for image in restored}
    assert seen == possible


def test_a_shift_beyond_the_image_is_mirrored_again() -> None:
    pixels = torch.tensor([10, 20], dtype=torch.uint8).view(1, 1, 1, 2).repeat(50, 1, 1, 1)
    images, _ = run(pixels, AugmentConfig(shift=9))
    rows = {tuple(row) for row in ((images + 0.5) * 255).round().int().view(50, 2).tolist()}
    assert rows == {(10, 20), (20, 20), (20, 10), (10, 10)}


def test_the_probability_of_a_flip_is_the_one_asked_for() -> None:
    pixels = noise(1, 1, 4, 4).repeat(2000, 1, 1, 1)
    images, _ = run(pixels, AugmentConfig(hflip=0.3))
    flipped = (images == normalise(pixels).flip(3)).flatten(1).all(1)
    assert 0.26 < flipped.float().mean() < 0.34


# 3-Augment and colour jitter


def test_three_augment_makes_an_image_grey_solarized_or_blurred_as_often_as_asked() -> None:
    photo = smooth_photo(224, 224)
    images, _ = run(photo.repeat(60, 1, 1, 1), AugmentConfig(three_augment=0.75))
    images = ((images + 0.5) * 255).round().to(torch.uint8)
    grey = from_pil(ImageOps.grayscale(to_pil(photo[0])).convert("RGB"))
    solarized = from_pil(ImageOps.solarize(to_pil(photo[0])))
    kinds = []
    for image in images:
        kind = "blurred"
        if torch.equal(image, photo[0]):
            kind = "left"
        elif largest_difference(image, grey) <= 1:
            kind = "grey"
        elif torch.equal(image, solarized):
            kind = "solarized"
        else:
            assert image.float().mean((1, 2)) == pytest.approx(photo[0].float().mean((1, 2)), abs=1)
        kinds.append(kind)
    assert all(5 <= kinds.count(kind) <= 25 for kind in ("left", "grey", "solarized", "blurred")), kinds


def test_blur_agrees_with_pillow() -> None:
    pixels = torch.cat([smooth_photo(224, 256), noise(1, 3, 224, 256)])
    blurred = blur(pixels, torch.tensor([2.0, 1.0]))
    for image, ours, radius in zip(pixels, blurred, (2.0, 1.0), strict=True):
        theirs = from_pil(to_pil(image).filter(ImageFilter.GaussianBlur(radius)))
        assert (ours.float() - theirs.float()).abs().mean() < 2  # Pillow's is three box blurs, about a Gaussian


def test_jitter_changes_each_image_within_its_bounds() -> None:
    pixels = torch.full((500, 1, 4, 4), 100, dtype=torch.uint8)  # plain and grey: brightness alone changes it
    images, _ = run(pixels, AugmentConfig(color_jitter=0.3))
    values = (images[:, 0, 0, 0] + 0.5) * 255
    assert values.min() == pytest.approx(70, abs=2)
    assert values.max() == pytest.approx(130, abs=2)


# Erasing


@pytest.mark.parametrize("size", [(32, 32), (20, 60)])
def test_erasing_blanks_one_rectangle_of_bounded_size_as_often_as_asked(size: tuple[int, int]) -> None:
    h, w = size
    pixels = torch.full((1000, 3, h, w), 255, dtype=torch.uint8)
    images, _ = run(pixels, AugmentConfig(reprob=0.4))
    erased = images == 0
    assert torch.equal(images[~erased], torch.full_like(images[~erased], 0.5))
    assert torch.equal(erased, erased[:, :1].expand_as(erased)), "channels were erased differently"
    hole = erased[:, 0]
    rows, cols = hole.any(2), hole.any(1)
    assert torch.equal(hole, rows[:, :, None] & cols[:, None, :]), "not a rectangle"
    shares = hole.float().mean((1, 2))
    hit = shares[shares > 0]
    assert 340 < len(hit) < 460
    assert hit.min() > 0.01
    assert hit.max() < 0.37
    assert hit.min() < 0.04
    assert hit.max() > 0.28
    assert rows.sum(1).max() > 0.85 * h, "no tall ones"
    assert cols.sum(1).max() > 0.85 * w, "no wide ones"
    assert rows.any(0).all(), "some rows are never erased"
    assert cols.any(0).all(), "some columns are never erased"


# Mixing and targets


def test_smoothing_is_exact() -> None:
    _, targets = run(noise(CLASSES, 1, 4, 4), AugmentConfig(smoothing=0.2))
    torch.testing.assert_close(targets, torch.eye(CLASSES) * 0.8 + 0.02)


def solid(count: int, h: int, w: int) -> Tensor:
    """Image i is everywhere of value i, so that what a mixed pixel came from can be read off it."""
    return torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, 1, h, w)


def as_grey(images: Tensor) -> Tensor:
    return (images + 0.5) * 255


def test_mixup_mixes_images_and_targets_alike() -> None:
    images, targets = run(solid(CLASSES, 4, 6), AugmentConfig(mixup=0.8))
    # Image i has value i and class i, so the expected class is the expected value.
    expected = targets @ torch.arange(CLASSES).float()
    torch.testing.assert_close(as_grey(images), expected.view(-1, 1, 1, 1).expand_as(images), atol=1e-4, rtol=0)
    assert (targets > 0).sum(1).max() == 2
    assert (targets.diag() > 0).all(), "an image lost its own label"


@pytest.mark.parametrize("size", [(9, 14), (32, 32)])
def test_cutmix_labels_are_the_shares_of_the_pixels(size: tuple[int, int]) -> None:
    h, w = size
    for seed in range(20):
        images, targets = run(solid(CLASSES, h, w), AugmentConfig(cutmix=1.0), seed)
        values = as_grey(images).round().long().view(CLASSES, -1)
        shares = torch.stack([(values == k).float().mean(1) for k in range(CLASSES)], dim=1)
        torch.testing.assert_close(targets, shares, atol=1e-6, rtol=0)
        foreign = values.view(-1, h, w) != torch.arange(CLASSES).view(-1, 1, 1)
        assert torch.equal(foreign, foreign.any(2)[:, :, None] & foreign.any(1)[:, None, :]), "not a rectangle"


def test_the_mixing_shares_follow_the_beta_distribution() -> None:
    alpha, count = 0.4, 4000
    pixels = torch.zeros(count, 1, 1, 1, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    config = AugmentConfig(mixup=alpha)
    _, targets = augment(pixels, torch.arange(count), config, normalise, count, generator)
    keep = targets.diag()
    assert abs(keep.mean() - 0.5) < 0.02
    assert abs(keep.var() - 1 / (4 * (2 * alpha + 1))) < 0.01


def test_half_of_the_mixed_batches_are_cut_when_both_are_on_and_the_rest_of_batches_is_left_alone() -> None:
    config = AugmentConfig(mixup=1.0, cutmix=1.0, mix_prob=0.5)
    pixels = solid(CLASSES, 16, 16)
    generator = torch.Generator().manual_seed(0)
    seen = {"plain": 0, "cut": 0, "blend": 0}
    for _ in range(400):
        images, _ = augment(pixels, torch.arange(CLASSES), config, normalise, CLASSES, generator)
        values = as_grey(images)
        if torch.equal(images, normalise(pixels)):
            seen["plain"] += 1
        elif torch.allclose(values, values.round(), atol=1e-3):
            seen["cut"] += 1
        else:
            seen["blend"] += 1
    assert 160 < seen["plain"] < 240
    assert 70 < seen["cut"] < 130
    assert 70 < seen["blend"] < 130
