"""A model at another image size that shares its weights, for the small crops of multi-crop training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.func import functional_call

from vitrail.models import Model, build
from vitrail.models.position import Grid


class Resized:
    """`embed` of a model at another image size. Position embeddings are resampled, and gradients reach the originals.

    It is not a module: its weights are those of the model.
    """

    def __init__(self, model: Model, img_size: Grid):
        config: Any = model.config
        other = replace(config, img_size=img_size)
        type(model).resized_state(model.state_dict(), config, other, config.resample)  # raises if it cannot be resized
        self._at = build(other)
        self._names = [*self._at.state_dict()]
        self._at.forward = self._at.embed  # type: ignore[method-assign]  # what `functional_call` runs

    def embed(self, model: Model, images: Tensor) -> Tensor:
        """The features of images of this size by `model`: (B, F)."""
        self._at.to(images.device).train(model.training)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {name: tensors[name] for name in self._names}  # not the state dict, which FSDP keeps sharded
        resized = type(model).resized_state(state, model.config, self._at.config, model.config.resample)
        features: Tensor = functional_call(self._at, resized, (images,))
        return features
