"""What is explained of the families beside the ViT: first filters, places, mixing, and what speaks for a class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import randomise
from torch import Tensor, nn

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.explain import (
    conv_filters,
    faithfulness,
    mixing_maps,
    patch_filters,
    position_similarity,
    relevance,
    stage_biases,
    stage_similarities,
)
from vitrail.explain.faithfulness import plain
from vitrail.explain.mixing import in_pairs
from vitrail.models import Model, build, family, head
from vitrail.models.bit import BiTConfig
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.position import offsets
from vitrail.models.pvt import PVTConfig
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.models.swin import SwinConfig
from vitrail.tasks import Multiclass
from vitrail.weights import Card, save

SIZE: dict[str, Any] = {"img_size": (16, 8), "channels": 1, "classes": 3}
TINY = {
    "bit": BiTConfig((32, 64), (1, 1), shrink=False, groups=8, **SIZE),
    "mixer": MixerConfig(16, 5, 12, 16, 4, **SIZE),
    "swin": SwinConfig((16, 32), (2, 1), (2, 4), window=2, patch=2, **SIZE),
    "pvt": PVTConfig((16, 32), (1, 2), (1, 2), (2, 2), (2, 1), patch=2, **SIZE),
    "pvt_v2": PVTv2Config((16, 32), (1, 2), (1, 2), (2, 2), (2, 1), patch=2, **SIZE),
    "coatnet": CoAtNetConfig((16, 32), (1, 2), 8, convs=1, shrink=False, **SIZE),
    "hybrid": HybridConfig(32, 2, 2, 32, (32,), (1,), first=8, groups=8, **SIZE),
}
AVERAGED = ("bit", "mixer", "swin", "pvt_v2")  # and a linear head reads the average


def tiny(name: str) -> Any:
    return randomise(build(TINY[name])).eval()


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 1, 16, 8, generator=torch.Generator().manual_seed(1))


# What speaks for a class


@pytest.mark.parametrize("name", AVERAGED)
def test_what_speaks_for_a_class_adds_up_to_its_logit(name):
    model, images = tiny(name), pictures()
    with torch.no_grad():
        logits = model(images) - head(model).bias
    maps = relevance(model, images, [2, 0])
    assert maps.shape == (2, *model.config.grid)
    assert maps.min() < 0 < maps.max()
    np.testing.assert_allclose(maps.sum(axis=(1, 2)), logits[[0, 1], [2, 0]], rtol=1e-4, atol=1e-5)
    against = relevance(model, images, [2, 0], instead=1)
    np.testing.assert_allclose(against, maps - relevance(model, images, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(TINY)[:-1])
def test_a_place_speaks_as_much_as_the_logit_follows_it(name):
    """Against a finite difference: the features of one place a little more, and a little less."""
    model, images = tiny(name).double(), pictures(1).double()
    module: nn.Module = {
        "bit": lambda: model.norm,
        "mixer": lambda: model.norm,
        "swin": lambda: model.norm,
        "pvt": lambda: model.block2[-1].norm1,
        "pvt_v2": lambda: model.layers[-1].norm,
        "coatnet": lambda: model.layers[-1].blocks[-1],
    }[name]()
    h, w = model.config.grid

    def logit(place: int, change: float) -> float:
        def scale(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            scales = torch.ones(h * w, dtype=output.dtype)
            scales[place] += change
            if name == "pvt":
                return output * torch.cat([torch.ones(1), scales])[:, None]  # a class token comes first
            if name in ("mixer", "pvt_v2"):
                return output * scales[:, None]
            return output * (scales.reshape(h, w, 1) if name == "swin" else scales.reshape(h, w))

        with module.register_forward_hook(scale), torch.no_grad():
            return float(model(images)[0, 1])

    found = relevance(model, images, 1)[0].ravel()
    slopes = [(logit(place, 1e-4) - logit(place, -1e-4)) / 2e-4 for place in range(h * w)]
    np.testing.assert_allclose(found, slopes, rtol=1e-3, atol=1e-6)
    assert np.abs(found).max() > 1e-3


def test_nothing_of_it_is_left_behind():
    model, images = tiny("coatnet").train(), pictures()
    expected = relevance(model, images, 0)
    assert model.training
    with torch.inference_mode():
        np.testing.assert_array_equal(relevance(model, images.clone(), 0), expected)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled = torch.compile(model, backend="eager")
    np.testing.assert_array_equal(relevance(compiled, images, 0), expected)


def test_classes_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="from 0 to 2"):
        relevance(tiny("bit"), pictures(), 3)


def test_faithfulness_of_a_grid_that_does_not_divide_the_image():
    model, images = tiny("bit"), pictures()
    maps = np.random.default_rng(0).random((2, 3, 5))
    found = faithfulness(model, images, maps, 1, steps=15, draws=1)
    assert found.shares.tolist() == pytest.approx([k / 15 for k in range(16)])
    with torch.no_grad():
        whole, blank = (model(x).softmax(dim=1)[:, 1] for x in (images, torch.stack([plain(i) for i in images])))
    np.testing.assert_allclose(found.deletion[:, [0, -1]], torch.stack([whole, blank], dim=1), rtol=1e-5)
    with pytest.raises(UserError, match="do not lie over"):
        faithfulness(model, images, np.ones((2, 3, 9)), 1)


# Filters


@pytest.mark.parametrize("name", ["bit", "hybrid"])
def test_standardised_filters_are_shown_as_they_are_applied(name):
    model = tiny(name)
    conv = model.stem.conv if name == "bit" else model.patch_embed.backbone.stem.conv
    found = conv_filters(model, count=5)
    expected = conv.weight.detach()[:5].permute(0, 2, 3, 1).numpy()
    spread = expected.std(axis=(1, 2, 3), keepdims=True)
    np.testing.assert_allclose(found, (expected - expected.mean(axis=(1, 2, 3), keepdims=True)) / spread, rtol=1e-4)


@pytest.mark.parametrize("name", ["coatnet", "pvt_v2"])
def test_other_filters_are_the_weights_the_largest_first(name):
    model = tiny(name)
    weight = (model.stem.conv1 if name == "coatnet" else model.patch_embed.proj).weight.detach().numpy()
    order = np.argsort(-np.linalg.norm(weight.reshape(len(weight), -1), axis=1))
    np.testing.assert_array_equal(conv_filters(model), weight.transpose(0, 2, 3, 1)[order])


@pytest.mark.parametrize(("name", "shape"), [("mixer", (15, 4, 4, 1)), ("swin", (4, 2, 2, 1)), ("pvt", (4, 2, 2, 1))])
def test_patches_are_read_by_components(name, shape):
    components = patch_filters(tiny(name))
    assert components.shape == shape
    flat = components.reshape(len(components), -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(len(flat)), atol=1e-6)


def test_overlapping_convolutions_read_no_patches():
    with pytest.raises(UserError, match="no patch filters"):
        patch_filters(tiny("bit"))


# Places


@pytest.mark.parametrize("name", ["swin", "coatnet"])
def test_biases_are_maps_around_the_place_that_looks(name):
    model = tiny(name)
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
    model = tiny("pvt")
    first, last = stage_similarities(model)
    assert first.shape == (8, 4, 8, 4)
    assert last.shape == (4, 2, 4, 2)
    rows = model.pos_embed2.detach()[0, 1:].double()  # without the class token's
    cosine = nn.functional.cosine_similarity(rows[3], rows[4], dim=0)
    assert last[1, 1, 2, 0] == pytest.approx(float(cosine), abs=1e-6)


def test_positions_of_a_compiled_hybrid_are_its_own():
    model = tiny("hybrid")
    compiled = torch.compile(model, backend="eager")
    np.testing.assert_array_equal(position_similarity(compiled), position_similarity(model))


# Mixing


def test_mixing_maps_are_the_weights():
    model = tiny("mixer")
    maps = mixing_maps(model)
    assert maps.shape == (5, 12, 4, 2)
    weight = model.blocks[3].mlp_tokens.fc1.weight.detach().numpy()
    for row, column in np.ndindex(4, 2):
        np.testing.assert_array_equal(maps[3, :, row, column], weight[:, 2 * row + column])


def test_opposite_units_stand_side_by_side_from_low_to_high_frequency():
    x = np.arange(8)
    low, high = (np.tile(np.cos(2 * np.pi * waves * (x + 0.5) / 8), (8, 1)) for waves in (1, 3))
    weak = np.full((8, 8), 1e-3)
    maps = np.stack([high, low.T, weak, -high, -low.T, 0.5 * np.ones((8, 8))]).astype(np.float32)
    order = in_pairs(maps, count=5).tolist()
    assert [set(order[:2]), set(order[2:4]), order[4]] == [{1, 4}, {0, 3}, 5]
    assert sorted(in_pairs(maps)) == list(range(6))


# The verb


def model_file(folder: Path, model: Model) -> Path:
    name, task = family(model.config), Multiclass(("a", "b", "c"))
    card = Card(model=f"{name}_nano", config=model.config, task=task, preprocess=Preprocess((16, 8), 1))
    save(folder / "model.safetensors", model, card)
    return folder / "model.safetensors"


PLACES = {
    "swin": {"bias-stage1", "bias-stage2"},
    "coatnet": {"bias-stage2"},
    "pvt": {"positions-stage1", "positions-stage2"},
    "mixer": {"mixing"},
    "hybrid": {"positions"},
}


def test_a_coatnet_that_only_convolves_is_drawn_without_attention(digits, tmp_path):
    model = randomise(build(CoAtNetConfig((16, 32), (1, 1), 8, convs=2, shrink=False, **SIZE)))
    files = sorted((digits / "3").glob("*.png"))[:1]
    result = vitrail.explain(model_file(tmp_path, model), files, out=tmp_path / "out")
    assert [file.stem for file in result.files] == ["relevance", "filters"]
    assert any("it has no attention" in note for note in result.notes)


@pytest.mark.parametrize("name", list(TINY))
def test_every_family_is_drawn(name, digits, tmp_path):
    model = tiny(name)
    files = sorted((digits / "3").glob("*.png"))[:1]
    result = vitrail.explain(model_file(tmp_path, model), files, out=tmp_path / "out", instead="b")
    drawn = {file.stem for file in result.files}
    assert {"relevance", "filters"} | PLACES.get(name, set()) <= drawn
    assert result.arrays["relevance"]["relevance"].shape == (1, *model.config.grid)
    told = any("no position embeddings or biases" in note for note in result.notes)
    assert told == (name in ("bit", "mixer", "pvt_v2"))
