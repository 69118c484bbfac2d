"""Which parameter learns how fast."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import peers
import pytest
import torch
from torch.optim import SGD, AdamW

from vitrail.config import OptimConfig
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.train.lamb import Lamb
from vitrail.train.muon import Muon, orthogonalise
from vitrail.train.optim import build_optimizers, lr_at, set_lr

OPTIM = OptimConfig(epochs=10, batch_size=8, opt="adamw", lr=0.1, weight_decay=0.05, sched="cosine", warmup_epochs=1.0)
SMALL = ViTConfig(width=16, depth=3, heads=2, mlp=32, patch=2, img_size=(8, 8), classes=5)
MODELS = {
    "plain": SMALL,
    "class token, registers, LayerScale": replace(SMALL, registers=2, layer_scale=0.1),
    "relative positions": replace(SMALL, pos="relative", pool="gap"),
    "row and column positions": replace(SMALL, pos="learned2d"),
    "pooling by attention": replace(SMALL, pool="map", head="tanh"),
    "convolutional stem": replace(SMALL, stem="conv", pool="gap"),
}
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
every_optimiser = pytest.mark.parametrize("opt", ["adamw", "sgd", "muon", "lamb"])


def groups_of(model, optimizers):
    """Every parameter's name with the optimisers and groups that hold it."""
    names = {p: name for name, p in model.named_parameters()}
    found = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                found.setdefault(names[p], []).append((optimizer, group))
    return found


@every_model
@every_optimiser
def test_every_parameter_is_in_exactly_one_group(config, opt):
    model, pretrained = build(config), config is SMALL
    found = groups_of(model, build_optimizers(model, replace(OPTIM, opt=opt, layer_decay=0.8), pretrained))
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert {len(homes) for homes in found.values()} == {1}


@every_model
@every_optimiser
def test_only_weight_matrices_and_filters_are_decayed(config, opt):
    model = build(config)
    undecayed = ("bias", "cls_token", "reg_token", "pos_embed", "pos_row", "pos_col", "table", "gamma", "latent")
    norms = ("norm.weight", "norm1.weight", "norm2.weight", "convs.1.weight")  # of the stem: conv, norm, GELU
    for name, [(_, group)] in groups_of(model, build_optimizers(model, replace(OPTIM, opt=opt), False)).items():
        free = name.endswith(undecayed) or name.endswith(norms)
        assert group["weight_decay"] == (0.0 if free else OPTIM.weight_decay), name


@every_model
def test_muon_serves_the_matrices_of_the_encoder_and_adamw_the_rest(config):
    model = build(config)
    optimizers = build_optimizers(model, replace(OPTIM, opt="muon"), False)
    assert [type(optimizer) for optimizer in optimizers] == [Muon, AdamW]
    for name, [(optimizer, _)] in groups_of(model, optimizers).items():
        matrix = name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight", "pool.q.weight", "kv.weight"))
        encoder = name.startswith(("blocks.", "attn_pool."))
        assert isinstance(optimizer, Muon if matrix and encoder else AdamW), name


def test_one_optimiser_serves_all_without_muon():
    model = build(SMALL)
    assert [type(optimizer) for optimizer in build_optimizers(model, OPTIM, False)] == [AdamW]
    assert [type(optimizer) for optimizer in build_optimizers(model, replace(OPTIM, opt="sgd"), False)] == [SGD]


def test_lamb_takes_the_steps_of_timm():
    """Over decayed and undecayed parameters, the zero matrix of a fresh head, and a parameter without a gradient."""
    torch.manual_seed(0)
    model = build(SMALL)
    theirs = copy.deepcopy(model)
    optimizers = build_optimizers(model, replace(OPTIM, opt="lamb", lr=0.01), False)
    assert [type(optimizer) for optimizer in optimizers] == [Lamb]
    names = {p: name for name, p in model.named_parameters()}
    copies = dict(theirs.named_parameters())
    groups = [{**group, "params": [copies[names[p]] for p in group["params"]]} for group in optimizers[0].param_groups]
    reference = peers.timm("timm.optim.lamb").Lamb(groups, lr=0.01, max_grad_norm=None)
    set_lr(optimizers, 0.01)
    for step in range(5):
        for name, p in model.named_parameters():
            if name != "cls_token":
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                copies[name].grad = p.grad.clone()
        optimizers[0].step()
        reference.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, copies[name], rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    assert model.head.weight.abs().max() > 0


def test_frozen_parameters_are_left_out():
    model = build(SMALL)
    model.patch_embed.requires_grad_(False)
    found = groups_of(model, build_optimizers(model, OPTIM, False))
    assert {name for name, _ in model.named_parameters()} - found.keys() == {
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
    }


def scales(config, pretrained, opt="muon"):
    """The factor on the learning rate of each stage, which is the same for all of a stage's parameters."""
    model = build(SMALL)
    optimizers = build_optimizers(model, replace(config, opt=opt), pretrained)
    set_lr(optimizers, 10.0)
    lrs = {p: group["lr"] for o in optimizers for group in o.param_groups for p in group["params"]}
    by_stage = [{lrs[p] / 10 for p in stage.parameters()} for stage in model.stages()]
    assert {len(found) for found in by_stage} == {1}
    return [found.pop() for found in by_stage]


@every_optimiser
def test_layer_decay_slows_each_stage_further_from_the_head(opt):
    stages = 1 + SMALL.depth + 2  # what enters the encoder, its blocks, the last norm, the head
    expected = [0.5 ** (stages - 1 - i) for i in range(stages)]
    assert scales(replace(OPTIM, layer_decay=0.5), False, opt) == pytest.approx(expected)


def test_body_lr_slows_all_but_the_head_and_only_with_trained_weights():
    config = replace(OPTIM, body_lr=0.25)
    assert scales(config, pretrained=True) == [0.25] * (SMALL.depth + 2) + [1.0]
    assert scales(config, pretrained=False) == [1.0] * (SMALL.depth + 3)


def test_body_lr_and_layer_decay_multiply():
    assert scales(replace(OPTIM, body_lr=0.1, layer_decay=0.5), pretrained=True)[-3:] == pytest.approx(
        [0.025, 0.05, 1.0]
    )


def schedule(steps, warmup, **changes):
    config = replace(OPTIM, **changes)
    return [lr_at(step, steps, warmup, config) / config.lr for step in range(steps)]


@pytest.mark.parametrize("sched", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_from_its_first_step_to_the_peak(sched):
    heights = schedule(100, 10, sched=sched)
    assert heights[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert heights[10] == pytest.approx(1.0)
    assert max(heights) == pytest.approx(1.0)


@pytest.mark.parametrize("sched", ["cosine", "linear", "constant"])
def test_without_warm_up_the_first_step_is_the_peak(sched):
    assert schedule(50, 0, sched=sched)[0] == pytest.approx(1.0)


def test_linear_falls_by_equal_steps_to_almost_nothing():
    heights = schedule(110, 10, sched="linear")[10:]
    assert heights == pytest.approx([1 - i / 100 for i in range(100)])


def test_cosine_is_half_in_the_middle_and_almost_nothing_at_the_end():
    heights = schedule(110, 10, sched="cosine")[10:]
    assert heights[50] == pytest.approx(0.5)
    assert heights[25] == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert 0 < heights[-1] < 0.001
    assert heights == sorted(heights, reverse=True)


def test_constant_stays_until_its_cooldown_then_falls_to_almost_nothing():
    heights = schedule(100, 10, sched="constant", cooldown=0.2)
    assert set(heights[10:81]) == {1.0}
    assert heights[81:] == pytest.approx([1 - i / 20 for i in range(1, 20)])


def test_constant_without_cooldown_stays_to_the_end():
    assert set(schedule(100, 0, sched="constant", cooldown=0.0)) == {1.0}


@pytest.mark.parametrize("sched", ["cosine", "linear", "constant"])
def test_min_lr_is_where_the_decay_ends(sched):
    heights = schedule(1000, 100, sched=sched, min_lr=0.1)
    assert heights[-1] == pytest.approx(0.1, abs=0.01)
    assert min(heights[100:]) >= 0.1
    assert heights[100] == pytest.approx(1.0)


@pytest.mark.parametrize("sched", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 2), (3, 1)])
def test_the_shortest_runs_have_a_learning_rate_too(sched, steps, warmup):
    assert all(0 < height <= 1 for height in schedule(steps, warmup, sched=sched))


def test_muon_equals_torch_muon():
    """torch computes in bf16, one matrix at a time: the updates agree within its precision."""
    shapes = [(8, 24), (24, 8), (8, 8), (8, 24), (8, 8)]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in weights]
    mine = Muon([{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}], lr=0.1)
    reference = torch.optim.Muon(
        [{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:], "weight_decay": 0.0}],
        lr=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(3):
        for p, q in zip(weights, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mine.step()
        reference.step()
    for p, q in zip(weights, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.01)
    reference.load_state_dict(mine.state_dict())  # the state is the same, so that older checkpoints load


def test_orthogonalised_matrices_keep_their_singular_vectors():
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in [(6, 10), (10, 6)]]
    for matrix, result in zip(matrices, orthogonalise(matrices), strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        inner = left.T @ result @ right.T
        torch.testing.assert_close(inner, inner.diagonal().diag(), atol=1e-4, rtol=0)
        assert inner.diagonal().min() > 0.5
        assert inner.diagonal().max() < 1.3


def test_muon_skips_weights_without_gradient():
    one, other = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([{"params": [one]}, {"params": [other]}], lr=0.1)
    other.grad = torch.ones(2, 3)
    optimizer.step()
    assert torch.equal(one, torch.ones(2, 3))
    assert not torch.equal(other, torch.ones(2, 3))
