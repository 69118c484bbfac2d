"""What a model attends to: the maps of every layer, their rollout, and how far heads look.

A layer's maps are looked at while the model runs and then forgotten, so however deep a model is, the memory of one
layer suffices, and for a rollout the mean of the heads of each; a batch is cut so that this is small (`parts`).
Where in the picture the tokens of a layer lie is in `geometry.py`; a family whose maps shrink from stage to stage has
layers of different grids.

Legend: B batch, L layers that attend, H heads, N tokens, (h, w) the grid of patches; prefix tokens (class, registers)
come first.
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
See = Callable[[int, Tensor], None]  # the number of a layer, from 0, and its attention weights

_MOST = 64 * 2**20  # bytes of one layer's maps that are held at a time; what is made of them takes several times that


def watch(model: Model, images: Tensor, see: See, see_pool: Callable[[Tensor], None] | None = None) -> Tensor:
    """Runs the model and shows every layer's attention weights as the layer is reached; gives the logits.

    They are (B, H, N, N), those of a PVT (B, H, N, M) for its M keys, those of a Swin (B, W, H, n, n) for its W
    windows of n tokens. If attention pools the tokens, its weights on the patches, (B, H, 1, h·w), go to `see_pool`.
    Nothing is kept; a model that is compiled runs as it is written, and other threads may use it at the same time.
    """
    model = original(model)  # hooks may be missing in compiled code
    layers = attentions(model)
    thread = threading.get_ident()

    def before(show: Callable[[Tensor], None], module: Any, inputs: tuple[Any, ...]) -> None:
        if threading.get_ident() != thread:
            return
        weights = module.weights(*inputs).float()
        with torch.autocast(weights.device.type, enabled=False):  # which would round what is made of them
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
        return model.forward(images)  # not the call, which is compiled if the model is


def _hook(module: nn.Module, before: Callable[..., None]) -> Any:
    return module.register_forward_pre_hook(before)  # a context that removes the hook


def parts(model: Model, images: Tensor) -> Iterator[Tensor]:
    """A batch in slices for which the attention maps of one layer are not large."""
    each = max(geometry.size for geometry in geometries(model)) * 4
    return iter(torch.split(images, max(_MOST // each, 1)))


def rollout(model: Model, images: Tensor) -> Array:
    """Attention followed through all layers from the output to the patches: (B, h, w), each map sums to one.

    As in appendix D.8 of the paper (https://arxiv.org/abs/2005.00928): the heads are averaged, the identity is added
    for the residual path, rows are normalised, layers are multiplied. It starts from the class token, or from all
    patches alike if they are averaged, or as the pool's own attention weighs them. Between stages, what reaches a patch
    is shared out evenly to those that were merged in it: the map is that of the first stage that attends.
    """
    return np.concatenate([_rollout(model, part) for part in parts(model, images)])


def _rollout(model: Model, images: Tensor) -> Array:
    layers = geometries(model)
    means: list[Tensor] = []  # of the heads of each layer: small, and one row is followed through them from the end
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
    """Where each head of each layer looks from the class token, or on average from all patches: L times (B, H, h, w).

    A map sums to the share of the attention that goes to patches; the rest goes to the class token, registers and the
    padding of windows. In earlier stages than that of the class token it is from all patches.
    """
    return _each_layer(model, images, lambda geometry: geometry.start)


def patch_attention(model: Model, images: Tensor, row: int, column: int) -> list[Array]:
    """Where each head of each layer looks from one patch, counted from 0 at the top left: L times (B, H, h, w).

    It is a patch of the first stage; later ones look from the patch that it was merged in.
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
    """Where the patch in the middle of each window looks, the mean of all heads: L times (B, h, w)."""

    def middles(geometry: Geometry) -> Tensor:
        assert isinstance(geometry, Windows)
        rows = torch.zeros(geometry.grid[0] * geometry.grid[1])
        rows[geometry.middles()] = 1
        return rows

    return [of_layer.mean(axis=1) for of_layer in _each_layer(model, images, middles)]


def check_patch(model: Model, row: int, column: int) -> None:
    """A UserError if the model has no such patch."""
    h, w = geometries(model)[0].grid
    if not (0 <= row < h and 0 <= column < w):
        raise UserError(
            f"There is no patch {row},{column}: the model cuts images into {h} rows and {w} columns of patches, "
            f"so the last one is {h - 1},{w - 1}."
        )


def _each_layer(model: Model, images: Tensor, start: Callable[[Geometry], Tensor]) -> list[Array]:
    """What is reached from the tokens that count as `start` says, in every layer on its grid: L times (B, H, h, w)."""
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
    """How far each head of each layer looks, in pixels, averaged over patches and over all images: (L, H).

    The distance between the centres of two patches, or of a patch and the area of a key, weighted by the attention from
    one to the other, as in figure 7 of the paper. Only attention from patches to patches counts: their share of a row
    is scaled to one. Where layers have fewer heads than others, their rows end in NaN.
    """
    layers = geometries(model)
    sums = torch.full((len(layers), max(geometry.heads for geometry in layers)), torch.nan, dtype=torch.float64)
    for number, geometry in enumerate(layers):
        sums[number, : geometry.heads] = 0
    count = 0

    def see(number: int, weights: Tensor) -> None:
        geometry = layers[number]
        sums[number, : geometry.heads] += geometry.distance(weights).cpu().double().sum(dim=0)  # not on every device

    for images in batches:
        for part in parts(model, images):
            watch(model, part, see)
        count += len(images)
    if not count:
        raise UserError("Attention distance is an average over images, but there are none.")
    return (sums / count).numpy().astype(np.float32)


def even_distance(model: Model) -> Array:
    """The attention distance, in pixels, of heads that look at all that they can see alike, in each layer: (L,)."""
    return np.array([geometry.even for geometry in geometries(model)], np.float32)


def _patches(rows: Tensor, grid: Grid) -> Tensor:
    """Of rows (..., N) what belongs to patches: (..., h·w)."""
    return rows[..., -grid[0] * grid[1] :]


def _on_grid(rows: Tensor, grid: Grid) -> Array:
    """Rows (..., h·w) as maps; copied, because a view would keep the whole of the layer that it is of."""
    return rows.reshape(*rows.shape[:-1], *grid).cpu().numpy().copy()
