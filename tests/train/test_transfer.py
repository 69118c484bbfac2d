"""What of trained weights learns, and what must not change."""

from __future__ import annotations

from dataclasses import replace

import peers
import pytest
import torch
from families import BACKBONES

from vitrail import models
from vitrail.config import OptimConfig, TransferConfig
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.ema import Ema
from vitrail.models.lora import adapters, merged
from vitrail.models.vit import ViTConfig
from vitrail.train.optim import build_optimizers
from vitrail.train.recompute import recompute_activations
from vitrail.train.transfer import set_learning, set_mode

WIDTH, DEPTH = 16, 3
SMALL = ViTConfig(
    width=WIDTH, depth=DEPTH, heads=2, mlp=32, patch=4, img_size=(8, 8), channels=1, classes=10, drop=0.2, drop_path=0.3
)
OPTIM = OptimConfig(epochs=1, batch_size=8, opt="adamw", lr=0.01, weight_decay=0.05, sched="cosine", warmup_epochs=0.0)
HEAD = {"head.weight", "head.bias"}
FIRST = {"patch_embed.proj.weight", "patch_embed.proj.bias", "cls_token", "pos_embed"}


def block(number):
    return {f"blocks.{number}.{name}" for name, _ in build(SMALL).blocks[number].named_parameters()}


def names(model):
    """The parameters that learn."""
    return {name for name, p in model.named_parameters() if p.requires_grad}


def learning(**transfer):
    torch.manual_seed(0)
    model = peers.randomise(build(SMALL))
    set_learning(model, TransferConfig(**transfer))
    return model


def images(count=4):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def logits(model):
    """Without gradients, which may choose another kernel."""
    with torch.no_grad():
        return model.eval()(images())


def fit(model, opt="adamw", steps=3):
    """A few steps towards labels that mean nothing, as the loop takes them."""
    optimizers = build_optimizers(model, replace(OPTIM, opt=opt), pretrained=True)
    for step in range(steps):
        set_mode(model)
        torch.manual_seed(step)
        model(images()).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return optimizers


# Freezing


@pytest.mark.parametrize(
    ("freeze", "frozen"),
    [
        (None, set()),
        (0, FIRST),
        (2, FIRST | block(0) | block(1)),
        (DEPTH, FIRST | block(0) | block(1) | block(2)),
        ("all", FIRST | block(0) | block(1) | block(2) | {"norm.weight", "norm.bias"}),
    ],
    ids=["nothing", "0", "2", "depth", "all"],
)
def test_what_is_frozen_is_what_was_asked_for(freeze, frozen):
    assert names(learning(freeze=freeze)) == {name for name, _ in build(SMALL).named_parameters()} - frozen


@pytest.mark.parametrize("opt", ["adamw", "sgd", "muon", "lamb"])
@pytest.mark.parametrize(
    "transfer", [{"freeze": 2}, {"freeze": "all"}, {"lora_rank": 2, "lora_alpha": 2.0}], ids=["2", "all", "lora"]
)
def test_what_is_frozen_has_no_gradient_no_state_and_the_same_bits(opt, transfer):
    model = learning(**transfer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learns = names(model)
    optimizers = fit(model, opt)
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if p in held} == learns
    assert all(p in held for optimizer in optimizers for p in optimizer.state)
    set_mode(model)
    model(images()).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == learns
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == learns


def test_frozen_stages_compute_as_they_do_when_evaluated():
    model = learning(freeze=2)
    set_mode(model)
    with torch.no_grad():
        tokens = model.blocks[1](model.blocks[0](model.tokens(images())))
        expected = model.eval().blocks[1](model.blocks[0](model.tokens(images())))
        assert torch.equal(tokens, expected)
        set_mode(model)
        after = [model.blocks[2](tokens) for _ in range(2)]
    assert not torch.equal(*after)  # dropout, where it learns


def test_everything_is_in_training_mode_where_all_learns():
    model = learning().eval()
    set_mode(model)
    assert all(module.training for module in model.modules())


def test_nothing_is_kept_for_the_backward_pass_of_what_is_frozen():
    model = learning(freeze="all")
    set_mode(model)
    assert not model.embed(images()).requires_grad
    assert learning(freeze=DEPTH).embed(images()).requires_grad  # the last norm learns


# LoRA


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, pos="relative", pool="gap"), replace(SMALL, pool="map", layer_scale=0.5, head="tanh")],
    ids=["plain", "relative", "map"],
)
def test_fresh_adapters_change_nothing_and_merging_keeps_what_was_learnt(config):
    torch.manual_seed(0)
    plain = peers.randomise(build(config))
    before = logits(plain)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    set_learning(plain, TransferConfig(lora_rank=3, lora_alpha=6.0))
    assert torch.equal(logits(plain), before)
    fit(plain)
    learnt = logits(plain)
    assert not torch.allclose(learnt, before, atol=1e-3)
    one = merged(plain)
    torch.testing.assert_close(logits(one), learnt, rtol=1e-5, atol=1e-5)
    assert one.state_dict().keys() == state.keys()
    changed = {name for name, value in one.state_dict().items() if not torch.equal(value, state[name])}
    attention = {f"blocks.{i}.attn.{layer}.weight" for i in range(DEPTH) for layer in ("qkv", "proj")}
    assert changed == attention | {name for name in state if name.startswith(("head.", "pre_logits."))}


def test_the_number_of_parameters_that_learn_is_exact():
    model = learning(lora_rank=3, lora_alpha=3.0)
    pairs = 3 * WIDTH * (2 * 4)  # q, k, v and the projection, each down and up
    assert sum(p.numel() for p in adapters(model)) == DEPTH * pairs
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == DEPTH * pairs + 10 * WIDTH + 10


def test_adapters_learn_as_fast_as_the_head_and_are_not_decayed():
    model = learning(lora_rank=2, lora_alpha=2.0)
    [optimizer] = build_optimizers(model, replace(OPTIM, opt="muon", body_lr=0.1, layer_decay=0.5), pretrained=True)
    added = set(adapters(model))
    assert {group["scale"] for group in optimizer.param_groups} == {1.0}
    assert {group["weight_decay"] for group in optimizer.param_groups for p in group["params"] if p in added} == {0.0}


def test_frozen_blocks_get_no_adapters():
    model = learning(freeze=2, lora_rank=2, lora_alpha=2.0)
    added = {f"blocks.2.attn.{layer}.{matrix}" for layer in ("qkv", "proj") for matrix in ("down", "up")}
    assert names(model) == HEAD | added


def test_the_average_of_adapters_can_be_merged():
    model = learning(lora_rank=2, lora_alpha=2.0)
    ema = Ema(model, 0.5)
    fit(model)
    ema.update(model, step=100)
    torch.testing.assert_close(logits(merged(ema.model)), logits(ema.model), rtol=1e-5, atol=1e-5)


def test_recomputed_activations_give_the_same_gradients():
    kept, again = (learning(freeze=1, lora_rank=2, lora_alpha=2.0) for _ in range(2))
    recompute_activations(again)
    for model in (kept, again):
        set_mode(model)
        torch.manual_seed(3)
        model(images()).square().sum().backward()
    assert [p.grad is None for p in kept.parameters()] == [p.grad is None for p in again.parameters()]
    for ours, theirs in zip(kept.parameters(), again.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


# Other families


@pytest.mark.parametrize("family", BACKBONES)
def test_stages_are_frozen_in_every_family(family):
    model = models.build(models.configure("vit_nano8" if family == "vit" else f"{family}_nano", classes=3))
    set_learning(model, TransferConfig(freeze=2))
    learn = [any(p.requires_grad for p in stage.parameters()) for stage in model.stages()]
    assert learn == [False] * 3 + [True] * (len(learn) - 3)
    set_learning(model, TransferConfig(freeze="all"))
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learning
    assert all(name.startswith("head.") for name in learning)
    with pytest.raises(UserError, match=f"at most the model's {len(learn) - 3} blocks, but it is 99"):
        set_learning(model, TransferConfig(freeze=99))


@pytest.mark.parametrize("family", BACKBONES)
def test_adapters_are_for_the_attention_of_vits(family):
    model = models.build(models.configure("vit_nano8" if family == "vit" else f"{family}_nano", classes=3))
    if family in ("vit", "hybrid"):
        set_learning(model, TransferConfig(lora_rank=2, lora_alpha=4.0))
        assert adapters(model)
    else:
        with pytest.raises(UserError, match=f"needs the attention of a ViT, but the model is a {family}_nano"):
            set_learning(model, TransferConfig(lora_rank=2, lora_alpha=4.0))
