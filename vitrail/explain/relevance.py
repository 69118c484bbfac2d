"""Class relevance: attention weighted by its gradient, propagated from the logit back to the patches.

Rollout multiplies attention maps and does not depend on the class. Here each map is weighted by its gradient with
respect to the class's logit (https://arxiv.org/abs/2103.15679): in every block,

    Ā = mean over heads of max(∂logit/∂A ⊙ A, 0)        R = R + Ā·R, from the first block to the last

The result is the row of R that the head reads: the class token's, the mean over patches, the mixture of attention
pooling, or that of the detection token with a class's strongest box. Since only one row is needed, the product is
evaluated from the left, row = row + row·Ā from the last block to the first. This is the order of the backward pass, so
only one block's maps are in memory at a time. The gradient of the map follows from that of a fused kernel's output
O = A·V: ∂logit/∂A = ∂logit/∂O·Vᵀ.

Legend: B batch, N tokens, D width, H heads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.explain.geometry import original
from vitrail.explain.gradients import Classes, class_maps, class_score, numbers
from vitrail.models import Model
from vitrail.models.layers import Attention, AttentionPool

_ROOM = 2**27  # floats in memory at a time: half a GiB


def relevance(model: Model, images: Tensor, classes: Classes, instead: Classes | None = None) -> NDArray[np.float32]:
    """Relevance of each patch of preprocessed images, (B, C, H, W), for a class: (B, h, w).

    With `instead`, relevance for the class rather than the other: the difference of the two logits is explained. In ViT
    and hybrid, evidence against the class is clipped to 0. In the other families it is negative, and patches are
    positions of the last feature map: see `gradients.py`.
    """
    vit = original(model)
    if not vit.encoder():
        return class_maps(vit, images, classes, instead)
    chosen = numbers(classes, len(images), vit.config.classes)
    other = None if instead is None else numbers(instead, len(images), vit.config.classes)
    step = max(_ROOM // _cost(vit), 1)
    training = vit.training
    vit.eval()
    try:
        # Works in any mode of the caller. Tensors created in inference mode must be cloned.
        with torch.inference_mode(False), torch.enable_grad():
            rows = [
                _explain(
                    vit,
                    images[at : at + step].clone().to(next(vit.parameters())),
                    chosen[at : at + step],
                    None if other is None else other[at : at + step],
                )
                for at in range(0, len(images), step)
            ]
    finally:
        vit.train(training)
    h, w = vit.config.grid
    return np.concatenate(rows).reshape(-1, h, w) if rows else np.zeros((0, h, w), np.float32)


def explainable(model: Model) -> bool:
    """Whether relevance is available: the model is a plain encoder, or defines its last feature map."""
    vit = original(model)
    try:
        return bool(vit.encoder() or vit.last_map())
    except UserError:
        return False


def signed(model: Model) -> bool:
    """Whether relevance can be negative: it comes from the last feature map, not from attention."""
    return not original(model).encoder()


def _cost(vit: Model) -> int:
    """Approximate floats per image: the inputs of all blocks, the graph of one block, and its maps."""
    c, blocks = vit.config, vit.encoder()
    mlp, heads = blocks[0].mlp.fc2.in_features, blocks[0].attn.heads
    return c.length * ((len(blocks) + 16) * c.width + 4 * mlp) + 4 * heads * c.length**2


def _pool(vit: Model) -> AttentionPool | None:
    return next((module for module in vit.modules() if isinstance(module, AttentionPool)), None)


def _explain(
    vit: Model, images: Tensor, classes: NDArray[np.int64], instead: NDArray[np.int64] | None
) -> NDArray[np.float32]:
    inputs, output, outputs, pooled = _forward(vit, images)
    logits = vit.evidence(outputs)
    score = class_score(logits, classes)
    if instead is not None:
        score = score - class_score(logits, instead)

    row = torch.zeros(len(images), inputs[0].shape[1], device=images.device)
    h, w = vit.config.grid
    patches = row[:, vit.config.length - h * w : vit.config.length]
    pool = _pool(vit)
    if pool is not None:
        gradient, slope = torch.autograd.grad(score.sum(), (output, pooled[pool.proj]))
        patches += _weighted(pool, pooled[pool], slope)[:, 0]
    else:
        (gradient,) = torch.autograd.grad(score.sum(), output)
        row += vit.shares_for(outputs.detach(), torch.from_numpy(classes.copy()).to(outputs.device)).to(row)

    for block in reversed(vit.encoder()):
        x = inputs.pop().requires_grad_()
        with _inputs(block.attn, block.attn.proj) as seen:
            output = block(x)[:, : gradient.shape[1]]  # the last block may compute only the tokens that the head reads
        gradient, slope = torch.autograd.grad(output, (x, seen[block.attn.proj]), gradient)
        row += (row[:, None] @ _weighted(block.attn, seen[block.attn], slope))[:, 0]
    return patches.cpu().numpy()


def _forward(vit: Model, images: Tensor) -> tuple[list[Tensor], Tensor, Tensor, dict[nn.Module, Tensor]]:
    """The input of every block, the output of the last, the model's outputs, and the inputs of attention pooling.

    The graph starts at the output of the last block; a graph of the whole model could be large.
    """
    inputs: list[Tensor] = []
    last: list[Tensor] = []

    thread = threading.get_ident()  # other threads may use the model concurrently

    def keep(_: nn.Module, args: tuple[Tensor]) -> None:
        if threading.get_ident() == thread:
            inputs.append(args[0].detach())

    def end(_: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        torch.set_grad_enabled(True)  # until `no_grad` ends
        last.append(output.detach().requires_grad_())
        return last[-1]

    blocks = vit.encoder()
    hooks = [block.register_forward_pre_hook(keep) for block in blocks]
    hooks.append(blocks[-1].register_forward_hook(end))
    pool = _pool(vit)
    try:
        with torch.no_grad(), _inputs(*([] if pool is None else [pool, pool.proj])) as seen:
            outputs = vit.forward(images)  # `vit(images)` may run compiled code, without the hooks
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, last[0], outputs, seen


@contextmanager
def _inputs(*modules: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """Collects the inputs of modules."""
    seen: dict[nn.Module, Tensor] = {}
    thread = threading.get_ident()

    def keep(module: nn.Module, args: tuple[Tensor]) -> None:
        if threading.get_ident() == thread:
            seen[module] = args[0]

    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _weighted(attention: Attention | AttentionPool, x: Tensor, slope: Tensor) -> Tensor:
    """Ā of an input x, from its map A = `weights(x)` and `slope`, the gradient of A·V, (B, N, D)."""
    weights = attention.weights(x)
    joined = attention.qkv(x) if isinstance(attention, Attention) else attention.kv(x)
    values, slope = (
        part.reshape(*part.shape[:2], attention.heads, -1).transpose(1, 2)  # B H N D/H
        for part in (joined[..., -slope.shape[2] :], slope)
    )
    return (slope @ values.transpose(-2, -1)).mul_(weights).clamp_(min=0).mean(dim=1).float()
