"""The layers of a ViT: pooling, attention, regularisation and initialisation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peers import distance, randomise
from torch import Tensor

from vitrail import models
from vitrail.models import ModelConfig
from vitrail.models.layers import Attention, Block, DropPath
from vitrail.models.position import RelativeBias
from vitrail.models.vit import ViTConfig

SMALL = ViTConfig(width=32, depth=2, heads=2, mlp=64, patch=4, img_size=(8, 12), classes=5)


def images(config: ModelConfig, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, config.channels, *config.img_size, generator=generator)


# Pooling ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_two_heads_read_two_tokens_and_are_averaged():
    model = randomise(models.build(replace(SMALL, pool="cls_dist", registers=2)))
    x = images(SMALL)
    tokens = model.encode(model.tokens(x))
    logits, distilled = model.heads(x)
    assert distance(logits, model.head(tokens[:, 0])) < 1e-6
    assert distance(distilled, model.head_dist(tokens[:, 1])) < 1e-6
    assert torch.equal(model(x), (logits + distilled) / 2)
    assert distance(model.embed(x), (tokens[:, 0] + tokens[:, 1]) / 2) < 1e-6
    one = randomise(models.build(replace(SMALL, pool="gap")))
    assert torch.equal(one.heads(x)[0], one(x))
    assert len(one.heads(x)) == 1


@torch.no_grad()
def test_the_class_token_stands_beside_the_average_of_the_patches():
    model = randomise(models.build(replace(SMALL, pool="cls_gap", registers=2)))
    tokens = model.encode(model.tokens(images(SMALL)))
    assert torch.equal(model.embed(images(SMALL)), torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], dim=1))


# Attention -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "relative"])
def attention(request):
    relative = RelativeBias((2, 3), heads=4, prefix=1) if request.param == "relative" else None
    return randomise(Attention(32, 4, relative=relative))


@torch.no_grad()
def test_attention_weights_are_those_that_forward_applies(attention):
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)) * 3
    weights = attention.weights(x)
    assert weights.shape == (2, 4, 7, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 7))
    assert weights.std() > 0.01  # not merely uniform
    values = attention.qkv(x)[..., 64:].unflatten(2, (4, 8)).transpose(1, 2)
    mixed = (weights @ values).transpose(1, 2).flatten(2)
    assert distance(attention.proj(mixed), attention(x)) < 1e-5


@torch.no_grad()
def test_relative_positions_change_the_attention():
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    attention = randomise(Attention(32, 4, relative=RelativeBias((2, 3), heads=4, prefix=1)))
    before = attention.weights(x)
    attention.relative.table.zero_()
    assert distance(attention.weights(x), before) > 1e-2


@torch.no_grad()
def test_nothing_is_stored_on_modules():
    model = randomise(models.build(replace(SMALL, pos="relative")))
    x = images(SMALL)
    before = [sorted(vars(module)) for module in model.modules()]
    model(x)
    model.blocks[0].attn.weights(model.tokens(x))
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert not list(model.buffers())
    assert not [v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor)]


# Regularisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["drop", "drop_path"])
@torch.no_grad()
def test_dropout_acts_in_training_only(option):
    torch.manual_seed(0)
    model = randomise(models.build(replace(SMALL, **{option: 0.5})))
    plain = models.build(SMALL).eval()
    plain.load_state_dict(model.state_dict())
    x = images(SMALL, 8)
    assert torch.equal(model(x), plain(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_drop_path_grows_linearly_with_depth():
    model = models.build(replace(SMALL, depth=5, drop_path=0.2))
    assert [block.drop_path.rate for block in model.blocks] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])


def test_drop_path_leaves_out_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    out = DropPath(0.25).train()(torch.ones(10_000, 3, 2)).flatten(1)
    assert torch.equal(out.min(dim=1).values, out.max(dim=1).values)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert out.mean().item() == pytest.approx(1.0, abs=0.03)


def test_a_dropped_block_is_the_identity():
    torch.manual_seed(0)
    block = randomise(Block(32, 2, 64, drop_path=0.999)).train()
    x = torch.randn(4, 6, 32)
    assert torch.equal(block(x), x)


# Initialisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["cls", "map"])
def test_weights_start_as_in_the_authors_code(pool):
    """Xavier for each matrix of the encoder; q, k and v are three of them although they lie in one."""
    torch.manual_seed(0)
    model = models.create("vit_ti16", pool=pool, head="tanh", registers=4)
    width, mlp = 192, 768
    bounds = {
        "blocks.0.attn.qkv.weight": (6 / (2 * width)) ** 0.5,
        "blocks.0.attn.proj.weight": (6 / (2 * width)) ** 0.5,
        "blocks.0.mlp.fc1.weight": (6 / (width + mlp)) ** 0.5,
        "blocks.0.mlp.fc2.weight": (6 / (width + mlp)) ** 0.5,
    }
    if pool == "map":
        bounds["attn_pool.kv.weight"] = bounds["attn_pool.q.weight"] = bounds["blocks.0.attn.proj.weight"]
    state = model.state_dict()
    for name, bound in bounds.items():
        assert state[name].abs().max().item() == pytest.approx(bound, rel=1e-3), name
        assert state[name].std().item() == pytest.approx(bound / 3**0.5, rel=0.02), name
    assert state["patch_embed.proj.weight"].std().item() == pytest.approx((3 * 16 * 16) ** -0.5, rel=0.02)
    assert state["pos_embed"].std().item() == pytest.approx(0.02, rel=0.02)
    assert not state["head.weight"].any()
    if pool == "cls":
        assert not state["cls_token"].any()


def test_both_halves_of_a_gated_mlp_start_as_matrices_of_their_own():
    torch.manual_seed(0)
    weight = models.create("vit_ti16", act="swiglu", mlp=512).blocks[0].mlp.fc1.weight
    for half in weight.chunk(2):
        assert half.abs().max().item() == pytest.approx((6 / (192 + 512)) ** 0.5, rel=1e-3)


# Speed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pos", ["learned", "relative"])
def test_last_block_computes_only_the_tokens_that_the_head_reads(pos):
    """Outputs and gradients are those of all tokens; the MLP of the last block sees the class token alone."""
    model = randomise(models.build(replace(SMALL, pos=pos, registers=1)))
    x = images(SMALL)
    seen: list[int] = []
    model.blocks[-1].mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    few = model(x)
    grads = torch.autograd.grad(few.square().sum(), list(model.parameters()))
    every = model.head(model.encode(model.tokens(x))[:, 0])
    wanted = torch.autograd.grad(every.square().sum(), list(model.parameters()))
    assert seen == [1, model.config.length]
    torch.testing.assert_close(few, every)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


def test_attention_trains_in_fp32_under_bf16_autocast_on_cpus():
    layer = Attention(16, 2)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    kernels: list[torch.dtype] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "scaled_dot_product" in str(function):
                kernels.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Spy():
        result = layer(x)
        assert result.dtype == torch.bfloat16
        result.float().sum().backward()
        with torch.no_grad():
            layer(x)
    assert kernels == [torch.float32, torch.float32, torch.bfloat16]
