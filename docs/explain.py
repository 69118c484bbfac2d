"""Draws the figures of docs/explain.md from two runs, and prints the numbers it quotes.

    vitrail train fashion-mnist --model vit_nano4 --img-size 28 --stem patch --pool cls --time-budget 40m
    vitrail train PHOTOS --model vit_nano8 --img-size 96 --stem patch --pool cls --time-budget 40m
    python docs/explain.py runs/fashion-mnist-vit_nano4 runs/PHOTOS-vit_nano8

For the run on photographs, only scikit-learn's two freely licensed sample images are shown.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from vitrail.charts.style import save
from vitrail.explain.attention import Array, attention_distance, even_distance
from vitrail.explain.figures import attention, weights
from vitrail.explain.filters import patch_filters
from vitrail.explain.positions import position_similarity
from vitrail.explain.subject import Subject, open_subject
from vitrail.models import Model, build

IMAGES = Path(__file__).parent / "images"


def draw(run: str, shown: Subject, measured: Subject, picture: int, patch: tuple[int, int]) -> None:
    """The figures of one run: maps of the `shown` images, averages over the `measured` ones."""
    one = replace(shown, pictures=shown.pictures[picture : picture + 1], patch=patch)
    of_pictures = chain(attention.rollouts(shown), attention.heads(one), attention.patches(one))
    of_the_model = chain(attention.distance(measured), weights.positions(measured), weights.filters(measured))
    for drawing in chain(of_pictures, of_the_model):
        save(drawing.figure, IMAGES / f"explain-{run}-{drawing.name.split('-')[0]}.png")


def numbers(run: str, subject: Subject) -> None:
    """Prints the numbers of one run, for the trained and the untrained model."""
    torch.manual_seed(0)
    fresh = build(subject.model.config).to(subject.device).eval()
    print(f"\n{run}: {subject.card.metrics}")
    width = subject.model.config.img_size[1]
    for title, model in (("trained", subject.model), ("untrained", fresh)):
        distances = attention_distance(model, subject.sample())
        print(f"  {title}")
        print(f"    mean distance over {subject.sampled} images; uniform attention {even_distance(model)[0]:.1f} px:")
        for layer, heads in enumerate(distances, start=1):
            mean = heads.mean()
            spread = f"heads {heads.min():.1f} to {heads.max():.1f}"
            print(f"      layer {layer}: {mean:5.1f} px, {mean / width:.1%} of the width; {spread}")
        print("    position similarity: " + ", ".join(f"{k} {v:.3f}" for k, v in mean_similarities(model).items()))
        print(f"    correlation of adjacent pixels in the patch filters: {smoothness(patch_filters(model, 8)):.2f}")


def mean_similarities(model: Model) -> dict[str, float]:
    """Mean position similarity of neighbouring patches, same row, same column and others, and at one distance."""
    similarity = position_similarity(model)
    h, w = similarity.shape[:2]
    y, x, v, u = np.indices(similarity.shape)
    dy, dx = abs(y - v), abs(x - u)
    other = dy + dx > 0
    far = 5 if min(h, w) < 11 else 10  # a distance that exists in a row, in a column and diagonally (3-4-5)
    return {
        "neighbours": float(similarity[dy + dx == 1].mean()),
        "same row": float(similarity[other & (dy == 0)].mean()),
        "same column": float(similarity[other & (dx == 0)].mean()),
        "other pairs": float(similarity[(dy > 0) & (dx > 0)].mean()),
        f"{far} apart, same row": float(similarity[(dy == 0) & (dx == far)].mean()),
        f"{far} apart, same column": float(similarity[(dx == 0) & (dy == far)].mean()),
        f"{far} apart, neither": float(similarity[(dy > 0) & (dx > 0) & (dy**2 + dx**2 == far**2)].mean()),
    }


def smoothness(filters: Array) -> float:
    """The correlation of adjacent pixels over all filters and channels: 0 for noise, near 1 for smooth filters."""
    pairs = [(filters[:, 1:], filters[:, :-1]), (filters[:, :, 1:], filters[:, :, :-1])]
    product = sum(float((a * b).sum()) for a, b in pairs)
    size = sum(float(np.sqrt((a * a).sum() * (b * b).sum())) for a, b in pairs)
    return product / size


def main(fashion: str, photos: str) -> None:
    subject = open_subject(fashion)
    shown = replace(subject, pictures=subject.pictures[::2][:9])  # one of each class but the last
    draw("fashion", shown, subject, picture=3, patch=(3, 3))
    numbers("fashion", subject)

    with tempfile.TemporaryDirectory() as folder:
        sample = load_sample_images()
        files = [Path(folder) / f"{Path(name).stem}.png" for name in sample.filenames]
        for file, image in zip(files, sample.images, strict=True):
            Image.fromarray(image).save(file)
        free = open_subject(photos, files)
    measured = open_subject(photos)
    draw("photos", free, measured, picture=1, patch=(5, 6))
    numbers("photos", measured)


if __name__ == "__main__":
    main(*sys.argv[1:])
