"""Attention maps of every layer, attention rollout and attention distance.

Maps are read by hooks during the forward pass and dropped with their layer, so peak memory is that of one layer, plus
the head means of every layer for a rollout; large batches are split (`parts`). `geometry.py` maps the tokens of each
layer to the image; in hierarchical models the grid differs between stages.

Legend: B batch, L attention layers, H heads, N tokens, (h, w) the patch grid; prefix tokens (class, registers) come
first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.explain.geometry import Geometry, attentions, geometries, original, refine
from vitrail.explain.windows import Windows
from vitrail.models import Model
from vitrail.models.layers import AttentionPool
from vitrail.models.position import Grid

Array = NDArray[np.float32]
See = Callable[[int, Tensor], None]  # receives the index of a layer and its attention weights

_MOST = 64 * 2**20  # bytes of one layer's maps per slice of a batch; intermediate results need several times that


def watch(model: Model, images: Tensor, see: See, see_pool: Callable[[Tensor], None] | None = None) -> Tensor:
    """Runs the model, calls `see` with the attention weights of every layer, and returns the logits.

    Weights are (B, H, N, N); (B, H, N, M) for a PVT with M keys; (B, W, H, n, n) for a Swin with W windows of n tokens.
    `see_pool` receives the weights of attention pooling, (B, H, 1, h·w). Nothing is stored. A compiled model runs
    eagerly, and other threads may use it concurrently.
    """
    model = original(model)  # compiled code may skip hooks
    layers = attentions(model)
    thread = threading.get_ident()

    def before(show: Callable[[Tensor], None], module: Any, inputs: tuple[Any, ...]) -> None:
        if threading.get_ident() != thread:
            return
        weights = module.weights(*inputs).float()
        with torch.autocast(weights.device.type, enabled=False):  # keep float32
            show(weights)

    training = model.training
    model.eval()
    with ExitStack() as stack:
        stack.callback(model.train, training)
        for number, layer in enumerate(layers):
            stack.enter_context(_hook(layer.module, partial(before, partial(see, number))))
        for pool in (module for module in model.modules() if isinstance(module, AttentionPool)):
            if see_pool is not None:
                stack.enter_context(_hook(pool, partial(before, see_pool)))
        stack.enter_context(torch.inference_mode())
        return model.forward(images)  # `model(images)` may run compiled code


def _hook(module: nn.Module, before: Callable[..., None]) -> Any:
    return module.register_forward_pre_hook(before)  # a context manager that removes the hook


def parts(model: Model, images: Tensor) -> Iterator[Tensor]:
    """Splits a batch so that the attention maps of one layer stay small."""
    each = max(geometry.size for geometry in geometries(model)) * 4
    return iter(torch.split(images, max(_MOST // each, 1)))


def rollout(model: Model, images: Tensor) -> Array:
    """Attention rollout (https://arxiv.org/abs/2005.00928): maps (B, h, w) that sum to one.

    As in appendix D.8 of the ViT paper: average the heads, add the identity for the residual connection, normalise the
    rows, multiply the layers. Rollout starts from the class token, uniformly from all patches with average pooling, or
    from the weights of attention pooling. Between stages, the share of a merged patch is split evenly among its parts:
    the result has the grid of the first stage with attention.
    """
    return np.concatenate([_rollout(model, part) for part in parts(model, images)])


def _rollout(model: Model, images: Tensor) -> Array:
    layers = geometries(model)
    means: list[Tensor] = []  # over the heads of each layer; a single row is multiplied through them, last layer first
    row = layers[-1].start[None].to(images.device)

    def see_pool(weights: Tensor) -> None:
        nonlocal row
        row = F.pad(weights.mean(dim=1)[:, 0], (layers[-1].prefix, 0))  # B N

    watch(model, images, lambda _, weights: means.append(weights.mean(dim=-3, keepdim=True)), see_pool)
    grid = layers[-1].grid
    with torch.autocast(images.device.type, enabled=False):
        for geometry, mean in zip(reversed(layers), reversed(means), strict=True):
            if geometry.grid != grid:
                row, grid = refine(_patches(row, grid), grid, geometry.grid), geometry.grid
            row = (row + geometry.follow(row, mean)[:, 0]) / 2
    reached = _patches(row, grid)
    return _on_grid(reached / reached.sum(dim=-1, keepdim=True), grid)


def attention_maps(model: Model, images: Tensor) -> list[Array]:
    """Attention of every head from the class token, or averaged over all patches: one (B, H, h, w) per layer.

    A map sums to the share of attention on patches; the rest is on the class token, registers and window padding.
    Stages before that of the class token are averaged over all patches.
    """
    return _each_layer(model, images, lambda geometry: geometry.start)


def patch_attention(model: Model, images: Tensor, row: int, column: int) -> list[Array]:
    """Attention of every head from one patch, counted from 0 at the top left: one (B, H, h, w) per layer.

    Row and column refer to the grid of the first stage; later stages use the patch that contains it.
    """
    check_patch(model, row, column)
    finest = geometries(model)[0].pixels

    def here(geometry: Geometry) -> Tensor:
        merged = geometry.pixels // finest
        place = torch.zeros(geometry.grid)
        place[row // merged, column // merged] = 1
        return F.pad(place.flatten(), (geometry.prefix, 0))

    return _each_layer(model, images, here)


def window_attention(model: Model, images: Tensor) -> list[Array]:
    """Attention of the central patch of each window, averaged over heads: one (B, h, w) per layer."""

    def middles(geometry: Geometry) -> Tensor:
        assert isinstance(geometry, Windows)
        rows = torch.zeros(geometry.grid[0] * geometry.grid[1])
        rows[geometry.middles()] = 1
        return rows

    return [of_layer.mean(axis=1) for of_layer in _each_layer(model, images, middles)]


def check_patch(model: Model, row: int, column: int) -> None:
    """Raises a UserError if the model has no such patch."""
    h, w = geometries(model)[0].grid
    if not (0 <= row < h and 0 <= column < w):
        raise UserError(
            f"There is no patch {row},{column}: the model has {h} rows and {w} columns of patches, counted from 0. "
            f"The last one is {h - 1},{w - 1}."
        )


def _each_layer(model: Model, images: Tensor, start: Callable[[Geometry], Tensor]) -> list[Array]:
    """Attention from a weighted mean of tokens, with weights `start(geometry)`: one (B, H, h, w) per layer."""
    layers = geometries(model)
    maps: list[list[Array]] = [[] for _ in layers]

    def see(number: int, weights: Tensor) -> None:
        geometry = layers[number]
        rows = start(geometry)[None].to(weights.device)
        maps[number].append(_on_grid(_patches(geometry.follow(rows, weights), geometry.grid), geometry.grid))

    for part in parts(model, images):
        watch(model, part, see)
    return [np.concatenate(of_layer) for of_layer in maps]


def attention_distance(model: Model, batches: Iterable[Tensor]) -> Array:
    """Mean attention distance of every head in pixels, over all patches and images: (L, H), figure 7 of the ViT paper.

    The distance between the centres of query patch and key, weighted by attention. Only attention between patches
    counts, renormalised to sum to one. Rows of layers with fewer heads end in NaN.
    """
    layers = geometries(model)
    sums = torch.full((len(layers), max(geometry.heads for geometry in layers)), torch.nan, dtype=torch.float64)
    for number, geometry in enumerate(layers):
        sums[number, : geometry.heads] = 0
    count = 0

    def see(number: int, weights: Tensor) -> None:
        geometry = layers[number]
        sums[number, : geometry.heads] += geometry.distance(weights).cpu().double().sum(dim=0)  # MPS has no float64

    for images in batches:
        for part in parts(model, images):
            watch(model, part, see)
        count += len(images)
    if not count:
        raise UserError("Attention distance is a mean over images, but there are no images.")
    return (sums / count).numpy().astype(np.float32)


def even_distance(model: Model) -> Array:
    """The attention distance of uniform attention in each layer, in pixels: (L,)."""
    return np.array([geometry.even for geometry in geometries(model)], np.float32)


def _patches(rows: Tensor, grid: Grid) -> Tensor:
    """The patches of rows of tokens: (..., N) to (..., h·w)."""
    return rows[..., -grid[0] * grid[1] :]


def _on_grid(rows: Tensor, grid: Grid) -> Array:
    """Rows (..., h·w) as maps (..., h, w). Copied: a view would keep the layer's whole tensor alive."""
    return rows.reshape(*rows.shape[:-1], *grid).cpu().numpy().copy()
