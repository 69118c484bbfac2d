"""Attention patterns: who attends to whom, against a slow computation, and the memory they take."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from allocations import Outputs, infer, peak_memory, train, vit
from peers import distance, randomise
from torch import Tensor

from vitrail import models
from vitrail.errors import UserError
from vitrail.explain import attention_distance, relevance
from vitrail.explain.attention import even_distance
from vitrail.models.hybrid import HybridConfig
from vitrail.models.patterns import choice
from vitrail.models.vit import ViTConfig

GRID = (5, 7)
SMALL = ViTConfig(width=16, depth=2, heads=2, mlp=32, patch=2, img_size=(10, 14), classes=3)
PATTERNS = ("window:3", "window:3,shift", "window:5,shift", "axial", "neighbourhood:3", "strided", "strided:4")
every_pattern = pytest.mark.parametrize("attention", PATTERNS)


def slow(attention: str, block: int, grid: tuple[int, int] = GRID) -> list[list[set[int]]]:
    """For each step of a block and each patch, the patches that it attends to, one pair at a time."""
    kind, _, rest = attention.partition(":")
    size = int(rest.partition(",")[0] or 0)
    places = list(itertools.product(range(grid[0]), range(grid[1])))

    def window(place: int, side: int) -> int:
        each = min(size, side)
        offset = each // 2 if rest.endswith("shift") and block % 2 and each < side else 0
        return (place - offset) // each

    def near(place: int, other: int, side: int) -> bool:
        each = min(size, side)
        middle = min(max(place, each // 2), side - 1 - (each - 1) // 2)  # at the border the square moves inwards
        return abs(other - middle) <= each // 2

    def attends(a: int, b: int, step: int) -> bool:
        (y, x), (v, u) = places[a], places[b]
        if kind == "window":
            return window(y, grid[0]) == window(v, grid[0]) and window(x, grid[1]) == window(u, grid[1])
        if kind == "axial":
            return x == u if step else y == v
        if kind == "neighbourhood":
            return near(y, v, grid[0]) and near(x, u, grid[1])
        stride = size or grid[1]
        return abs(a - b) < stride or (a - b) % stride == 0

    steps = 2 if kind == "axial" else 1
    patches = range(len(places))
    return [[{b for b in patches if attends(a, b, step)} for a in patches] for step in range(steps)]


def expected(model: models.Model, block: int, x: Tensor) -> Tensor:
    """The attention weights of a block of one image, (H, N, N), token by token."""
    c, attn = model.config, model.blocks[block].attn
    q, k, _ = attn.qkv(x).unflatten(1, (3, c.heads, -1)).permute(1, 2, 0, 3)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    first, *more = slow(c.attention, block, c.grid)
    weights = torch.zeros_like(logits)
    for token in range(c.length):
        patch = token - c.prefix
        keys = [*range(c.prefix), *(c.prefix + b for b in sorted(first[patch]))] if patch >= 0 else [*range(c.length)]
        weights[:, token, keys] = logits[:, token, keys].softmax(dim=-1)
    for step in more:
        mixing = torch.eye(c.length).repeat(c.heads, 1, 1)
        for patch, reached in enumerate(step):
            keys = [c.prefix + b for b in sorted(reached)]
            mixing[:, c.prefix + patch] = 0
            mixing[:, c.prefix + patch, keys] = logits[:, c.prefix + patch, keys].softmax(dim=-1)
        weights = mixing @ weights
    return weights


def images(config: models.ModelConfig, batch: int = 2) -> Tensor:
    return torch.randn(batch, config.channels, *config.img_size, generator=torch.Generator().manual_seed(1))


@every_pattern
@pytest.mark.parametrize(("pool", "registers"), [("gap", 0), ("cls", 1)])
@torch.no_grad()
def test_weights_and_outputs_are_those_of_a_slow_computation(attention, pool, registers):
    model = randomise(models.build(replace(SMALL, attention=attention, pool=pool, registers=registers)))
    x = torch.randn(1, model.config.length, 16, generator=torch.Generator().manual_seed(2))
    for number, block in enumerate(model.blocks):
        weights = expected(model, number, x[0])
        assert distance(block.attn.weights(x)[0], weights) < 1e-5
        values = block.attn.qkv(x)[0, :, 32:].unflatten(1, (2, 8)).transpose(0, 1)
        out = block.attn.proj((weights @ values).transpose(0, 1).flatten(1))
        assert distance(block.attn(x)[0], out) < 1e-5


@pytest.mark.parametrize(
    ("attention", "size"),
    [("window:7", (10, 14)), ("window:9,shift", (10, 14)), ("axial", (2, 14)), ("neighbourhood:13", (10, 14))],
)
@pytest.mark.parametrize("pool", ["cls", "gap"])
@torch.no_grad()
def test_a_pattern_that_covers_the_grid_is_global(attention, size, pool):
    config = replace(SMALL, img_size=size, pool=pool)
    full = randomise(models.build(config))
    local = models.build(replace(config, attention=attention)).eval()
    local.load_state_dict(full.state_dict())
    assert distance(local(images(config)), full(images(config))) < 1e-6


@every_pattern
@torch.no_grad()
def test_patches_outside_the_pattern_change_nothing(attention):
    """One block, without a class token: the output of a patch depends on exactly those that it attends to."""
    model = randomise(models.build(replace(SMALL, attention=attention, pool="gap", depth=2)))
    tokens = torch.randn(1, 35, 16, generator=torch.Generator().manual_seed(3))
    for number, block in enumerate(model.blocks):
        first, *more = slow(attention, number)
        before = block(tokens)
        for patch in (0, 16, 34):
            reached = {b for middle in more[0][patch] for b in first[middle]} if more else first[patch]
            outside = torch.tensor([b not in reached for b in range(35)])
            changed = torch.where(outside[:, None], torch.randn(35, 16), tokens[0])[None]
            assert torch.equal(block(changed)[0, patch], before[0, patch])
            if len(reached) > 1:
                other = next(iter(reached - {patch}))
                changed = tokens.clone()
                changed[0, other] = -changed[0, other]
                assert not torch.equal(block(changed)[0, patch], before[0, patch])


@every_pattern
@torch.no_grad()
def test_the_class_token_attends_to_all_and_all_attend_to_it(attention):
    model = randomise(models.build(replace(SMALL, attention=attention)))
    x = torch.randn(2, 36, 16)
    for block in model.blocks:
        weights = block.attn.weights(x)
        assert (weights[:, :, 0] > 0).all()
        assert (weights[:, :, :, 0] > 0).all()
        assert torch.allclose(weights.sum(dim=-1), torch.ones(()))


@every_pattern
def test_a_pattern_adds_no_tensor_to_the_weights(attention):
    full, local = (models.build(replace(SMALL, attention=each)) for each in ("global", attention))
    assert local.state_dict().keys() == full.state_dict().keys()
    assert models.parameters(local.config) == models.parameters(full.config)
    assert models.name_of(local.config) == models.name_of(full.config)


@every_pattern
@pytest.mark.parametrize("pos", ["learned", "relative", "learned_every"])
@torch.no_grad()
def test_any_of_the_tokens_are_encoded(attention, pos):
    """Those that are left out are attended by none."""
    model = randomise(models.build(replace(SMALL, attention=attention, pos=pos)))
    tokens = model.tokens(images(model.config))
    each = torch.stack([torch.randperm(36, generator=torch.Generator().manual_seed(i))[:9] for i in (1, 2)])
    assert distance(model.encode(tokens, torch.arange(36)), model.encode(tokens)) < 1e-5
    both = model.encode(tokens, each)
    for image in range(2):
        alone = model.encode(tokens[image : image + 1], each[image])
        assert distance(both[image : image + 1], alone) < 1e-5
        x, keep = tokens[image : image + 1, each[image]], each[image]
        for block in model.blocks:  # by the weights of the subset
            x = x if block.place is None else block.place(x, keep)
            attn, y = block.attn, block.norm1(x)
            values = attn.qkv(y)[..., 32:].unflatten(2, (2, 8)).transpose(1, 2)
            x = x + attn.proj((attn.weights(y, keep) @ values).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
        assert distance(alone, model.norm(x)) < 1e-5
    with pytest.raises(UserError, match="'encode' needs all 36"):
        model.encode(tokens[:, :9])


def test_global_blocks_are_the_last_of_equal_parts_as_in_vitdet():
    blocks = choice("window:14,global:4", 12).layers(12, (20, 20), 1)
    assert [number for number, pattern in enumerate(blocks) if pattern is None] == [2, 5, 8, 11]
    assert len({id(pattern) for pattern in blocks if pattern is not None}) == 1
    shifted = choice("window:7,shift", 4).layers(4, (20, 20), 1)
    assert [any(pattern.shift) for pattern in shifted] == [False, True, False, True]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("local", "'attention' must be global, window:SIZE, axial, .* but it is 'local'"),
        ("neighborhood:7", "Did you mean 'neighbourhood'"),
        ("window", "'window' attention needs a size, such as 'window:7', but 'attention' is 'window'"),
        ("window:0", "needs a size of at least 1"),
        ("axial:3", "'axial' attention has no size"),
        ("neighbourhood:4", "needs an odd size"),
        ("axial,shift", "cannot be shifted; only windows can"),
        ("global,global:1", "is global in every block"),
        ("window:3,global:3", "must have from 1 to 2 global blocks"),
    ],
)
def test_a_wrong_pattern_is_refused(attention, message):
    with pytest.raises(UserError, match=message):
        replace(SMALL, attention=attention)


@torch.no_grad()
def test_a_hybrid_has_patterns_too():
    config = HybridConfig(32, 2, 2, 64, (32,), (1,), first=8, groups=8, img_size=(16, 24), classes=5)
    full, local = (randomise(models.build(replace(config, attention=each))) for each in ("global", "window:3,shift"))
    x = images(config)
    assert distance(local(x), full(x)) > 1e-3
    tokens = local.tokens(x)
    assert distance(local.encode(tokens, torch.arange(config.length)), local.encode(tokens)) < 1e-5
    assert models.macs(local.config) < models.macs(config)


def test_uniform_attention_reaches_as_far_as_its_pattern():
    distances = {}
    for attention in ("global", "window:3", "neighbourhood:3", "axial"):
        model = models.build(replace(SMALL, attention=attention, pool="gap"))
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv.weight.zero_()  # equal logits
        distances[attention] = even_distance(model)
        assert (
            distance(
                torch.tensor(attention_distance(model, [images(SMALL)])),
                torch.tensor(distances[attention])[:, None].expand(2, 2),
            )
            < 1e-5
        )
    assert distances["neighbourhood:3"][0] < distances["axial"][0] < distances["global"][0] + 1e-5
    assert distances["window:3"][0] < distances["global"][0]


@every_pattern
def test_relevance_follows_the_attention_that_is_computed(attention):
    """Evidence for a class reaches only patches that the class token sees in one block: here all."""
    model = randomise(models.build(replace(SMALL, attention=attention)))
    found = relevance(model, images(SMALL), [0, 1])
    assert found.shape == (2, 5, 7)
    assert np.isfinite(found).all()
    assert (found > 0).any()


def macs_of_attention(attention: str, grid: int) -> int:
    """What attention costs in a ViT of one block without a class token, beside its linear layers."""
    shape = {"img_size": 2 * grid, "width": 16, "depth": 1, "heads": 2, "mlp": 32, "patch": 2, "stem": "patch"}
    full, local = (models.configure("vit_nano2", **shape, pool="gap", attention=each) for each in ("global", attention))
    return models.macs(local) - models.macs(full) + 2 * grid**4 * 16


@pytest.mark.parametrize(
    ("attention", "keys"),
    [("window:7", 7 * 7), ("axial", 14 + 14), ("neighbourhood:5", 5 * 14), ("strided", 14 * 14)],
)
def test_macs_are_those_that_are_computed(attention, keys):
    assert macs_of_attention(attention, 14) == 2 * 14 * 14 * keys * 16


# Large images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [train, infer])
@pytest.mark.parametrize(
    ("attention", "pool"), [("window:8", "cls"), ("window:8,shift", "gap"), ("window:7", "cls"), ("axial", "gap")]
)
def test_no_operation_returns_a_matrix_of_all_pairs(use, attention, pool):
    with Outputs() as outputs:
        use(vit(32, pool=pool, attention=attention))
    assert outputs.largest < 32**4


@pytest.mark.parametrize(
    ("use", "attention", "side"),
    [(train, "window:8", 64), (train, "window:7,shift", 64), (train, "neighbourhood:3", 64), (infer, "window:7", 128)],
)
def test_peak_memory_grows_linearly_with_the_tokens(use, attention, side):
    """Up to 128² patches: 1,024 pixels in patches of 8."""
    few, many = (peak_memory(use, vit(patches, attention=attention)) for patches in (side // 4, side))
    assert 8 * few < many < 20 * few  # 16 times the tokens; the square would be 256 times
