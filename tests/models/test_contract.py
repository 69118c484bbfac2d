"""The contract that every model keeps, whatever its size and its switches."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from itertools import cycle
from typing import get_args, get_type_hints

import pytest
import torch
from peers import distance, randomise
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail import models
from vitrail.errors import UserError
from vitrail.models import ModelConfig
from vitrail.models.bit import BiTConfig
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.pvt import PVTConfig
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.models.swin import SwinConfig
from vitrail.models.swin_v2 import SwinV2Config
from vitrail.models.vit import ViTConfig

SMALL = ViTConfig(width=32, depth=2, heads=2, mlp=64, patch=4, img_size=(8, 12), classes=5)
POOLS, POSITIONS = (get_args(get_type_hints(ViTConfig)[field]) for field in ("pool", "pos"))
PATTERNS = ("window:2,shift", "axial", "neighbourhood:3,global:1", "strided:2")
SWITCHES = {"head": "tanh", "stem": "conv", "act": "swiglu", "registers": 2, "layer_scale": 0.1}

# Small models of the other families, on images that are no squares.
RELATIVES: dict[str, ModelConfig] = {
    "hybrid": HybridConfig(32, 2, 2, 64, (32, 64), (1, 1), first=8, groups=4, img_size=(16, 24), classes=5),
    "hybrid stem": HybridConfig(32, 1, 2, 64, (), (), first=8, groups=4, patch=2, img_size=(16, 24), classes=5),
    "bit": BiTConfig((32, 64), (2, 1), groups=4, img_size=(24, 33), classes=5),
    "mixer": MixerConfig(32, 2, 12, 64, patch=4, img_size=(8, 12), classes=5),
    "swin": SwinConfig((16, 32), (2, 2), (2, 4), window=3, patch=2, img_size=(15, 22), classes=5),
    "swin_v2": SwinV2Config((16, 32), (2, 2), (2, 4), 3, (2, 2), patch=2, img_size=(15, 22), classes=5),
    "pvt": PVTConfig((16, 32), (1, 2), (1, 2), (4, 2), (2, 1), patch=4, img_size=(16, 24), classes=5),
    "pvt_v2": PVTv2Config((16, 32), (1, 2), (1, 2), (4, 2), (2, 1), img_size=(17, 23), classes=5),
    "pvt_v2 linear": PVTv2Config((16, 32), (1, 1), (1, 2), (4, 2), (2, 1), True, img_size=(17, 23), classes=5),
    "coatnet": CoAtNetConfig((16, 32, 64), (1, 2, 1), 16, convs=1, img_size=(25, 32), classes=5),
}

REST = {
    **{f"attention={attention}": replace(SMALL, img_size=(12, 20), attention=attention) for attention in PATTERNS},
    **{f"all switches, {pool}": replace(SMALL, pool=pool, pos="relative", **SWITCHES) for pool in ("map", "cls_dist")},
    **RELATIVES,
}
# Tracing takes a while: every pool and every position, two of them at a time.
TRACED = {f"{pool}, {pos}": replace(SMALL, pool=pool, pos=pos) for pool, pos in zip(cycle(POOLS), POSITIONS)} | REST
# What takes milliseconds is run with every pool, position and switch alone. Large models are built where they are
# counted.
REAL = {
    **{f"pool={pool}": replace(SMALL, pool=pool) for pool in POOLS},
    **{f"pos={pos}": replace(SMALL, pos=pos) for pos in POSITIONS if pos != SMALL.pos},
    **REST,
    "vit_nano4": models.CONFIGS["vit_nano4"],
    **{f"{key}={value}": replace(SMALL, **{key: value}) for key, value in SWITCHES.items()},
    "CLIP": replace(SMALL, stem="clip", act="quick_gelu"),
    "act=gelu_tanh": replace(SMALL, act="gelu_tanh"),
}

every_small_model = pytest.mark.parametrize("config", REAL.values(), ids=REAL)
every_traced_model = pytest.mark.parametrize("config", TRACED.values(), ids=TRACED)
SIZED = {name: config for name, config in REAL.items() if not isinstance(config, MixerConfig)}  # for any image size
every_sized_model = pytest.mark.parametrize("config", SIZED.values(), ids=SIZED)


def images(config: ModelConfig, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, config.channels, *config.img_size, generator=generator)


def sides(config: ModelConfig) -> int:
    """Sides that every model can read are multiples of this, and small."""
    return config.step if config.step > 1 else 32


def on_meta(config: ModelConfig) -> tuple[nn.Module, Tensor]:
    """The model and a batch of two, as shapes only."""
    with torch.device("meta"):
        return models.build(config), torch.empty(2, config.channels, *config.img_size)


@every_small_model
@torch.no_grad()
def test_shapes(config):
    model, x = on_meta(config)
    assert model.config == config
    if isinstance(config, ViTConfig):
        tokens = model.tokens(x)
        assert tokens.shape == model.encode(tokens).shape == (2, config.length, config.width)
    assert model.embed(x).shape == (2, config.features)
    assert model(x).shape == (2, config.classes)


@every_small_model
@torch.no_grad()
def test_maps_for_dense_heads(config):
    model, x = on_meta(config)
    assert model.features(x).shape == (2, config.width, *config.grid)
    h, w = config.img_size
    assert config.grid == (-(-h // model.stride), -(-w // model.stride))
    levels = model.features(x, levels=True)
    assert levels[-1].shape == (2, config.width, *config.grid)
    grids = config.grids if len(config.grids) > 1 else [config.grid] * min(config.depth, 4)
    assert [tuple(level.shape[2:]) for level in levels] == grids


@every_small_model
@torch.no_grad()
def test_another_resolution_and_other_channels(config):
    h, w = 3 * sides(config), 5 * sides(config)
    model, x = on_meta(replace(config, img_size=(h, w), channels=7))
    assert model(x).shape == (2, config.classes)


@every_small_model
def test_stages_hold_every_parameter_once_from_input_to_output(config):
    model, _ = on_meta(config)
    stages = model.stages()
    held = [id(p) for stage in stages for p in stage.parameters()]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in model.parameters()}

    where = {id(p): i for i, stage in enumerate(stages) for p in stage.parameters()}
    assert where[id(model.get_parameter(model.filters()))] == 0
    assert where[id(models.head(model).weight)] == len(stages) - 1 > 2
    assert all(list(stage.parameters()) for stage in stages)
    if isinstance(config, ViTConfig):
        order = [where[id(block.norm1.weight)] for block in model.blocks]
        assert order == [*range(1, config.depth + 1)]
        assert where[id(model.norm.weight)] > config.depth
        if config.pool == "cls_dist":
            assert (where[id(model.dist_token)], where[id(model.head_dist.weight)]) == (0, len(stages) - 1)


@every_small_model
def test_every_stage_is_called_once_in_a_forward_pass(config):
    model = models.build(config)
    calls: list[int] = []
    for number, stage in enumerate(model.stages()):
        stage.register_forward_hook(lambda *_, number=number: calls.append(number))
    model(images(config))
    assert calls == [*range(len(model.stages()))]


@every_small_model
@torch.no_grad()
def test_stages_are_those_of_the_model_after_a_copy_and_after_loading(config):
    with torch.device("meta"):
        model = models.build(config)
    model.load_state_dict(models.build(config).state_dict(), assign=True)
    for other in (model, copy.deepcopy(model)):
        held = {id(p) for stage in other.stages() for p in stage.parameters()}
        assert held == {id(p) for p in other.parameters()}
        assert {p.device.type for stage in other.stages() for p in stage.parameters()} == {"cpu"}


@every_small_model
@torch.no_grad()
def test_the_maps_are_what_the_features_are_read_from(config):
    model, x = randomise(models.build(config)), images(config)
    last = model.features(x)
    assert torch.equal(model.features(x, levels=True)[-1], last)
    average = last.mean(dim=(2, 3))
    if isinstance(config, ViTConfig):
        tokens = model.encode(model.tokens(x))
        tokens = model.norm(tokens) if config.pool in ("gap_norm", "mae") else tokens
        assert distance(last.flatten(2).mT, tokens[:, config.prefix :]) < 1e-6
    elif config.length > config.grid[0] * config.grid[1]:  # a class token is read
        assert last.isfinite().all()
    else:
        pooled = model.head.norm(average) if isinstance(config, CoAtNetConfig) else average
        assert distance(pooled, model.embed(x)) < 1e-5


@every_small_model
@torch.no_grad()
def test_without_classes_it_is_the_body_alone(config):
    whole = randomise(models.build(config))
    body = models.build(replace(config, classes=0)).eval()
    state = whole.state_dict()
    body.load_state_dict({name: state[name] for name in body.state_dict()})
    head = {id(p) for p in whole.stages()[-1].parameters()}
    assert state.keys() - body.state_dict().keys() == {n for n, p in whole.named_parameters() if id(p) in head}
    x = images(config)
    assert torch.equal(body(x), whole.embed(x))
    assert torch.equal(body(x), body.embed(x))
    assert len(body.stages()) == len(whole.stages()) - 1
    assert body.classifiers() == []
    assert [layer.weight.shape[0] for layer in whole.classifiers()] == [config.classes] * len(whole.heads(x))
    with pytest.raises(UserError, match="no classification head"):
        models.head(body)


@every_small_model
def test_a_fresh_model_knows_nothing(config):
    """The head is zero, so training starts at equal probabilities."""
    assert not models.build(config)(images(config)).any()


@every_small_model
def test_every_parameter_gets_a_finite_gradient(config):
    torch.manual_seed(0)
    model = randomise(models.build(replace(config, drop=0.1, drop_path=0.1))).train()  # zeros pass no gradient on
    nn.functional.cross_entropy(model(images(config, 8)), torch.arange(8) % config.classes).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), f"{name} is a dead parameter"


@every_small_model
@torch.no_grad()
def test_no_images_give_no_answers(config):
    assert models.build(config).eval()(images(config, 0)).shape == (0, config.classes)


@every_small_model
@torch.no_grad()
def test_evaluation_is_deterministic_and_images_do_not_mix(config):
    model = randomise(models.build(replace(config, drop=0.5, drop_path=0.5)))
    x = images(config, 3)
    logits = model(x)
    assert torch.equal(logits, model(x))
    assert distance(model(x[1:2]), logits[1:2]) < 1e-5
    assert distance(logits[:1], logits[1:2]) > 1e-3  # another image gives other logits


@every_small_model
@torch.no_grad()
def test_saved_and_loaded_it_is_the_same_model(config, tmp_path):
    model = randomise(models.build(config))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = models.build(config).eval()
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model(images(config)), loaded(images(config)))


@every_sized_model
@torch.no_grad()
def test_resizing_changes_the_positions_and_nothing_else(config):
    model = randomise(models.build(config))
    assert torch.equal(models.resize(model, config.img_size)(images(config)), model(images(config)))

    h, w = 5 * sides(config), 4 * sides(config)
    resized = models.resize(model, (h, w))
    assert resized.config == replace(config, img_size=(h, w))
    assert not resized.training
    logits = resized(images(resized.config))
    assert logits.shape == (2, config.classes)
    assert logits.isfinite().all()
    positions = {"pos_embed", "pos_row", "pos_col", "pos_embed1", "pos_embed2", "pos_embed3"}
    for name, value in model.state_dict().items():
        same = torch.equal(resized.state_dict()[name], value)
        own = name.rpartition(".")[2] if ".place." in name else name  # positions of a block
        assert same != (own in positions or name.endswith(("relative.table", "rel_pos.relative_position_bias_table")))


def test_a_mixer_serves_one_size():
    model = models.build(RELATIVES["mixer"])
    assert models.resize(model, (8, 12)).config == model.config
    with pytest.raises(UserError, match="its image size must stay 8x12, but it is 16x16"):
        models.resize(model, 16)


def test_resizing_keeps_type_and_mode():
    model = models.resize(models.build(SMALL).double().train(), (16, 16))
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@every_traced_model
@torch.no_grad()
def test_it_compiles_without_a_graph_break(config):
    torch.compiler.reset()
    if isinstance(config, ViTConfig) and config.attention == "global":
        config = replace(config, depth=1)  # one block is like the other
    model = randomise(models.build(config))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert distance(compiled(images(config)), model(images(config))) < 1e-5


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's own backend needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@torch.no_grad()
def test_the_compiled_kernels_give_the_same_logits():
    torch.compiler.reset()
    config = replace(SMALL, depth=1, pos="relative")
    model = randomise(models.build(config))
    # Without vector instructions, whose headers take the C++ compiler most of the time.
    compiled = torch.compile(model, fullgraph=True, options={"cpp.simdlen": 1})
    assert distance(compiled(images(config)), model(images(config))) < 1e-5


@every_small_model
@torch.no_grad()
def test_it_runs_in_half_precision(config):
    model = randomise(models.build(config))
    expected = model(images(config))
    half = model.bfloat16()(images(config).bfloat16())
    assert half.dtype == torch.bfloat16
    assert distance(half.float(), expected) < 0.1


@pytest.mark.parametrize("shape", [(2, 3, 12, 8), (2, 1, 8, 12), (3, 8, 12)], ids=str)
@pytest.mark.parametrize("config", [SMALL, *RELATIVES.values()], ids=["vit", *RELATIVES])
def test_images_of_another_shape_are_refused(config, shape):
    h, w = config.img_size
    with pytest.raises(UserError, match=rf"expects batches of shape \(B, 3, {h}, {w}\), but got"):
        models.build(config)(torch.zeros(shape))


# Some of the tokens ----------------------------------------------------------------------------------------


def masked(model: nn.Module, tokens: Tensor, keep: Tensor) -> Tensor:
    """The encoder over all tokens, in which no token attends to those that are not kept; (B, n, D)."""
    there = torch.zeros(tokens.shape[:2], dtype=torch.bool).scatter(1, keep, True)
    for block in model.blocks:
        tokens = tokens if block.place is None else block.place(tokens, None)
        attn, x = block.attn, block.norm1(tokens)
        q, k, v = attn.qkv(x).unflatten(2, (3, attn.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        logits = logits if attn.relative is None else logits + attn.relative()
        weights = logits.masked_fill(~there[:, None, None], -torch.inf).softmax(dim=-1)
        tokens = tokens + attn.proj((weights @ v).transpose(1, 2).flatten(2))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return model.norm(tokens).take_along_dim(keep[..., None], dim=1)


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("pos", POSITIONS)
@torch.no_grad()
def test_any_of_the_tokens_are_encoded_with_any_positions(pool, pos):
    config = replace(SMALL, pool=pool, pos=pos, registers=1)
    model = randomise(models.build(config))
    tokens = model.tokens(images(config))
    each = torch.stack([torch.randperm(config.length, generator=torch.Generator().manual_seed(i))[:4] for i in (1, 2)])
    assert distance(model.encode(tokens, each), masked(model, tokens, each)) < 1e-5
    assert distance(model.encode(tokens, each[0]), masked(model, tokens, each[:1].expand(2, -1))) < 1e-5
    assert distance(model.encode(tokens, torch.arange(config.length)), model.encode(tokens)) < 1e-6
    if pos.endswith(("relative", "_every", "_shared")):
        with pytest.raises(UserError, match="with positions in its blocks 'encode' needs all"):
            model.encode(tokens[:, :4])
    else:
        assert distance(model.encode(tokens[:, :4]), model.encode(tokens, torch.arange(4))) < 1e-6


@torch.no_grad()
def test_any_of_the_tokens_of_a_hybrid_are_encoded():
    model = randomise(models.build(RELATIVES["hybrid"]))
    tokens, keep = model.tokens(images(model.config)), torch.tensor([0, 2, 5])
    assert distance(model.encode(tokens, keep), masked(model, tokens, keep.expand(2, -1))) < 1e-5
