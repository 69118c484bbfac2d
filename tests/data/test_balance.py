"""Uneven classes are told, weighed and sampled so that all count alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vitrail.data import ArraySplit
from vitrail.data.balance import balanced_order, imbalance
from vitrail.data.loader import TrainBatches
from vitrail.data.preprocess import Preprocess
from vitrail.models import create
from vitrail.tasks import Multiclass, Multilabel
from vitrail.tasks.multiclass import class_weights
from vitrail.train.recipe_rules import RecipeInputs
from vitrail.train.recipes import small

TARGETS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [50, 8, 3]))


def test_only_uneven_classes_are_worth_a_word():
    assert imbalance({"frog": 30, "newt": 10}) is None
    assert imbalance({"frog": 30, "toad": 0}) is None
    assert imbalance({}) is None
    found = imbalance({"frog": 500, "toad": 0, "newt": 10})
    assert str(found) == "'frog' has 50 times as many images as 'newt' (500 and 10)"


def test_with_their_weights_all_classes_sum_to_the_same_and_the_mean_is_1():
    weights = class_weights(Multiclass(tuple("abcd")).counts(TARGETS))  # the last class has no image
    sums = [weights[label] * np.count_nonzero(label == TARGETS) for label in range(3)]
    assert sums == pytest.approx([len(TARGETS) / 3] * 3)
    assert weights[TARGETS].mean() == pytest.approx(1)
    assert np.isfinite(weights).all()


def test_of_labels_the_images_with_and_without_weigh_the_same():
    labels = np.array([[1, 0], [0, 0], [0, 0], [0, 1], [0, 1]], np.float32)
    task = Multilabel(("a", "b"))
    assert task.counts(labels).tolist() == [1, 2]
    model = create("vit_nano2", classes=2, img_size=8, channels=1)
    config = small(RecipeInputs("", "", len(labels), "vit_nano2", model.config, "cpu", 1, None))
    config = replace(config, source=replace(config.source, class_weights=True))
    assert task.objective(model, config, labels).weights.tolist() == [4, 1.5]


def test_a_balanced_epoch_has_its_length_and_every_class_equally_often():
    for epoch in range(5):
        order = balanced_order(TARGETS, 7, epoch)
        counts = np.bincount(TARGETS[order % len(TARGETS)])
        assert len(order) == len(TARGETS)
        assert len(set(order.tolist())) == len(order)  # a repeated image has another number
        assert counts.max() <= 21  # 61 images in three shares
        assert counts.min() >= 19


def test_the_images_of_a_large_class_all_come_before_one_comes_back():
    seen = np.concatenate([balanced_order(TARGETS, 7, epoch) % len(TARGETS) for epoch in range(5)])
    times = np.bincount(seen, minlength=len(TARGETS))
    large = times[TARGETS == 0]  # 105 draws of 50 images, less what is left out
    assert large.min() >= 1
    assert large.max() <= 3
    assert times[TARGETS == 2].min() >= 30


def test_the_order_follows_from_seed_and_epoch():
    assert np.array_equal(balanced_order(TARGETS, 7, 3), balanced_order(TARGETS, 7, 3))
    assert not np.array_equal(balanced_order(TARGETS, 7, 3), balanced_order(TARGETS, 8, 3))
    assert not np.array_equal(balanced_order(TARGETS, 7, 3), balanced_order(TARGETS, 7, 4))


@pytest.mark.parametrize("crop_scale", [1.0, 0.3])
def test_balanced_batches_can_begin_anywhere_and_repeat_an_image_with_another_crop(crop_scale):
    pixels = np.random.default_rng(0).integers(0, 256, (len(TARGETS), 8, 8, 1), np.uint8)
    split = ArraySplit(pixels, TARGETS, "frogs")

    def loader(workers):
        return TrainBatches(split, Preprocess((8, 8), 1), 4, 7, crop_scale, workers, balanced=True)

    whole = list(loader(1).epoch(2))
    assert len(whole) == len(loader(1)) == 15
    later = list(loader(3).epoch(2, 6))
    assert all(
        torch.equal(a, b) for one, two in zip(whole[6:], later, strict=True) for a, b in zip(one, two, strict=True)
    )
    rare = torch.cat([images[labels == 2] for images, labels in whole])
    assert len(rare) >= 18
    assert len(torch.unique(rare, dim=0)) == (3 if crop_scale == 1 else len(rare))
