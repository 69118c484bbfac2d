"""Recomputing activations saves memory and changes nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peers import randomise

from vitrail import models
from vitrail.train.recompute import recompute_activations

NANO = {name: config for name, config in models.CONFIGS.items() if name.endswith("_nano") or name == "deit_nano8"}


@pytest.mark.parametrize("config", NANO.values(), ids=NANO)
def test_gradients_and_running_statistics_are_the_same(config):
    config = replace(config, classes=3, drop=0.1, drop_path=0.1)
    images = torch.randn(4, 3, *config.img_size, generator=torch.Generator().manual_seed(1))
    kept = randomise(models.build(config))
    again = models.build(config)
    again.load_state_dict(kept.state_dict())
    recompute_activations(again)
    for model in (kept.train(), again.train()):
        torch.manual_seed(3)
        model(images).square().sum().backward()
    for ours, theirs in zip(kept.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(kept.buffers(), again.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_the_input_of_a_stage_is_kept():
    """What autograd saves outside the stages is little: the loss, and the inputs of stages."""
    config = replace(models.CONFIGS["vit_nano8"], classes=3)
    saved: dict[bool, int] = {}
    for recompute in (False, True):
        model = models.build(config).train()
        if recompute:
            recompute_activations(model)
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(torch.zeros(16, 3, *config.img_size)).sum()
        saved[recompute] = sum(sizes)
    assert saved[True] < saved[False] / 4
