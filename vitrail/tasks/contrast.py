"""Objectives of images with captions: SigLIP's sigmoid loss and CLIP's softmax.

Legend: B batch, C captions of an image, N tokens, J dimensions of the joint space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.two_tower import LARGEST_SCALE
from vitrail.tasks.objective import Batch, Objective
from vitrail.tokenizers import Tokenizer
from vitrail.world import world


class Contrast(Objective):
    """Learns from pairs: in each batch, an image is compared with its own caption and those of all other images.

    Of several captions of an image, each step draws one. Equal captions in a batch belong to each of their images.
    """

    model: Any  # with two towers
    tokens: Tensor
    own: Tensor
    several: Tensor

    def __init__(
        self,
        model: Any,
        captions: Sequence[tuple[str, ...]],  # of each training image
        tokenizer: Tokenizer,
        length: int,
        ema: float = 0.0,
    ):
        super().__init__(model, ema)
        texts = list(dict.fromkeys(text for its in captions for text in its))
        # Captions are equal if their tokens are: those of long captions may differ only where they are cut.
        rows, equal = np.unique(tokenizer.encode(texts, length), axis=0, return_inverse=True)
        different = dict(zip(texts, equal.reshape(-1).tolist(), strict=True))
        own = np.zeros((len(captions), max(map(len, captions))), np.int64)
        for row, its in zip(own, captions, strict=True):
            row[: len(its)] = [different[text] for text in its]
        self.register_buffer("tokens", torch.from_numpy(rows), persistent=False)
        self.register_buffer("own", torch.from_numpy(own), persistent=False)
        self.register_buffer("several", torch.tensor([len(its) for its in captions]), persistent=False)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        numbers = batch.numbers.to(self.own.device) % len(self.own)
        draw = world().drawn(lambda rows: torch.rand(rows, device=self.own.device), len(numbers))
        chosen = self.own[numbers, (draw * self.several[numbers]).long()]
        texts = world().gathered(self.model.embed_text(self._shortened(self.tokens[chosen])).float())
        logits = self.model.match(world().gathered(self.model(batch.images).float()), texts)
        chosen = world().gathered(chosen)
        same = chosen[:, None] == chosen[None, :]
        hit = (logits.detach().argmax(dim=1)[:, None] == torch.arange(len(same), device=same.device)) & same
        return {"loss": self.loss(logits, same), "top1": hit.any(dim=1).float().mean()}

    def loss(self, logits: Tensor, same: Tensor) -> Tensor:
        """The loss of logits (B, B), images by captions; `same` is true where a caption is that of the image."""
        raise NotImplementedError

    def _shortened(self, tokens: Tensor) -> Tensor:
        """Without the padding that all texts share: a causal tower never looks beyond the end of a text."""
        if not self.model.config.text.causal or type(tokens) is not Tensor:  # a traced tensor has no values
            return tokens
        return tokens[:, : int(tokens.argmax(dim=1).max()) + 1]


class Sigmoid(Contrast):
    """SigLIP: a binary decision for each image and each caption, whether they belong together."""

    def loss(self, logits: Tensor, same: Tensor) -> Tensor:
        signs = 2.0 * same.to(logits.dtype) - 1.0
        return -F.logsigmoid(signs * logits).sum() / len(logits)


class Softmax(Contrast):
    """CLIP: which caption belongs to an image, and which image to a caption. Equal captions do not compete."""

    def loss(self, logits: Tensor, same: Tensor) -> Tensor:
        others = same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
        logits = logits.masked_fill(others, float("-inf"))
        right = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2

    def after_step(self, step: int) -> None:
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(LARGEST_SCALE))
        super().after_step(step)
