"""Throughput of the data pipeline, in images per second and core, against a Pillow pipeline as in timm and torchvision.

    python benchmarks/data.py [--images N] [--repeats N] [--json FILE]

The Pillow pipeline is written out below: one image at a time, as in a DataLoader worker, with the calls that
torchvision's transforms make to Pillow and torch. Both sides use one thread and take turns; figures are medians of
the CPU time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.data import ArraySplit, FileSplit
from vitrail.data.augment import augment
from vitrail.data.cache import once
from vitrail.data.loader import TrainBatches
from vitrail.data.preprocess import Preprocess
from vitrail.device import keep_freed_memory

BATCH, CLASSES, SIZE = 128, 10, 224
SCALE = 0.08  # smallest fraction of the area that a random crop keeps, as on ImageNet
MEAN, STD = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.5)

Batch = tuple[Tensor, Tensor]


# The Pillow pipeline of timm and torchvision


def tensor(image: Image.Image) -> Tensor:
    """`ToTensor` and `Normalize`."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.float().div(255).sub_(MEAN).div_(STD)


def random_resized_crop(image: Image.Image) -> Image.Image:
    """`RandomResizedCrop(224, interpolation=bicubic)`."""
    width, height = image.size
    x, y, w, h = 0, 0, width, height
    for _ in range(10):
        area = width * height * random.uniform(SCALE, 1)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = random.randint(0, width - w), random.randint(0, height - h)
            break
    else:
        w = h = min(width, height)
    return image.crop((x, y, x + w, y + h)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


OPERATIONS: list[Callable[[Image.Image, float], Image.Image]] = [  # of RandAugment, with a level from -1 to 1
    lambda image, _: image,
    lambda image, level: image.rotate(30 * level, Image.Resampling.BILINEAR),
    lambda image, level: affine(image, 1, 0.3 * level, 0, 0, 1, 0),
    lambda image, level: affine(image, 1, 0, 0, 0.3 * level, 1, 0),
    lambda image, level: affine(image, 1, 0, 150 / 331 * level * image.width, 0, 1, 0),
    lambda image, level: affine(image, 1, 0, 0, 0, 1, 150 / 331 * level * image.height),
    lambda image, level: ImageEnhance.Brightness(image).enhance(1 + 0.9 * level),
    lambda image, level: ImageEnhance.Color(image).enhance(1 + 0.9 * level),
    lambda image, level: ImageEnhance.Contrast(image).enhance(1 + 0.9 * level),
    lambda image, level: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * level),
    lambda image, level: ImageOps.posterize(image, 8 - round(4 * abs(level))),
    lambda image, level: ImageOps.solarize(image, round(256 - 256 * abs(level))),
    lambda image, _: ImageOps.autocontrast(image),
    lambda image, _: ImageOps.equalize(image),
]


def pillow_photo(path: Path) -> Tensor:
    with Image.open(path) as image:
        photo = random_resized_crop(image.convert("RGB"))
    return tensor(photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else photo)


def pillow_array(pixels: np.ndarray) -> Tensor:
    image = Image.fromarray(pixels)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for operation in random.choices(OPERATIONS, k=2):
        image = operation(image, random.choice((-0.9, 0.9)))
    return tensor(image)


def pillow_epoch(
    read: Callable[[int], Tensor], labels: np.ndarray, mixup: float, count: int, size: int
) -> Iterator[Batch]:
    """An epoch as in a DataLoader worker, with timm's mixup of the batch."""
    order = np.random.default_rng(0).permutation(count)
    for at in range(0, count - size + 1, size):
        numbers = order[at : at + size].tolist()
        images = torch.stack([read(i) for i in numbers])
        targets = F.one_hot(torch.from_numpy(labels[numbers]), CLASSES).float()
        if mixup:
            keep = float(np.random.default_rng(at).beta(mixup, mixup))
            images = images * keep + images.flip(0) * (1 - keep)
            targets = targets * keep + targets.flip(0) * (1 - keep)
        yield images, targets


# vitrail


def epoch(loader: TrainBatches, preprocess: Preprocess, config: AugmentConfig) -> Iterator[Batch]:
    """An epoch as in `vitrail train`."""
    for number, (pixels, labels) in enumerate(loader.epoch(0)):
        generator = torch.Generator().manual_seed(number)
        yield augment(pixels, labels, config, preprocess.normalise, CLASSES, generator)


# Measuring


def seconds(batches: Iterator[Batch]) -> float:
    """CPU time of an epoch."""
    start = time.process_time()
    for _ in batches:
        pass
    return time.process_time() - start


def compare(count: int, repeats: int, sides: dict[str, Callable[[], Iterator[Batch]]]) -> dict[str, float]:
    """Images per second of each side."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(seconds(side()))
    return {name: count // BATCH * BATCH / statistics.median(taken) for name, taken in times.items()}


def make_photos(folder: Path, count: int) -> list[Path]:
    """JPEGs of 500 × 375: rotated and enlarged crops of scikit-learn's two photographs."""
    rng = np.random.default_rng(0)
    photos = [Image.fromarray(image) for image in load_sample_images().images]
    paths = []
    for i in range(count):
        photo, w = photos[i % 2], int(rng.integers(300, 500))
        x, y = int(rng.integers(photo.width - w)), int(rng.integers(photo.height - w * 3 // 4))
        paths.append(folder / f"{i}.jpg")
        crop = photo.crop((x, y, x + w, y + w * 3 // 4)).rotate(rng.uniform(-10, 10))
        crop.resize((500, 375), Image.Resampling.BICUBIC).save(paths[-1], quality=int(rng.integers(85, 91)))
    return paths


def photos(count: int, repeats: int) -> dict[str, float]:
    """JPEG files, uncached and from the cache."""
    preprocess, config = Preprocess((SIZE, SIZE), 3), AugmentConfig(crop_scale=SCALE, hflip=0.5)
    labels = np.arange(count) % CLASSES
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITRAIL_CACHE"] = str(Path(folder, "cache"))
        paths = make_photos(Path(folder), count)
        files = FileSplit(paths, labels, 3)
        loaders = {
            name: TrainBatches(once(files, preprocess, True, budget, 1), preprocess, BATCH, 0, SCALE, workers=1)
            for name, budget in (("vitrail", 0.0), ("vitrail, cached", 10.0))
        }
        return compare(
            count,
            repeats,
            {"Pillow": lambda: pillow_epoch(lambda i: pillow_photo(paths[i]), labels, 0.0, count, BATCH)}
            | {name: lambda loader=loader: epoch(loader, preprocess, config) for name, loader in loaders.items()},
        )


def arrays(count: int, repeats: int) -> dict[str, float]:
    """32-pixel arrays with RandAugment and mixup."""
    preprocess, config = Preprocess((32, 32), 3), AugmentConfig(hflip=0.5, randaug=2, magnitude=9.0, mixup=0.8)
    labels = np.arange(count) % CLASSES
    rng = np.random.default_rng(0)
    sources = [image[: 427 // 32 * 32].reshape(13, 32, 20, 32, 3) for image in load_sample_images().images]
    tiles = np.concatenate([image.swapaxes(1, 2).reshape(-1, 32, 32, 3) for image in sources])
    pixels = tiles[rng.integers(len(tiles), size=count)]
    loader = TrainBatches(ArraySplit(pixels, labels, "tiles"), preprocess, BATCH, 0, workers=1)
    return compare(
        count,
        repeats,
        {
            "Pillow": lambda: pillow_epoch(lambda i: pillow_array(pixels[i]), labels, 0.8, count, BATCH),
            "vitrail": lambda: epoch(loader, preprocess, config),
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512, help="JPEG files; eight times as many arrays are used")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to a JSON file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    random.seed(0)
    keep_freed_memory()  # as in `vitrail train`; it helps both sides
    files, small = photos(given.images, given.repeats), arrays(8 * given.images, given.repeats)
    rows = [
        ("JPEG 500 × 375 to 224, random crop, flip", files["Pillow"], files["vitrail"]),
        ("the same, from the cache", files["Pillow"], files["vitrail, cached"]),
        ("32-px arrays, flip, RandAugment, mixup", small["Pillow"], small["vitrail"]),
    ]
    print("| images per second and core | Pillow | vitrail | ratio |\n|---|---|---|---|")
    for name, theirs, ours in rows:
        print(f"| {name} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.1f} |")
    if given.json:
        facts = [{"name": name, "pillow": theirs, "vitrail": ours} for name, theirs, ours in rows]
        given.json.write_text(json.dumps({"torch": torch.__version__, "rows": facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
