"""Reads texts with a model for images and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vitrail.tasks.pair_scores import Reader
from vitrail.tasks.scores import Floats
from vitrail.tokenizers import Tokenizer

_BATCH = 256


class ModelReader(Reader):
    """The text tower of a model in memory, with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Tokenizer, context: int):
        super().__init__(tokenizer, context)
        self._model = (model,)

    @property
    def scale(self) -> float:
        return float(self._model[0].logit_scale.detach().exp())

    def read(self, texts: Sequence[str]) -> Floats:
        model = self._model[0]
        device, training = model.logit_scale.device, model.training
        model.eval()
        rows = torch.from_numpy(self.tokenizer.encode(texts, self.context))
        with torch.no_grad():
            found = [model.embed_text(part.to(device)).double().cpu() for part in torch.split(rows, _BATCH)]
        model.train(training)
        return np.asarray(torch.cat(found))
