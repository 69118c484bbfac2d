from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from watcher import PATCH, watcher

from vitrail.errors import UserError
from vitrail.explain.faithfulness import blurred, faithfulness, plain
from vitrail.explain.relevance import relevance
from vitrail.tasks import Multilabel, Regression


def bright(*patches: int) -> Tensor:
    """A picture with bright patches between those that are half bright, half dark."""
    image = torch.ones(1, 1, 4, PATCH, 4, PATCH)
    image[:, :, :, ::2] = -1
    for patch in patches:
        image[:, :, patch // 4, :, patch % 4] = 1
    return image.reshape(1, 1, 4 * PATCH, 4 * PATCH)


def test_deletion_falls_and_insertion_rises_with_the_one_patch_that_matters():
    model = watcher(5, 10)
    images = bright(5)
    found = faithfulness(model, images, relevance(model, images, 0), 0, steps=16, draws=8)
    assert found.shares.tolist() == [k / 16 for k in range(17)]
    assert found.deletion.shape == found.insertion.shape == found.random_insertion.shape == (1, 17)
    whole, *rest = found.deletion[0]
    assert whole > 0.95
    assert max(rest) < 0.75
    covered, *rest = found.insertion[0]
    assert covered < 0.75
    assert min(rest) > 0.9
    assert found.score[0] > 0.2
    assert found.area(found.deletion)[0] < found.area(found.random_deletion)[0]
    assert found.area(found.insertion)[0] > found.area(found.random_insertion)[0]


def test_a_map_that_points_elsewhere_scores_below_chance():
    model = watcher(5, 10)
    images = bright(5)
    wrong = np.ones((1, 4, 4))
    wrong[0, 1, 1] = 0  # patch 5
    assert faithfulness(model, images, wrong, 0, draws=8).score[0] < -0.1


def test_curves_begin_and_end_at_the_same_pictures_whatever_the_order():
    model = watcher(5, 10)
    images = torch.cat([bright(5), bright(10, 3)])
    maps = np.random.default_rng(0).random((2, 4, 4))
    found = faithfulness(model, images, maps, [0, 1], steps=5)
    assert found.shares.tolist() == pytest.approx([0, 3 / 16, 6 / 16, 10 / 16, 13 / 16, 1])
    np.testing.assert_allclose(found.deletion[:, [0, -1]], found.random_deletion[:, [0, -1]], rtol=1e-6)
    np.testing.assert_allclose(found.insertion[:, [0, -1]], found.random_insertion[:, [0, -1]], rtol=1e-6)
    with torch.no_grad():
        whole = model(images).softmax(dim=1)[[0, 1], [0, 1]]
        blank = model(torch.stack([plain(image) for image in images])).softmax(dim=1)[[0, 1], [0, 1]]
    np.testing.assert_allclose(found.deletion[:, 0], whole, rtol=1e-6)
    np.testing.assert_allclose(found.insertion[:, -1], whole, rtol=1e-6)
    np.testing.assert_allclose(found.deletion[:, -1], blank, rtol=1e-6)


def test_batches_and_the_other_pictures_make_no_difference():
    model = watcher(5, 10)
    images = torch.cat([bright(5), bright(10, 3)])
    maps = relevance(model, images, [0, 1])
    both, small = (faithfulness(model, images, maps, [0, 1], batch_size=size) for size in (64, 3))
    np.testing.assert_allclose(both.random_insertion, small.random_insertion, rtol=1e-6)
    alone = faithfulness(model, images[:1], maps[:1], 0)
    np.testing.assert_allclose(alone.deletion[0], both.deletion[0], rtol=1e-6)


def test_follows_what_the_task_tells():
    model = watcher(5, 10)
    images, maps = bright(5), np.ones((1, 4, 4))
    with torch.no_grad():
        logit = model(images)[0, 0]
    classes = ("a", "b")
    for task, first in {Multilabel(classes): logit.sigmoid(), Regression(classes, (1, 1), (2, 2)): logit}.items():
        found = faithfulness(model, images, maps, 0, steps=2, draws=1, task=task)
        assert found.deletion[0, 0] == pytest.approx(float(first))


def test_steps_are_no_more_than_patches():
    found = faithfulness(watcher(5, 10), bright(5), np.ones((1, 4, 4)), 0, steps=100, draws=1)
    assert len(found.shares) == 17


def test_a_blurred_picture_keeps_its_brightness_and_no_detail():
    image = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    soft = blurred(image, (3, 5))
    assert soft.shape == image.shape
    assert soft.std() < 0.1 * image.std()
    even = torch.full((2, 8, 12), 0.7)
    torch.testing.assert_close(blurred(even, (2, 3)), even)
    ramp = torch.linspace(0, 1, 32).expand(1, 32, 32)
    torch.testing.assert_close(blurred(ramp, (8, 8))[0, :, 10:22], ramp[0, :, 10:22])  # along one axis only


def test_refuses_what_does_not_fit():
    model = watcher(5, 10)
    with pytest.raises(UserError, match="do not lie over"):
        faithfulness(model, bright(5), np.ones((2, 4, 4)), 0)
    with pytest.raises(UserError, match="at least 1"):
        faithfulness(model, bright(5), np.ones((1, 4, 4)), 0, steps=0)
