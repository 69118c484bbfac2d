"""What models attend to, against computations that are slow and direct."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from peers import randomise
from torch.multiprocessing.reductions import StorageWeakRef

from vitrail.errors import UserError
from vitrail.explain import attention_distance, attention_maps, patch_attention, rollout, watch
from vitrail.explain.attention import parts
from vitrail.models import Model, build, create, resize
from vitrail.models.layers import Attention, AttentionPool
from vitrail.models.vit import ViTConfig

BASE = {"width": 16, "depth": 3, "heads": 2, "mlp": 32, "patch": 4, "channels": 1, "classes": 5}
KINDS = {
    "class token": {},
    "registers": {"registers": 3},
    "two tokens": {"pool": "cls_dist", "registers": 1},
    "class token and average": {"pool": "cls_gap"},
    "average": {"pool": "gap"},
    "average beside a class token": {"pool": "mae"},
    "average, registers": {"pool": "gap", "registers": 2},
    "average before the norm": {"pool": "gap_norm"},
    "attention pool": {"pool": "map"},
    "attention pool, registers": {"pool": "map", "registers": 1},
    "relative": {"pos": "relative"},
    "relative, average": {"pos": "relative", "pool": "gap", "registers": 1},
    "conv stem": {"stem": "conv", "pos": "sincos2d"},
}


def make(img_size: tuple[int, int] = (8, 12), **changes: object) -> Model:
    return randomise(build(ViTConfig(**(BASE | {"img_size": img_size} | changes))))


def batch(model: Model, count: int = 2) -> torch.Tensor:
    shape = (count, model.config.channels, *model.config.img_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def seen(model: Model, images: torch.Tensor) -> list[np.ndarray]:
    """All maps of all layers, by running the blocks one after the other."""
    maps = []
    with torch.no_grad():
        x = model.tokens(images)
        for block in model.blocks:
            maps.append(block.attn.weights(block.norm1(x)).double().numpy())
            x = block(x)
    return maps


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Model:
    return make(**KINDS[request.param])


def test_every_layer_is_shown_and_its_rows_sum_to_one(model):
    images = batch(model)
    maps: dict[int, torch.Tensor] = {}
    logits = watch(model, images, lambda layer, weights: maps.update({layer: weights}))
    assert list(maps) == [0, 1, 2]
    for layer, expected in enumerate(seen(model, images)):
        np.testing.assert_allclose(maps[layer], expected, atol=1e-6)
        np.testing.assert_allclose(maps[layer].sum(-1), 1, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(images))


def test_weights_times_values_are_what_attention_computes(model):
    x = torch.randn(2, model.config.length, model.config.width, generator=torch.Generator().manual_seed(2))
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        with torch.no_grad():
            value = attention.qkv(x).chunk(3, dim=-1)[2].unflatten(2, (2, -1)).transpose(1, 2)  # B H N D/H
            mixed = (attention.weights(x) @ value).transpose(1, 2).flatten(2)
            torch.testing.assert_close(attention.proj(mixed), attention(x))


def test_weights_of_the_pool_times_values_are_what_it_computes():
    model = make(pool="map")
    pool = model.attn_pool
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        value = pool.kv(x).chunk(2, dim=-1)[1].unflatten(2, (2, -1)).transpose(1, 2)
        mixed = pool.proj((pool.weights(x) @ value).transpose(1, 2).flatten(2))
        expected = (mixed + pool.mlp(pool.norm(mixed)))[:, 0]
        torch.testing.assert_close(expected, pool(x))


def slow_rollout(model: Model, images: torch.Tensor) -> np.ndarray:
    prefix, (h, w) = model.config.prefix, model.config.grid
    n = prefix + h * w
    result = np.zeros((len(images), h, w))
    layers = seen(model, images)
    for b in range(len(images)):
        flow = np.eye(n)
        for weights in layers:
            step = np.zeros((n, n))
            for i in range(n):
                for j in range(n):
                    step[i, j] = sum(weights[b, head, i, j] for head in range(2)) / 2 + (i == j)
                step[i] /= step[i].sum()
            flow = np.array([[sum(step[i, k] * flow[k, j] for k in range(n)) for j in range(n)] for i in range(n)])
        if model.config.pool == "cls":
            start = np.eye(n)[0]
        elif model.config.pool == "cls_dist":
            start = (np.eye(n)[0] + np.eye(n)[1]) / 2
        elif model.config.pool == "cls_gap":
            start = np.array([1 / 2, *[1 / (2 * h * w)] * (h * w)])
        elif model.config.pool == "map":
            with torch.no_grad():
                patches = model.encode(model.tokens(images))[:, prefix:]
                weights = model.attn_pool.weights(patches)[b, :, 0].mean(0)
            start = np.concatenate([np.zeros(prefix), weights.numpy()])
        else:
            start = np.concatenate([np.zeros(prefix), np.full(h * w, 1 / (h * w))])
        for y in range(h):
            for x in range(w):
                result[b, y, x] = sum(start[i] * flow[i, prefix + y * w + x] for i in range(n))
        result[b] /= result[b].sum()
    return result


def test_rollout_is_the_slow_one(model):
    images = batch(model)
    maps = rollout(model, images)
    assert maps.dtype == np.float32
    assert maps.shape == (2, 2, 3)
    np.testing.assert_allclose(maps, slow_rollout(model, images), atol=1e-6)
    np.testing.assert_allclose(maps.sum(axis=(1, 2)), 1, atol=1e-6)


def slow_distance(model: Model, images: torch.Tensor) -> np.ndarray:
    prefix, (h, w), patch = model.config.prefix, model.config.grid, model.config.patch
    centres = [((y + 0.5) * patch, (x + 0.5) * patch) for y in range(h) for x in range(w)]
    result = np.zeros((3, 2))
    for layer, weights in enumerate(seen(model, images)):
        for head in range(2):
            distances = []
            for b in range(len(images)):
                for q, (y, x) in enumerate(centres):
                    row = weights[b, head, prefix + q, prefix:]
                    far = [math.hypot(y - other[0], x - other[1]) for other in centres]
                    distances.append(sum(row * far) / sum(row))
            result[layer, head] = sum(distances) / len(distances)
    return result


def test_distance_is_the_slow_one_however_images_are_batched(model):
    images = batch(model, 5)
    far = attention_distance(model, [images[:2], images[2:]])
    assert far.shape == (3, 2)
    np.testing.assert_allclose(far, slow_distance(model, images), rtol=1e-5)


def test_distance_of_heads_that_look_evenly_is_the_mean_distance():
    model = make()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
        torch.nn.init.zeros_(block.attn.qkv.bias)
    # 2 by 3 patches of 4 pixels: 14 of the 36 pairs are 4 apart, 4 are 8, 8 are √32, 4 are √80.
    expected = (14 * 4 + 4 * 8 + 8 * math.sqrt(32) + 4 * math.sqrt(80)) / 36
    np.testing.assert_allclose(attention_distance(model, [batch(model)]), expected, rtol=1e-5)


def test_maps_are_the_rows_of_the_weights(model):
    images = batch(model)
    prefix = model.config.prefix
    maps, patch = attention_maps(model, images), patch_attention(model, images, 1, 2)
    assert {of_layer.shape for of_layer in [*maps, *patch]} == {(2, 2, 2, 3)}
    assert len(maps) == len(patch) == 3
    for layer, weights in enumerate(seen(model, images)):
        patches = weights[:, :, prefix:].mean(axis=2)
        rows = {
            "cls": weights[:, :, 0],
            "cls_dist": (weights[:, :, 0] + weights[:, :, 1]) / 2,
            "cls_gap": (weights[:, :, 0] + patches) / 2,
        }.get(model.config.pool, patches)
        np.testing.assert_allclose(maps[layer].reshape(2, 2, 6), rows[..., prefix:], atol=1e-6)
        np.testing.assert_allclose(patch[layer].reshape(2, 2, 6), weights[:, :, prefix + 5, prefix:], atol=1e-6)


@pytest.mark.parametrize("place", [(2, 0), (0, 3), (-1, 0)])
def test_a_patch_outside_the_grid_raises(place):
    model = make()
    with pytest.raises(UserError, match=r"2 rows and 3 columns of patches, .* The last one is 1,2"):
        patch_attention(model, batch(model), *place)


def test_a_resized_model_is_explained_at_its_new_size():
    model = resize(make(pos="relative"), (16, 8))
    images = batch(model)
    np.testing.assert_allclose(rollout(model, images), slow_rollout(model, images), atol=1e-6)
    np.testing.assert_allclose(attention_distance(model, [images]), slow_distance(model, images), rtol=1e-5)


def test_a_batch_is_cut_where_its_maps_are_large_and_nothing_changes(monkeypatch):
    model = make()
    images = batch(model, 5)
    whole = rollout(model, images), attention_maps(model, images)
    monkeypatch.setattr("vitrail.explain.attention._MOST", 2 * 2 * 7 * 7 * 4)
    assert [len(part) for part in parts(model, images)] == [2, 2, 1]
    np.testing.assert_allclose(rollout(model, images), whole[0], atol=1e-7)
    np.testing.assert_allclose(attention_maps(model, images), whole[1], atol=1e-7)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_model_is_explained_alike_before_and_after_it_ran(how):
    model = make(pool="map")
    images = batch(model)
    expected = rollout(model, images)
    if how == "in place":
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        np.testing.assert_allclose(rollout(compiled, images), expected, atol=1e-6)
        with torch.inference_mode():
            compiled(images)


def test_autocast_changes_maps_by_rounding_alone():
    model = make()
    images = batch(model)
    exact = rollout(model, images), attention_distance(model, [images])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = rollout(model, images), attention_distance(model, [images])
    assert not np.array_equal(rounded[0], exact[0])
    np.testing.assert_allclose(rounded[0], exact[0], rtol=0.03)
    np.testing.assert_allclose(rounded[1], exact[1], rtol=0.03)
    np.testing.assert_allclose(rounded[0].sum(axis=(1, 2)), 1, atol=1e-5)


def test_the_model_is_left_as_it_was_even_if_looking_fails():
    model = make(pool="map", drop=0.5).train()
    with pytest.raises(ZeroDivisionError):
        watch(model, batch(model), lambda *_: 1 / 0)
    assert model.training
    hooked = [m for m in model.modules() if isinstance(m, Attention | AttentionPool) and m._forward_pre_hooks]
    assert not hooked
    np.testing.assert_array_equal(rollout(model, batch(model)), rollout(model.eval(), batch(model)))


@pytest.mark.parametrize(
    "look",
    [rollout, attention_maps, lambda model, images: patch_attention(model, images, 0, 1)],
    ids=["rollout", "maps", "patch"],
)
@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_no_layer_is_kept_while_the_next_is_computed(look, pool, monkeypatch):
    shown: list[StorageWeakRef] = []
    original = Attention.weights

    def weights(self: Attention, x: torch.Tensor, _: None = None) -> torch.Tensor:
        assert all(earlier.expired() for earlier in shown)
        result = original(self, x)
        shown.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(Attention, "weights", weights)
    model = make(pool=pool)
    look(model, batch(model))
    assert len(shown) == 3


def test_what_other_threads_compute_meanwhile_is_not_shown():
    model = make(pool="map")
    images, others = batch(model), torch.zeros(4, *batch(model).shape[1:])
    shown: list[int] = []

    def see(_: int, weights: torch.Tensor) -> None:
        shown.append(len(weights))
        thread = threading.Thread(target=model, args=(others,))
        thread.start()
        thread.join()

    watch(model, images, see)
    assert shown == [2, 2, 2]


def test_a_model_without_attention_raises():
    model = create("vit_nano4", classes=2, img_size=8)
    model.blocks = torch.nn.ModuleList()
    with pytest.raises(UserError, match="no attention"):
        rollout(model, torch.zeros(1, 3, 8, 8))
