"""No matrix of attention weights, N×N, is ever in memory: neither in training nor in inference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from allocations import HEADS, Outputs, infer, peak_memory, train, vit

from vitrail.models import Model


@pytest.mark.parametrize("use", [train, infer])
@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_no_operation_returns_the_matrix_of_attention_weights(use: Callable[[Model], None], pool: str):
    model, tokens = vit(32, pool=pool), 32 * 32
    with Outputs() as outputs:
        use(model)
    assert tokens < outputs.largest < tokens**2
    with Outputs() as outputs, torch.no_grad():
        model.attentions()[0].module.weights(torch.randn(1, tokens, 16))
    assert outputs.largest == HEADS * tokens**2  # so that it would be noticed


@pytest.mark.parametrize("use", [train, infer])
def test_peak_memory_grows_linearly_with_the_tokens(use: Callable[[Model], None]):
    small, large = (peak_memory(use, vit(patches)) for patches in (16, 64))
    assert 8 * small < large < 20 * small  # 16 times the tokens; the square would be 256 times
