"""Position similarities and relative position biases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build_tiny
from peers import randomise
from torch import nn

from vitrail.errors import UserError
from vitrail.explain import (
    position_similarity,
    relative_bias,
    stage_biases,
    stage_similarities,
)
from vitrail.models import build, resize
from vitrail.models.position import offsets
from vitrail.models.vit import ViTConfig

BASE = {"width": 16, "depth": 2, "heads": 2, "mlp": 32, "patch": 4, "channels": 1, "classes": 5, "img_size": (12, 8)}


def make(**changes):
    return randomise(build(ViTConfig(**(BASE | changes))))


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("pos", ["learned", "learned2d", "sincos2d"])
def test_similarity_is_the_cosine_of_the_rows_that_are_added_to_patches(pos, pool):
    model = make(pos=pos, pool=pool, registers=2)
    similarity = position_similarity(model)
    assert similarity.shape == (3, 2, 3, 2)
    with torch.no_grad():
        rows = model.positions()[0, -6:].double().numpy()
    for a in range(6):
        for b in range(6):
            cosine = rows[a] @ rows[b] / np.sqrt((rows[a] @ rows[a]) * (rows[b] @ rows[b]))
            assert similarity[a // 2, a % 2, b // 2, b % 2] == pytest.approx(cosine, abs=1e-6)


def test_similarity_follows_the_size_of_the_model():
    assert position_similarity(resize(make(), (16, 20))).shape == (4, 5, 4, 5)


def test_models_without_position_embeddings_raise():
    with pytest.raises(UserError, match="has no positions"):
        position_similarity(make(pos="none"))
    with pytest.raises(UserError, match="relative"):
        position_similarity(make(pos="relative"))
    with pytest.raises(UserError, match="not relative"):
        relative_bias(make())


@pytest.mark.parametrize("registers", [0, 2])
def test_relative_biases_are_maps_around_the_query(registers):
    model = make(pos="relative", registers=registers)
    bias, prefix = relative_bias(model), model.config.prefix
    assert bias.shape == (2, 2, 5, 3)
    for layer, block in enumerate(model.blocks):
        with torch.no_grad():
            added = block.attn.relative()[0].numpy()  # H N N
        for query in range(6):
            for key in range(6):
                below, right = key // 2 - query // 2, key % 2 - query % 2
                np.testing.assert_array_equal(
                    bias[layer, :, 2 + below, 1 + right], added[:, prefix + query, prefix + key]
                )


@pytest.mark.parametrize("name", ["swin", "coatnet"])
def test_stage_biases_are_maps_around_the_query(name):
    model = build_tiny(name)
    found = stage_biases(model)
    assert list(found) == ([1, 2] if name == "swin" else [2])  # the first stage of the CoAtNet convolves
    for stage, tables in found.items():
        attentions = [block.attn for block in model.layers[stage - 1].blocks]
        assert len(tables) == len(attentions)
        for table, attention in zip(tables, attentions, strict=True):
            grid = (2, 2) if name == "swin" else model.config.grids[stage - 1]
            learned = attention if name == "swin" else attention.rel_pos
            rows = learned.relative_position_bias_table.detach()
            added = rows[offsets(grid, rows.device)].permute(2, 0, 1).numpy()  # H N N
            assert table.shape == (len(added), 2 * grid[0] - 1, 2 * grid[1] - 1)
            for query, key in np.ndindex(added.shape[1:]):
                below, right = (
                    np.subtract(*(np.unravel_index(i, grid)[axis] for i in (key, query))) for axis in (0, 1)
                )
                np.testing.assert_array_equal(table[:, grid[0] - 1 + below, grid[1] - 1 + right], added[:, query, key])


def test_every_stage_of_a_pvt_has_positions():
    model = build_tiny("pvt")
    first, last = stage_similarities(model)
    assert first.shape == (8, 4, 8, 4)
    assert last.shape == (4, 2, 4, 2)
    rows = model.pos_embed2.detach()[0, 1:].double()  # without the class token's
    cosine = nn.functional.cosine_similarity(rows[3], rows[4], dim=0)
    assert last[1, 1, 2, 0] == pytest.approx(float(cosine), abs=1e-6)


def test_positions_of_a_compiled_hybrid_are_its_own():
    model = build_tiny("hybrid")
    compiled = torch.compile(model, backend="eager")
    np.testing.assert_array_equal(position_similarity(compiled), position_similarity(model))
