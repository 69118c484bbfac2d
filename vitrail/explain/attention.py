"""What a model attends to: the maps of every layer, their rollout, and how far heads look.

A layer's maps are looked at while the model runs and then forgotten, so however deep a model is, the memory of one
layer suffices; and a batch is cut so that this is small (`parts`).

Legend: B batch, L layers, H heads, N tokens, (h, w) the grid of patches; prefix tokens (class, registers) come first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.layers import Attention, AttentionPool
from vitrail.models.vit import ViT

Array = NDArray[np.float32]
See = Callable[[int, Tensor], None]  # the number of a layer, from 0, and its attention weights (B, H, N, N)

_MOST = (
    64 * 2**20
)  # bytes of one layer's maps that are held at a time; what is computed of them takes several times that


def watch(model: ViT, images: Tensor, see: See, see_pool: Callable[[Tensor], None] | None = None) -> Tensor:
    """Runs the model and shows every layer's attention weights (B, H, N, N) as the layer is reached; gives the logits.

    If attention pools the tokens, its weights on the patches, (B, H, 1, h·w), go to `see_pool`. Nothing is kept; a
    model that is compiled runs as it is written, and other threads may use it at the same time.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped: hooks may be missing in compiled code
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise UserError(f"There is no attention to show: a {type(model).__name__} has none.")
    thread = threading.get_ident()

    def before(show: Callable[[Tensor], None], module: Any, inputs: tuple[Tensor]) -> None:
        if threading.get_ident() != thread:
            return
        weights = module.weights(inputs[0]).float()
        with torch.autocast(weights.device.type, enabled=False):  # which would round what is made of them
            show(weights)

    training = model.training
    model.eval()
    with ExitStack() as stack:
        stack.callback(model.train, training)
        for number, layer in enumerate(layers):
            stack.enter_context(_hook(layer, partial(before, partial(see, number))))
        for pool in (module for module in model.modules() if isinstance(module, AttentionPool)):
            if see_pool is not None:
                stack.enter_context(_hook(pool, partial(before, see_pool)))
        stack.enter_context(torch.inference_mode())
        return model.forward(images)  # not the call, which is compiled if the model is


def _hook(module: nn.Module, before: Callable[..., None]) -> Any:
    return module.register_forward_pre_hook(before)  # a context that removes the hook


def parts(model: ViT, images: Tensor) -> Iterator[Tensor]:
    """A batch in slices for which the attention maps of one layer are not large."""
    config = model.config
    each = config.heads * config.length**2 * 4
    return iter(torch.split(images, max(_MOST // each, 1)))


def rollout(model: ViT, images: Tensor) -> Array:
    """Attention followed through all layers from the output to the patches: (B, h, w), each map sums to one.

    As in appendix D.8 of the paper (https://arxiv.org/abs/2005.00928): the heads are averaged, the identity is added
    for the residual path, rows are normalised, layers are multiplied. It starts from the class token, or from all
    patches alike if they are averaged, or as the pool's own attention weighs them.
    """
    return np.concatenate([_rollout(model, part) for part in parts(model, images)])


def _rollout(model: ViT, images: Tensor) -> Array:
    prefix = model.config.prefix
    flow: Tensor | None = None
    start: Tensor | None = None

    def see(_: int, weights: Tensor) -> None:
        nonlocal flow
        step = weights.mean(dim=1) + torch.eye(weights.shape[-1], device=weights.device)
        step /= step.sum(dim=-1, keepdim=True)
        flow = step if flow is None else step @ flow  # B N N

    def see_pool(weights: Tensor) -> None:
        nonlocal start
        start = weights.mean(dim=1)  # B 1 h·w

    watch(model, images, see, see_pool)
    assert flow is not None
    reached = _from_output(model, flow) if start is None else (start @ flow[:, prefix:, prefix:])[:, 0]
    return _on_grid(model, reached / reached.sum(dim=-1, keepdim=True))


def attention_maps(model: ViT, images: Tensor) -> Array:
    """Where each head of each layer looks from the class token, or on average from all patches: (B, L, H, h, w).

    A map sums to the share of the attention that goes to patches; the rest goes to the class token and registers.
    """
    return _each_layer(model, images, lambda weights: _from_output(model, weights))


def patch_attention(model: ViT, images: Tensor, row: int, column: int) -> Array:
    """Where each head of each layer looks from one patch, counted from 0 at the top left: (B, L, H, h, w)."""
    check_patch(model, row, column)
    prefix, (_, w) = model.config.prefix, model.config.grid
    return _each_layer(model, images, lambda weights: weights[:, :, prefix + row * w + column, prefix:])


def check_patch(model: ViT, row: int, column: int) -> None:
    """A UserError if the model has no such patch."""
    h, w = model.config.grid
    if not (0 <= row < h and 0 <= column < w):
        raise UserError(
            f"There is no patch {row},{column}: the model cuts images into {h} rows and {w} columns of patches, "
            f"so the last one is {h - 1},{w - 1}."
        )


def _each_layer(model: ViT, images: Tensor, choose: Callable[[Tensor], Tensor]) -> Array:
    """What `choose` takes of every layer's maps, (B, H, h·w), for all layers on the grid: (B, L, H, h, w)."""
    chosen: list[Array] = []
    for part in parts(model, images):
        layers: list[Array] = []
        watch(model, part, lambda _, weights: layers.append(_on_grid(model, choose(weights))))  # noqa: B023
        chosen.append(np.stack(layers, axis=1))
    return np.concatenate(chosen)


def attention_distance(model: ViT, batches: Iterable[Tensor]) -> Array:
    """How far each head of each layer looks, in pixels, averaged over patches and over all images: (L, H).

    The distance between the centres of two patches, weighted by the attention from one to the other, as in figure 7
    of the paper. Only attention from patches to patches counts: their share of a row is scaled to one.
    """
    prefix, apart = model.config.prefix, _distances(model)
    sums: dict[int, Tensor] = {}
    count = 0

    def see(layer: int, weights: Tensor) -> None:
        between = weights[:, :, prefix:, prefix:]
        far = torch.einsum("bhqk,qk->bhq", between, apart.to(between.device)) / between.sum(dim=-1)
        total = far.mean(dim=-1).cpu().double().sum(dim=0)  # not every device has float64
        sums[layer] = sums.get(layer, torch.zeros_like(total)) + total

    for images in batches:
        for part in parts(model, images):
            watch(model, part, see)
        count += len(images)
    if not count:
        raise UserError("Attention distance is an average over images, but there are none.")
    return (torch.stack([sums[layer] for layer in sorted(sums)]) / count).numpy().astype(np.float32)


def even_distance(model: ViT) -> float:
    """The attention distance, in pixels, of a head that looks at all patches alike."""
    return _distances(model).mean().item()


def _distances(model: ViT) -> Tensor:
    """Pixels between the centres of all pairs of patches: (h·w, h·w)."""
    (height, width), (h, w) = model.config.img_size, model.config.grid
    y = torch.arange(h).repeat_interleave(w) * (height / h)
    x = torch.arange(w).repeat(h) * (width / w)
    return torch.hypot(y[:, None] - y, x[:, None] - x)


def shares(model: ViT) -> Tensor:
    """How much each token counts for what the head reads: (N,), adds up to one. Attention pooling decides by itself."""
    c = model.config
    counts = torch.zeros(c.length)
    if c.pool in ("cls", "cls_dist", "cls_gap"):
        counts[: c.placed] = 1 / c.placed
    if c.pool not in ("cls", "cls_dist"):
        counts[c.prefix :] = 1 / (c.length - c.prefix)
    return counts / counts.sum()


def _from_output(model: ViT, weights: Tensor) -> Tensor:
    """The rows of (..., N, N) that the head reads, the class token's or the mean of the patches': (..., h·w)."""
    with torch.autocast(weights.device.type, enabled=False):
        return (shares(model).to(weights) @ weights)[..., model.config.prefix :]


def _on_grid(model: ViT, rows: Tensor) -> Array:
    """Rows (..., h·w) as maps; copied, because a view would keep the whole of the layer that it is of."""
    return rows.reshape(*rows.shape[:-1], *model.config.grid).cpu().numpy().copy()
