"""Class relevance from the last feature map: the map times its gradient.

Every family but ViT and hybrid has a last feature map A, (B, h, w, D), the output of `Model.last_map`. The contribution
of each position to a logit is

    R = Σ over channels of ∂logit/∂A ⊙ A

This is HiResCAM (https://arxiv.org/abs/2011.08891), which is Grad-CAM (https://arxiv.org/abs/1610.02391) without
averaging the gradient over positions. In BiT, Mixer, Swin and PVT v2 the map is averaged and the head is linear, so R
sums exactly to the logit minus its bias. A CoAtNet has a norm and a hidden layer in between: R is a linear
approximation. A PVT reads its class token, and A is the map that the token attends to last.

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

Classes = int | Sequence[int] | NDArray[np.integer]  # class indices: one for all images, or one per image


def numbers(classes: Classes, images: int, known: int) -> NDArray[np.int64]:
    """A class index per image; a UserError if the count is wrong or a class does not exist."""
    given = np.asarray(classes)
    if given.shape not in ((), (images,)):
        raise UserError(f"Give one class, or one for each of {images} images, but the shape is {given.shape}.")
    if given.size and not (given.min() >= 0 and given.max() < known):
        raise UserError(f"Class indices must be from 0 to {known - 1}, but they are {given.min()} to {given.max()}.")
    return np.broadcast_to(given.astype(np.int64), (images,))


def class_score(logits: Tensor, classes: NDArray[np.int64]) -> Tensor:
    """The logit of each image's class, (B,); of a dense model, its mean over the region that the class wins.

    A class without a region is explained over the whole image.
    """
    chosen = torch.from_numpy(classes.copy()).to(logits.device)
    own = logits[torch.arange(len(logits), device=logits.device), chosen]
    if logits.ndim == 2:
        return own
    region = (logits.argmax(dim=1) == chosen[:, None, None]).flatten(1)
    region = region | ~region.any(dim=1, keepdim=True)
    return (own.flatten(1) * region).sum(dim=1) / region.sum(dim=1)


def class_maps(model: Model, images: Tensor, classes: Classes, instead: Classes | None = None) -> NDArray[np.float32]:
    """Class relevance of each position of the last feature map, for preprocessed images (B, C, H, W): (B, h, w).

    Negative values are evidence against the class. With `instead`, the difference of the two logits is explained.
    """
    model = original(model)  # compiled code may skip hooks
    chosen = numbers(classes, len(images), model.config.classes)
    other = None if instead is None else numbers(instead, len(images), model.config.classes)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():
            module, channels = model.last_map()
            features, logits = _forward(model, module, images.to(next(model.parameters())))
            logits = model.evidence(logits)
            score = class_score(logits, chosen)
            if other is not None:
                score = score - class_score(logits, other)
            (gradient,) = torch.autograd.grad(score.sum(), features)
            contributions = (features.detach() * gradient).sum(dim=channels, dtype=torch.float32).flatten(1)
    finally:
        model.train(training)
    h, w = model.config.grid
    return contributions[:, -h * w :].reshape(-1, h, w).cpu().numpy()  # without a class token, which comes first


def _forward(model: Model, module: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The last map and the logits. The graph starts at the map: nothing before it needs a gradient."""
    found: list[Tensor] = []
    thread = threading.get_ident()  # other threads may use the model concurrently

    def begin(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        torch.set_grad_enabled(True)  # until the caller's `no_grad` ends
        found.append(output.detach().requires_grad_())
        return found[-1]

    hook = module.register_forward_hook(begin)
    try:
        logits = model.forward(images)  # `model(images)` may run compiled code, without the hook
    finally:
        hook.remove()
    return found[0], logits
