"""A plain transformer over text tokens, with the blocks of the ViT: the text tower of CLIP and SigLIP.

Token and position embeddings are added, pre-norm blocks and a final LayerNorm follow, and one token becomes the feature
vector of the text:

- CLIP (https://arxiv.org/abs/2103.00020) attends causally and reads the end-of-text token, which has the largest id;
- SigLIP (https://arxiv.org/abs/2303.15343) attends in both directions, to the padding too, and reads the last position.

Legend: B batch, N tokens, L tokens at most, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.layers import Activation, Block
from vitrail.models.validate import DEEPEST, LARGEST, MOST_CLASSES, check_heads


@dataclass(frozen=True)
class TextConfig:
    width: int
    depth: int
    heads: int
    mlp: int
    vocab: int  # token ids, V
    length: int  # tokens of a text at most, L
    causal: bool = True  # a token attends only to itself and the tokens before it
    pool: Literal["end", "last"] = "end"  # the token that is read: end-of-text, or the last position
    act: Activation = "gelu"
    eps: float = 1e-6  # of LayerNorm

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "mlp", "vocab", "length"):
            value, most = getattr(self, name), {"depth": DEEPEST, "vocab": MOST_CLASSES}.get(name, LARGEST)
            if not 1 <= value <= most:
                raise UserError(f"'{name}' of the text tower must be from 1 to {most:,}, but it is {value}.")
        check_heads((self.width,), (self.heads,))
        if self.pool == "end" and not self.causal:
            raise UserError("A text tower that reads the end-of-text token must be causal: padding follows that token.")


class CausalMask(nn.Module):
    """The bias on attention logits that hides later tokens; it takes the place of a relative position bias."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, keep: Tensor | None = None) -> Tensor:
        """The bias of all pairs of tokens, (N, N), or of those with indices `keep`, (n,)."""
        order = torch.arange(self.length) if keep is None else keep
        hidden = order[:, None] < order[None, :]
        return torch.zeros(hidden.shape, device=order.device).masked_fill(hidden, float("-inf"))


class TextTower(nn.Module):
    """Token ids (B, N) to feature vectors (B, D): `tokens`, each of `blocks`, `pooled`."""

    def __init__(self, config: TextConfig):
        super().__init__()
        c = self.config = config
        self.token_embed = nn.Embedding(c.vocab, c.width)
        self.pos_embed = nn.Parameter(torch.zeros(1, c.length, c.width))
        mask: Any = CausalMask(c.length) if c.causal else None
        self.blocks = nn.ModuleList(
            Block(c.width, c.heads, c.mlp, relative=mask, act=c.act, eps=c.eps) for _ in range(c.depth)
        )
        self.norm = nn.LayerNorm(c.width, c.eps)
        if not self.norm.weight.is_meta:
            self._initialise()

    def tokens(self, tokens: Tensor) -> Tensor:
        """The input of the blocks: (B, N, D)."""
        c = self.config
        if tokens.shape[1] > c.length or (c.pool == "last" and tokens.shape[1] != c.length):
            least = "exactly" if c.pool == "last" else "at most"
            raise UserError(f"A text must have {least} {c.length} tokens, but got {tokens.shape[1]}.")
        return self.token_embed(tokens) + self.pos_embed[:, : tokens.shape[1]]

    def pooled(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The normalised output at the token that stands for the text: (B, D)."""
        if self.config.pool == "last":
            return self.norm(x[:, -1])
        end = tokens.argmax(dim=1)[:, None, None]  # end-of-text has the largest id
        # Not `take_along_dim`, which fixes the batch size of an exported graph.
        return self.norm(x.gather(1, end.expand(-1, 1, x.shape[2]))[:, 0])

    def _initialise(self) -> None:
        """As the blocks of the ViT; embeddings as in CLIP."""
        nn.init.normal_(self.token_embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.01)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in block.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
                    nn.init.zeros_(layer.bias)
            nn.init.xavier_uniform_(block.attn.qkv.weight, gain=2**0.5)  # q, k and v are stacked in one matrix
