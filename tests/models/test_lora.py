"""LoRA's layers; tests/train/test_transfer.py and test_fine_tuning.py train them."""

from __future__ import annotations

import torch

from vitrail.models import create
from vitrail.models.lora import LowRank, merged


def test_q_k_and_v_have_adapters_of_their_own():
    layer = LowRank(torch.nn.Linear(4, 12), parts=3, rank=2, alpha=2.0)
    with torch.no_grad():
        layer.up[1].fill_(1.0)  # of the keys
    change = (layer.merged_weight() - layer.weight).unflatten(0, (3, 4))
    assert change[0].abs().max() == change[2].abs().max() == 0
    torch.testing.assert_close(change[1], layer.down[1].sum(0).expand(4, 4), rtol=1e-5, atol=1e-6)


def test_alpha_over_rank_scales_what_adapters_add():
    weak, strong = (LowRank(torch.nn.Linear(4, 4), parts=1, rank=2, alpha=alpha) for alpha in (2.0, 8.0))
    strong.load_state_dict(weak.state_dict())
    with torch.no_grad():
        weak.up.fill_(1.0)
        strong.up.fill_(1.0)
    torch.testing.assert_close(
        strong.merged_weight() - strong.weight, 4 * (weak.merged_weight() - weak.weight), rtol=1e-5, atol=1e-6
    )


def test_a_model_without_adapters_is_merged_already():
    model = create("vit_nano4")
    assert merged(model) is model
