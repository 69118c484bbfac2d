"""Made data sets."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.studies.made import made


@pytest.mark.parametrize("side", [8, 28, 64])
def test_brightness_does_not_tell_the_count(side, tmp_path):
    """A least-squares classifier on powers of the mean brightness is near chance, a quarter."""
    data = np.load(made(tmp_path, side)["made-count"])
    train, test = (data[f"x_{part}"].mean((1, 2))[:, None] ** np.arange(3) for part in ("train", "test"))
    weights, *_ = np.linalg.lstsq(train, np.eye(4)[data["y_train"]], rcond=None)
    assert ((test @ weights).argmax(1) == data["y_test"]).mean() < 0.4
