"""What the families beside the ViT attend to, against what their layers compute and against slow, direct indexing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peers import randomise
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.explain import (
    attention_distance,
    attention_maps,
    patch_attention,
    relevance,
    rollout,
    watch,
)
from vitrail.explain.attention import even_distance, parts
from vitrail.explain.figures import attention as attention_figures
from vitrail.explain.figures import windows as windows_figure
from vitrail.explain.figures.tiles import spacing
from vitrail.explain.geometry import Tokens, attentions, geometries
from vitrail.explain.windows import Windows
from vitrail.models import Model, ModelConfig, build, create
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.pvt import PVTConfig, ReducedAttention
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.models.swin import SwinConfig
from vitrail.models.vit import ViT, ViTConfig
from vitrail.tasks import Multiclass
from vitrail.weights import Card, save

SMALL = {"channels": 1, "classes": 3}
PYRAMID = ((8, 12), (2, 2), (2, 3), (2, 2))
CONFIGS: dict[str, ModelConfig] = {
    "hybrid": HybridConfig(16, 2, 2, 32, (32,), (1,), first=8, groups=8, img_size=(16, 24), **SMALL),
    "swin": SwinConfig((8, 12), (2, 2), (2, 3), window=4, patch=2, img_size=(16, 24), **SMALL),
    "swin, padded": SwinConfig((8, 12), (2, 2), (2, 3), window=4, patch=2, img_size=(28, 22), **SMALL),
    "pvt": PVTConfig(*PYRAMID, (2, 1), patch=2, img_size=(16, 24), **SMALL),
    "pvt_v2": PVTv2Config(*PYRAMID, (3, 1), patch=2, img_size=(15, 22), **SMALL),
    "pvt_v2, linear": PVTv2Config(*PYRAMID, (1, 1), linear=True, patch=2, img_size=(18, 20), **SMALL),
    "coatnet": CoAtNetConfig((32, 32, 64), (1, 2, 1), 8, convs=1, shrink=False, img_size=(15, 22), **SMALL),
}


def batch(model: Model, count: int = 2) -> Tensor:
    shape = (count, model.config.channels, *model.config.img_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Model:
    torch.manual_seed(0)
    return randomise(build(CONFIGS[request.param]))


def whole(model: Model, images: Tensor) -> list[np.ndarray]:
    """The attention of every token to every token of its stage, (B, H, N, N), N with the class token.

    One token at a time is followed, so that what `follow` makes of several is tested too.
    """
    layers, found = geometries(model), []

    def see(number: int, weights: Tensor) -> None:
        eye = torch.eye(len(layers[number].start))
        rows = [layers[number].follow(row[None], weights) for row in eye]
        found.append(torch.stack(rows, dim=2).double().numpy())

    watch(model, images, see)
    return found


@pytest.mark.parametrize(("linear", "reduction"), [(False, 2), (False, 3), (True, 1), (False, 1)])
@pytest.mark.parametrize("grid", [(8, 12), (7, 10), (15, 9)])
def test_keys_are_made_of_the_patches_of_their_areas(linear, reduction, grid):
    """A change of one token changes the keys before their norm as the areas say."""
    layer = randomise(ReducedAttention(4, 2, reduction, 0.0, linear))
    model = build(
        PVTv2Config((4,), (1,), (2,), (1,), (reduction,), linear, patch=1, img_size=grid, channels=1, classes=2)
    )
    geometry = geometries(model)[0]
    assert isinstance(geometry, Tokens)
    if reduction == 1 and not linear:
        assert geometry.areas is None
        return
    if not linear:
        assert geometry.areas.shape[0] == (grid[0] // reduction) * (grid[1] // reduction)
        torch.nn.init.constant_(layer.sr.weight, 1 / reduction**2 / 4)  # an average of all channels
    picture = torch.randn(4, *grid)
    averaged = picture if linear else picture.mean(dim=0, keepdim=True).expand(4, -1, -1)
    expected = averaged.flatten(1) @ geometry.areas.T
    if linear:
        actual = torch.nn.functional.adaptive_avg_pool2d(picture, 7).flatten(1)
    else:
        actual = torch.nn.functional.conv2d(picture[None], layer.sr.weight, stride=reduction)[0].flatten(1)
    torch.testing.assert_close(actual, expected)


def test_a_pvt_that_reduces_nothing_attends_as_a_vit_does():
    torch.manual_seed(0)
    pvt = randomise(build(PVTConfig((16,), (2,), (2,), (2,), (1,), patch=4, img_size=(8, 12), channels=1, classes=5)))
    vit = build(ViTConfig(16, 2, 2, 32, 4, (8, 12), 1, 5))
    vit.patch_embed, vit.norm, vit.head = pvt.patch_embed1, pvt.norm, pvt.head
    vit.cls_token, vit.pos_embed = pvt.cls_token, pvt.pos_embed1
    state = pvt.block1.state_dict()
    for name in [name for name in state if ".attn.kv." in name]:
        query = name.replace("kv", "q")
        state[name.replace("kv", "qkv")] = torch.cat([state.pop(query), state.pop(name)])
    vit.blocks.load_state_dict(state)
    vit.eval()
    images = batch(pvt)
    torch.testing.assert_close(pvt(images), vit(images))
    np.testing.assert_allclose(rollout(pvt, images), rollout(vit, images), atol=1e-6)
    np.testing.assert_allclose(attention_maps(pvt, images), attention_maps(vit, images), atol=1e-6)
    np.testing.assert_allclose(patch_attention(pvt, images, 1, 2), patch_attention(vit, images, 1, 2), atol=1e-6)
    np.testing.assert_allclose(attention_distance(pvt, [images]), attention_distance(vit, [images]), rtol=1e-5)
    np.testing.assert_allclose(even_distance(pvt), even_distance(vit))


def test_every_layer_is_shown_with_its_grid(model):
    images = batch(model)
    maps = attention_maps(model, images)
    assert [of_layer.shape[2:] for of_layer in maps] == [geometry.grid for geometry in geometries(model)]
    assert [of_layer.shape[1] for of_layer in maps] == [layer.module.heads for layer in attentions(model)]
    stages = model.config.grids if not isinstance(model.config, HybridConfig) else [model.config.grid]
    assert maps[-1].shape[2:] == stages[-1]
    with torch.no_grad():
        shown = watch(model, images, lambda *_: None)
        torch.testing.assert_close(shown, model(images))


def test_maps_are_rows_of_the_weights_and_lose_only_what_is_no_patch(model):
    images = batch(model)
    row, column = (n - 1 for n in geometries(model)[0].grid)
    places = patch_attention(model, images, row, column)
    for geometry, maps, place, full in zip(
        geometries(model), attention_maps(model, images), places, whole(model, images), strict=True
    ):
        h, w = geometry.grid
        prefix = full.shape[-1] - h * w
        expected = full[:, :, 0, 1:] if prefix else full.mean(axis=2)
        np.testing.assert_allclose(maps.reshape(*maps.shape[:2], -1), expected, atol=1e-6)
        np.testing.assert_allclose(place.reshape(*maps.shape[:2], -1), full[:, :, -1, prefix:], atol=1e-6)  # the last
        total = maps.sum(axis=(2, 3))
        assert (total <= 1 + 1e-5).all()
        padded = isinstance(geometry, Windows) and any(side % geometry.window for side in geometry.grid)
        if not prefix and not padded:
            np.testing.assert_allclose(total, 1, atol=1e-5)


def slow_distance(model: Model, images: Tensor) -> list[list[float]]:
    result = []
    for geometry, full in zip(geometries(model), whole_keys(model, images), strict=True):
        weights, centres = full
        h, w = geometry.grid
        here = [(y * geometry.pixels, x * geometry.pixels) for y in range(h) for x in range(w)]
        far = np.array([[math.hypot(y - v, x - u) for v, u in centres] for y, x in here])
        each = (weights * far).sum(axis=-1) / weights.sum(axis=-1)
        result.append(each.mean(axis=(0, 2)).tolist())
    return result


def _centres(side: int, reduction: int, linear: bool) -> list[float]:
    """The middles of the areas of keys along a side, counted in tokens."""
    if not linear:
        return [i * reduction + (reduction - 1) / 2 for i in range(side // reduction)]
    return [(i * side // 7 + math.ceil((i + 1) * side / 7) - 1) / 2 for i in range(7)]


def whole_keys(model: Model, images: Tensor) -> list[tuple[np.ndarray, list[tuple[float, float]]]]:
    """Of every layer the attention of all patches to its keys, and where the centres of these are, in pixels."""
    layers, found = geometries(model), []

    def see(number: int, weights: Tensor) -> None:
        geometry = layers[number]
        (h, w), pixels = geometry.grid, geometry.pixels
        centres: list[tuple[float, float]] = [(y * pixels, x * pixels) for y in range(h) for x in range(w)]
        if isinstance(geometry, Windows):
            between = torch.stack([geometry.follow(row[None], weights) for row in torch.eye(h * w)], dim=2)
        elif geometry.areas is None:
            between = weights[:, :, -h * w :, -h * w :]
        else:
            between = weights
            layer = attentions(model)[number].module
            down, across = (_centres(side, layer.sr.stride[0], layer.linear) for side in (h, w))
            centres = [(y * pixels, x * pixels) for y in down for x in across]
        found.append((between.double().numpy(), centres))

    watch(model, images, see)
    return found


def test_distance_is_the_slow_one_however_images_are_batched(model):
    images = batch(model, 3)
    far = attention_distance(model, [images[:1], images[1:]])
    for row, expected in zip(far, slow_distance(model, images), strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=1e-5)
        assert np.isnan(row[len(expected) :]).all()


def slow_rollout(model: Model, images: Tensor) -> np.ndarray:
    """By products of whole matrices from the first layer to the last, merging 2 by 2 between stages."""
    layers, result = geometries(model), []
    full = whole(model, images)
    for b in range(len(images)):
        flow, grid = np.eye(len(layers[0].start)), layers[0].grid
        for geometry, weights in zip(layers, full, strict=True):
            h, w = geometry.grid
            prefix = weights.shape[-1] - h * w
            if grid != geometry.grid:
                merged = np.zeros((prefix + h * w, flow.shape[1]))  # the class token begins with nothing of the picture
                for y in range(h):
                    for x in range(w):
                        children = [
                            flow[v * grid[1] + u]
                            for v in range(2 * y, min(2 * y + 2, grid[0]))
                            for u in range(2 * x, min(2 * x + 2, grid[1]))
                        ]
                        merged[prefix + y * w + x] = np.mean(children, axis=0)
                flow, grid = merged, geometry.grid
            flow = (weights[b].mean(axis=0) + np.eye(weights.shape[-1])) / 2 @ flow
        start = np.full(len(flow), 1 / len(flow)) if not prefix else np.eye(len(flow))[0]
        h, w = layers[0].grid
        reached = (start @ flow)[-h * w :]
        result.append((reached / reached.sum()).reshape(h, w))
    return np.stack(result)


def test_rollout_is_the_slow_one(model):
    images = batch(model)
    maps = rollout(model, images)
    assert maps.dtype == np.float32
    np.testing.assert_allclose(maps.sum(axis=(1, 2)), 1, atol=1e-5)
    np.testing.assert_allclose(maps, slow_rollout(model, images), rtol=1e-4)


def test_no_layer_is_kept_while_the_next_is_computed(model, monkeypatch):
    shown: list[StorageWeakRef] = []
    kind = type(attentions(model)[0].module)
    original = kind.weights

    def weights(self: torch.nn.Module, *args: object) -> Tensor:
        assert all(earlier.expired() for earlier in shown)
        result = original(self, *args)
        shown.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(kind, "weights", weights)
    for look in (rollout, attention_maps):
        look(model, batch(model))
    assert len(shown) == 2 * len(attentions(model))


def test_a_batch_is_cut_where_its_maps_are_large_and_nothing_changes(model, monkeypatch):
    images = batch(model, 3)
    together = attention_maps(model, images)
    monkeypatch.setattr("vitrail.explain.attention._MOST", 4 * 2 * max(geometry.size for geometry in geometries(model)))
    assert [len(part) for part in parts(model, images)] == [2, 1]
    for one, other in zip(attention_maps(model, images), together, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_relevance_of_a_hybrid_is_that_of_its_vit():
    """A ViT that is given the tokens of the hybrid's ResNet explains the class alike."""
    torch.manual_seed(0)
    hybrid = randomise(build(CONFIGS["hybrid"]))
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
    hybrid = build(CONFIGS["hybrid"])
    graphs = []
    with hybrid.patch_embed.register_forward_hook(lambda _, __, output: graphs.append(output.requires_grad)):
        relevance(hybrid, batch(hybrid), 0)
    assert graphs == [False]


@pytest.mark.parametrize("name", ["bit_nano", "mixer_nano"])
def test_a_family_without_attention_is_told(name):
    model = create(name, classes=2, channels=1)
    with pytest.raises(UserError, match="no attention to show"):
        rollout(model, torch.zeros(1, 1, *model.config.img_size))


def test_coarser_maps_cover_the_patches_that_were_merged_in_them():
    maps = [np.arange(35, dtype=np.float32).reshape(1, 7, 5), np.arange(4, dtype=np.float32).reshape(2, 2, 1)]
    left, right = attention_figures.draw_heads(np.zeros((7, 5, 3), np.uint8), maps, "a", patch=(5, 4)).axes
    drawn = right.images[0].get_array()
    tall, wide, gap = spacing(7, 5)
    size = tall // 7
    second = drawn[tall + gap :, :wide][::size, ::size][:7, :5]  # the first head of the second layer
    assert (second[:4] == 0).all()
    assert (second[4:] == 1).all()
    assert np.isnan(drawn[:tall, wide + gap :].filled(np.nan)).all()  # the first layer has no second head
    assert [patch.get_bbox().bounds for patch in left.patches] == [(4, 5, 1, 1)]
    framed = [tuple(round(n / size) for n in (patch.get_width(), patch.get_height())) for patch in right.patches]
    assert framed == [(1, 1), (5, 3), (5, 3)]  # of 4 by 8 patches, those that there are
    assert [label.get_text() for label in right.get_yticklabels()] == ["7×5   1", "2×1   2"]


def test_of_many_layers_and_heads_some_are_drawn_and_it_is_said():
    maps = np.random.default_rng(0).random((30, 20, 2, 2), dtype=np.float32)
    right = attention_figures.draw_heads(np.zeros((4, 4, 3), np.uint8), list(maps), "a").axes[1]
    rows = [label.get_text() for label in right.get_yticklabels()]
    assert (len(rows), rows[0], rows[-1]) == (24, "1", "30")
    assert any("24 of 30 layers; 16 of up to 20 heads" in text.get_text() for text in right.texts)


@pytest.mark.parametrize("name", ["hybrid", "swin, padded", "pvt", "pvt_v2, linear", "coatnet"])
def test_each_family_is_drawn(name, digits, tmp_path, monkeypatch):
    chosen = (
        attention_figures.rollouts,
        attention_figures.heads,
        attention_figures.patches,
        windows_figure.windows,
        attention_figures.distance,
    )
    monkeypatch.setattr("vitrail.explain.explanation.FIGURES", chosen)
    files = sorted((digits / "3").glob("*.png"))[:1]
    result = vitrail.explain(kept(CONFIGS[name], tmp_path), files, patch=(1, 2), save_data=True)
    expected = ["rollout", f"heads-1-{files[0].stem}", f"patch-1-{files[0].stem}", "windows", "distance"]
    if not name.startswith("swin"):
        expected.remove("windows")
    assert list(result.arrays) == expected
    assert not result.notes
    layers = len(result.arrays["distance"]["distance"])
    with np.load(tmp_path / "explain" / f"{expected[1]}.npz") as arrays:
        assert list(arrays) == [f"layer{number + 1}" for number in range(layers)]


def kept(config: ModelConfig, folder: Path) -> Path:
    """A file of weights with a card."""
    torch.manual_seed(0)
    task, preprocess = Multiclass(("a", "b", "c")), Preprocess(config.img_size, 1)
    card = Card(model="bit_nano", config=config, task=task, preprocess=preprocess)
    save(folder / "model.safetensors", randomise(build(config)), card)
    return folder / "model.safetensors"


def test_a_patch_is_counted_in_the_first_stage_that_attends(tmp_path, digits):
    with pytest.raises(UserError, match="8 rows and 12 columns of patches, so the last one is 7,11"):
        vitrail.explain(kept(CONFIGS["swin"], tmp_path), [next(digits.glob("3/*"))], patch=(8, 0))


def test_what_has_no_attention_has_no_patch_to_look_from(tmp_path, digits):
    config = create("bit_nano", classes=3, channels=1).config
    with pytest.raises(UserError, match="cannot be drawn of a bit_nano: it has no attention"):
        vitrail.explain(kept(config, tmp_path), [next(digits.glob("3/*"))], patch=(0, 0))
