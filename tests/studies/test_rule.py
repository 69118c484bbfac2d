"""Verdicts and notes on made numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitrail.studies.rule import Estimate, above, difference, estimate, within
from vitrail.studies.scaling import lead_ends


def test_the_interval_is_students():
    found = estimate([0.80, 0.82, 0.84])
    assert found.mean == pytest.approx(0.82)
    half = 4.30265 * 0.02 / math.sqrt(3)  # t with 2 degrees of freedom
    assert (found.low, found.high) == (pytest.approx(0.82 - half, abs=1e-6), pytest.approx(0.82 + half, abs=1e-6))
    assert found.text("%") == "82.0% (77.0 to 87.0, 3 seeds)"


def test_differences_are_paired_by_seed():
    ours, theirs = [0.5, 0.7, 0.9], [0.49, 0.69, 0.89]  # seeds vary far more than the difference
    assert above(difference(ours, theirs)) == "agrees"
    assert above(difference(theirs, ours)) == "disagrees"
    assert above(difference(ours, list(reversed(theirs)))) == "cannot tell"


@pytest.mark.parametrize(("seeds", "text"), [(1, "+50.0 points (1 seed)"), (2, "+50.0 points (2 seeds)")])
def test_fewer_than_three_seeds_tell_nothing(seeds, text):
    assert above(estimate([0.5] * seeds)) == within(estimate([0.0] * seeds), 0.01) == "cannot tell"
    assert estimate([0.5] * seeds).text() == text


@pytest.mark.parametrize(
    ("low", "high", "higher", "equal"),
    [
        (0.02, 0.05, "agrees", "disagrees"),
        (-0.05, -0.02, "disagrees", "disagrees"),
        (-0.005, 0.005, "cannot tell", "agrees"),
        (0.001, 0.005, "agrees", "agrees"),
        (-0.02, 0.02, "cannot tell", "cannot tell"),
        (0.005, 0.02, "agrees", "cannot tell"),
    ],
)
def test_verdicts(low, high, higher, equal):
    value = Estimate((low + high) / 2, low, high, 3)
    assert (above(value), within(value, 0.01)) == (higher, equal)


@pytest.mark.parametrize(
    ("hybrid", "text"),
    [
        ([0.7, 0.8, 0.85], "The hybrid's lead over the ViT ends at about 316 GMACs."),
        ([0.7, 0.8, 0.95], "The hybrid still leads the ViT at the largest compute that both have, 1,000 GMACs."),
        ([0.5, 0.7, 0.85], "The hybrid has no lead over the ViT between 10 GMACs and 1,000 GMACs."),
    ],
)
def test_where_the_lead_of_the_hybrid_ends(hybrid, text):
    compute = np.log([10.0, 100.0, 1000.0])
    assert lead_ends((compute, np.array(hybrid)), (compute, np.array([0.6, 0.75, 0.9]))) == text
