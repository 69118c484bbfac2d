"""Which places speak for a class in a model whose answer is read from a map: the map times its gradient.

Every family but the ViT and the hybrid ends in a map of features A, (B, h, w, D), which is the last that knows places:
`Model.last_map` says which module gives it.
How much each of them adds to a logit is

    R = Σ over channels of ∂logit/∂A ⊙ A

This is HiResCAM (https://arxiv.org/abs/2011.08891), which is Grad-CAM (https://arxiv.org/abs/1610.02391) without its
average of the gradient over places. In BiT, Mixer, Swin and PVT v2 the map is averaged and the head is linear: there R
adds up to the logit less the bias, so it is what the model computes and not a guess. A CoAtNet has a norm and a hidden
layer in between, of which R is the slope. A PVT reads its class token, and A is the map that the token attends to last.

Legend: B batch, N tokens, D width, (h, w) the last map.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.explain.geometry import original
from vitrail.models import Model

Classes = int | Sequence[int] | NDArray[np.integer]  # numbers of classes: one for all images, or one for each


def numbers(classes: Classes, images: int, known: int) -> NDArray[np.int64]:
    """The number of a class for every image; a UserError if there are more or fewer, or if one does not exist."""
    given = np.asarray(classes)
    if given.shape not in ((), (images,)):
        raise UserError(f"Give one class for all images or one for each of {images}, not {given.shape}.")
    if given.size and not (given.min() >= 0 and given.max() < known):
        raise UserError(f"Classes have numbers from 0 to {known - 1}, but {given.min()} to {given.max()} were given.")
    return np.broadcast_to(given.astype(np.int64), (images,))


def class_maps(model: Model, images: Tensor, classes: Classes, instead: Classes | None = None) -> NDArray[np.float32]:
    """How much each place of the last map of preprocessed images, (B, C, H, W), speaks for a class: (B, h, w).

    Below 0 it speaks against the class. With `instead`, the difference of the two logits is explained.
    """
    model = original(model)  # hooks may be missing in compiled code
    chosen = numbers(classes, len(images), model.config.classes)
    other = None if instead is None else numbers(instead, len(images), model.config.classes)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():
            module, channels = model.last_map()
            features, logits = _forward(model, module, images.to(next(model.parameters())))
            each = torch.arange(len(images))
            score = logits[each, torch.from_numpy(chosen.copy())]
            if other is not None:
                score = score - logits[each, torch.from_numpy(other.copy())]
            (gradient,) = torch.autograd.grad(score.sum(), features)
            speaks = (features.detach() * gradient).sum(dim=channels, dtype=torch.float32).flatten(1)
    finally:
        model.train(training)
    h, w = model.config.grid
    return speaks[:, -h * w :].reshape(-1, h, w).cpu().numpy()  # a class token comes first


def _forward(model: Model, module: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The last map and the logits. The graph begins at the map, for nothing before it is asked for its gradient."""
    found: list[Tensor] = []
    thread = threading.get_ident()  # others may use the model at the same time

    def begin(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        torch.set_grad_enabled(True)  # until the end of the caller's `no_grad`
        found.append(output.detach().requires_grad_())
        return found[-1]

    hook = module.register_forward_hook(begin)
    try:
        logits = model.forward(images)  # not by call: a compiled model would not notice the hook
    finally:
        hook.remove()
    return found[0], logits
