"""Tokenizers: texts as rows of token ids, for the text tower of a model. They need no torch.

`bytes` needs no vocabulary; `bpe` learns one from the captions; `clip` is CLIP's. A row begins with a start token and
ends with an end token, which has the largest id, and is padded with 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.config import TokenizerName
from vitrail.errors import UserError, shown
from vitrail.tokenizers import bpe

VOCABULARY = 2048  # ids of a learnt vocabulary, at most
_REMEMBERED, _LONGEST_WORD = 2**17, 50  # words whose ids are remembered, and characters of such a word
_LONGEST = 2000  # characters of a text that are read: more than any text tower has tokens


@dataclass(frozen=True)
class Tokenizer:
    """Texts to token ids."""

    kind: TokenizerName | Literal["unknown"] = "bytes"  # "unknown": of weights whose vocabulary is not at hand
    merges: tuple[str, ...] = ()  # of `bpe`

    @classmethod
    def learnt(cls, kind: TokenizerName, texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
        """A tokenizer of a kind, for these captions."""
        return cls(kind, bpe.learn(texts, vocabulary - 514) if kind == "bpe" else ())

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return 259 if self.kind == "bytes" else len(self._names) + 2

    @property
    def start(self) -> int:
        return self.vocab - 2

    @property
    def end(self) -> int:
        return self.vocab - 1

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, without start and end."""
        if self.kind == "unknown":
            raise UserError("The vocabulary of these weights is not known, so they cannot read words.")
        text = bpe.clean(text)[:_LONGEST]
        if self.kind == "bytes":
            return [byte + 1 for byte in text.encode()]  # 0 is padding
        return [i for word in bpe.words(text) for i in self._word(word)]

    def encode(self, texts: Sequence[str], length: int) -> NDArray[np.int64]:
        """The rows of texts, (B, length), cut where they are too long."""
        rows = np.zeros((len(texts), length), np.int64)
        for row, text in zip(rows, texts, strict=True):
            found = [self.start, *self.ids(text)[: length - 2], self.end]
            row[: len(found)] = found
        return rows

    def tokens(self, text: str) -> int:
        """The length of a text in tokens, with start and end."""
        return len(self.ids(text)) + 2

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "merges": list(self.merges)}

    @classmethod
    def from_json(cls, document: object) -> Tokenizer:
        """The inverse of `to_json`; raises UserError for anything else."""
        if not isinstance(document, dict) or document.get("kind") not in ("bytes", "bpe", "clip", "unknown"):
            raise UserError(f"'tokenizer' must have a kind, bytes, bpe or clip, but it is {shown(document)}.")
        merges = document.get("merges", [])
        if not isinstance(merges, list) or not all(isinstance(m, str) and m.count(" ") == 1 for m in merges):
            raise UserError("'merges' of the tokenizer must be a list of pairs, such as \"th e</w>\".")
        return cls(document["kind"], tuple(merges))

    def with_data(self) -> Tokenizer:
        """The same tokenizer with its vocabulary inside, for files that are read without this package."""
        return Tokenizer("bpe", bpe.clip_merges()) if self.kind == "clip" else self

    @cached_property
    def _merges(self) -> tuple[str, ...]:
        return bpe.clip_merges() if self.kind == "clip" else self.merges

    @cached_property
    def _names(self) -> list[str]:
        """The text of each id; two merges may have the same."""
        single = bpe.byte_order()
        return [*single, *(name + bpe.END for name in single), *(m.replace(" ", "") for m in self._merges)]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._names)}

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        pairs = (m.partition(" ") for m in self._merges)
        return {(first, second): rank for rank, (first, _, second) in enumerate(pairs)}

    @cached_property
    def _known(self) -> dict[str, tuple[int, ...]]:
        return {}

    def _word(self, word: str) -> tuple[int, ...]:
        found = self._known.get(word)
        if found is None:
            parts = bpe.pieces(word)
            while len(parts) > 1:
                rank, best = min((self._ranks.get(pair, len(self._ranks)), pair) for pair in itertools.pairwise(parts))
                if rank == len(self._ranks):
                    break
                parts = bpe.merge(parts, *best)
            found = tuple(self._ids[part] for part in parts)
            if len(self._known) < _REMEMBERED and len(word) < _LONGEST_WORD:
                self._known[word] = found
        return found
