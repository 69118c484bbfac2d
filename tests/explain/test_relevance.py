from __future__ import annotations

import copy
import threading
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from families import ATTENTIVE, batch
from peers import distance, randomise
from torch import Tensor
from watcher import watcher

from vitrail.errors import UserError
from vitrail.explain.attention import rollout
from vitrail.explain.relevance import relevance
from vitrail.models import Model, build, resize
from vitrail.models.dense import DenseConfig
from vitrail.models.layers import Attention, AttentionPool
from vitrail.models.vit import ViT, ViTConfig

module = import_module("vitrail.explain.relevance")  # the package has the function under this name

KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "two tokens": {"pool": "cls_dist"},
    "class token and average": {"pool": "cls_gap"},
    "average": {"pool": "gap"},
    "average before the norm, registers": {"pool": "gap_norm", "registers": 2},
    "attention pooling": {"pool": "map", "registers": 1},
    "relative positions": {"pos": "relative", "registers": 3},
    "layer scale, tanh head": {"layer_scale": 0.3, "head": "tanh", "drop": 0.5, "drop_path": 0.5},
    "conv stem": {"stem": "conv", "pos": "sincos2d", "pool": "gap"},
    "rectangular": {"img_size": (8, 20)},
}


def tiny(**changes: Any) -> ViT:
    settings = {"img_size": (12, 12), **changes}
    torch.manual_seed(0)
    return randomise(build(ViTConfig(16, 3, 2, 24, 4, channels=1, classes=5, **settings)))


def pictures(model: ViT, count: int = 3) -> Tensor:
    return torch.randn(count, 1, *model.config.img_size, generator=torch.Generator().manual_seed(1))


def traced(model: Model) -> tuple[Model, list[Tensor]]:
    """A copy of a model that notes every attention map, as part of the graph."""
    model = copy.deepcopy(model)
    maps: list[Tensor] = []

    def attend(weights: Tensor, values: Tensor) -> Tensor:
        weights.retain_grad()
        maps.append(weights)
        return (weights @ values).transpose(1, 2).flatten(2)

    def attention(self: Attention, x: Tensor, _: None = None, first: int | None = None) -> Tensor:
        _, _, v = self._split(x)
        return self.proj(attend(self.weights(x), v))[:, :first]

    def pool(self: AttentionPool, x: Tensor) -> Tensor:
        q = self.q(self.latent).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.kv(x).chunk(2, dim=2))
        x = self.proj(attend(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1), v))
        return (x + self.mlp(self.norm(x)))[:, 0]

    for part in model.modules():
        if isinstance(part, Attention):
            part.forward = attention.__get__(part)
        elif isinstance(part, AttentionPool):
            part.forward = pool.__get__(part)
    return model, maps


def propagated(maps: list[Tensor], image: int) -> Tensor:
    """R of an image as a whole matrix, made from the first block on."""
    r = torch.eye(maps[0].shape[-1])
    for weights in maps:
        r = r + (weights.grad[image] * weights[image]).clamp(min=0).mean(dim=0) @ r
    return r


def slow(model: ViT, images: Tensor, classes: list[int], instead: list[int] | None = None) -> Tensor:
    """The same by the book."""
    model, maps = traced(model)
    logits = model(images)
    score = sum(row[k] for row, k in zip(logits, classes, strict=True))
    if instead is not None:
        score = score - sum(row[k] for row, k in zip(logits, instead, strict=True))
    score.backward()

    prefix, answers = model.config.prefix, []
    for i in range(len(images)):
        r = propagated(maps[: model.config.depth], i)
        if model.config.pool == "cls":
            answers.append(r[0, prefix:])
        elif model.config.pool == "cls_dist":
            answers.append((r[0, prefix:] + r[1, prefix:]) / 2)
        elif model.config.pool == "cls_gap":
            answers.append((r[0, prefix:] + r[prefix:, prefix:].mean(dim=0)) / 2)
        elif model.config.pool == "map":
            answers.append((maps[-1].grad[i] * maps[-1][i]).clamp(min=0).mean(dim=0)[0] @ r[prefix:, prefix:])
        else:
            answers.append(r[prefix:, prefix:].mean(dim=0))
    return torch.stack(answers).detach().reshape(-1, *model.config.grid)


@pytest.mark.parametrize("kind", KINDS)
def test_is_what_the_slow_direct_computation_gives(kind):
    model = tiny(**KINDS[kind])
    images, classes = pictures(model), [0, 3, 4]
    maps = relevance(model, images, classes)
    assert maps.shape == (3, *model.config.grid)
    assert maps.dtype == np.float32
    assert distance(torch.from_numpy(maps), slow(model, images, classes)) < 1e-5


@pytest.mark.parametrize("head", ["yolos", "yolos-mid"])
def test_the_token_of_the_strongest_box_is_followed_back(head):
    body = ViTConfig(16, 2, 2, 24, 4, channels=1, classes=0, img_size=(12, 16))
    model = randomise(build(DenseConfig.of(body, (head,), 3)))
    images, classes = pictures(model), [0, 2, 1]
    book, maps = traced(model)
    chances = book(images)[..., 4:].log_softmax(dim=-1)[torch.arange(3), :, classes]
    best, tokens = chances.max(dim=1)
    best.sum().backward()
    rows = [propagated(maps, i)[body.length + tokens[i], 1 : body.length] for i in range(3)]
    expected = torch.stack(rows).detach().reshape(3, 3, 4)
    assert distance(torch.from_numpy(relevance(model, images, classes)), expected) < 1e-5


def test_explains_one_class_rather_than_another():
    model = tiny()
    images = pictures(model)
    maps = relevance(model, images, [0, 3, 4], instead=1)
    assert distance(torch.from_numpy(maps), slow(model, images, [0, 3, 4], [1, 1, 1])) < 1e-5
    assert not np.allclose(maps, relevance(model, images, [0, 3, 4]))


def test_finds_the_patch_of_each_class_where_attention_alone_is_the_same_for_both():
    model = watcher(5, 10)
    images = torch.ones(2, 1, 16, 16)
    maps = relevance(model, images, [0, 1])
    assert [row.argmax() for row in maps.reshape(2, -1)] == [5, 10]
    for row, patch in zip(maps.reshape(2, -1), (5, 10), strict=True):
        assert row[patch] > 0.99 * row.sum()
    attention = model.blocks[0].attn.weights(model.blocks[0].norm1(model.tokens(images))).mean(dim=1)[0, 0, 1:]
    assert torch.equal(attention.topk(2).indices.sort().values, torch.tensor([5, 10]))


def test_slices_make_no_difference(monkeypatch):
    model = tiny(pool="gap")
    images = pictures(model, 5)
    whole = relevance(model, images, [0, 1, 2, 3, 4])
    monkeypatch.setattr(module, "_ROOM", 2 * module._cost(model))
    calls = []
    hook = model.patch_embed.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    np.testing.assert_allclose(relevance(model, images, [0, 1, 2, 3, 4]), whole, rtol=1e-5)
    hook.remove()
    assert calls == [2, 2, 1]


def test_one_block_has_maps_in_memory_at_a_time(monkeypatch):
    """Each map is freed before the next is made."""
    import weakref

    model, alive, most = tiny(), [], []
    weights = Attention.weights

    def counted(self: Attention, x: Tensor) -> Tensor:
        made = weights(self, x)
        alive.append(weakref.ref(made))
        most.append(sum(reference() is not None for reference in alive))
        return made

    monkeypatch.setattr(Attention, "weights", counted)
    relevance(model, pictures(model), 0)
    assert len(most) == 3
    assert max(most) == 1


def test_leaves_the_model_as_it_was():
    model = tiny(pool="map", drop=0.5).train()
    relevance(model, pictures(model), 0)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    with pytest.raises(UserError, match="expects batches of shape"):
        relevance(model, torch.zeros(1, 1, 4, 4), 0)
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_other_threads_may_use_the_model_meanwhile():
    model = tiny()
    images = pictures(model)
    with torch.inference_mode():
        logits = model(images)
    expected, answers = relevance(model, images, 0), []

    def meanwhile(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            with torch.inference_mode():
                other = threading.Thread(target=lambda: answers.append(model(2 * images)))
                other.start()
                other.join()

    hook = model.blocks[1].mlp.register_forward_hook(meanwhile)
    np.testing.assert_array_equal(relevance(model, images, 0), expected)
    hook.remove()
    assert len(answers) == 2
    assert not torch.equal(answers[0], logits)


def test_works_within_inference_mode_on_another_size_and_on_a_compiled_model():
    model = resize(tiny(), (16, 8))
    expected = relevance(model, pictures(model), 2)
    assert expected.shape == (3, 4, 2)
    with torch.inference_mode():
        np.testing.assert_array_equal(relevance(model, pictures(model), 2), expected)
    compiled = torch.compile(model, backend="eager")
    compiled(pictures(model))
    np.testing.assert_array_equal(relevance(compiled, pictures(model), 2), expected)
    model.compile(backend="eager")
    model(pictures(model))
    np.testing.assert_array_equal(relevance(model, pictures(model), 2), expected)


@pytest.mark.parametrize(
    ("classes", "message"), [(5, "from 0 to 4"), (-1, "from 0 to 4"), ([1, 2], "each of 3 images")]
)
def test_refuses_classes_that_do_not_exist(classes, message):
    model = tiny()
    with pytest.raises(UserError, match=message):
        relevance(model, pictures(model), classes)


def test_relevance_of_a_hybrid_is_that_of_its_vit():
    """A ViT that is given the tokens of the hybrid's ResNet explains the class alike."""
    torch.manual_seed(0)
    hybrid = randomise(build(ATTENTIVE["hybrid"]))
    c = hybrid.config
    vit = build(ViTConfig(c.width, c.depth, c.heads, c.mlp, 4, c.img_size, c.channels, c.classes))
    assert isinstance(vit, ViT)
    state = {name: value for name, value in hybrid.state_dict().items() if not name.startswith("patch_embed")}
    vit.load_state_dict(state, strict=False)
    vit.eval()
    vit.patch_embed = hybrid.patch_embed
    images = batch(hybrid)
    for instead in (None, 2):
        ours, theirs = (relevance(each, images, [0, 1], instead) for each in (hybrid, vit))
        assert ours.shape == (2, 4, 6)
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
    np.testing.assert_allclose(rollout(hybrid, images), rollout(vit, images), atol=1e-7)


def test_relevance_keeps_no_graph_of_the_resnet():
    hybrid = build(ATTENTIVE["hybrid"])
    graphs = []
    with hybrid.patch_embed.register_forward_hook(lambda _, __, output: graphs.append(output.requires_grad)):
        relevance(hybrid, batch(hybrid), 0)
    assert graphs == [False]
