"""What learns beside an encoder in other libraries' pre-training files, under the names of our modules.

- MAE's decoder: the authors' (https://github.com/facebookresearch/mae) and that of `ViTMAEForPreTraining`;
- SimMIM's decoder and mask token: `ViTForMaskedImageModeling`;
- DINO's head: the authors' (https://github.com/facebookresearch/dino).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from vitrail.weights.formats import hf
from vitrail.weights.key_tables import count_blocks, fuse, inverse, key_table, rename

POSITIONS = "decoder.pos"  # MAE's fixed positions, which our decoder computes

_MAE = {"embed": "decoder_embed", "pos": "decoder_pos_embed", "norm": "decoder_norm", "pred": "decoder_pred"}
_BLOCK = {name: name for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")}
# The second is what transformers 5 writes: it renames "layers" to "encoder.layer", as in its encoders.
_HF_LAYERS = ("decoder_layers.{}.", "decoder_encoder.layer.{}.")
_SIMMIM = {"mask.token": "embeddings.mask_token", "decoder.0": "decoder.0"}
_DINO = {
    "head.last_layer.parametrizations.weight.original0": "head.last_layer.weight_g",
    "head.last_layer.parametrizations.weight.original1": "head.last_layer.weight_v",
}


def read(tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """The method that the tensors were trained by, as in the titles of tasks, and our names; empty if there are none.

    The names in `tensors` are without the prefix of the encoder.
    """
    if "decoder_embed.weight" in tensors:
        return "MAE", _mae(_some(tensors, r"mask_token$|decoder_"))
    if "decoder.decoder_embed.weight" in tensors:
        part = _some(tensors, r"decoder\.")
        return "MAE", _mae({name.removeprefix("decoder."): value for name, value in part.items()})
    if "decoder.0.weight" in tensors:
        return "SimMIM", rename(_some(tensors, r"embeddings\.mask_token$|decoder\."), inverse(_SIMMIM))
    if "head.mlp.0.weight" in tensors:
        return "DINO", rename(_some(tensors, r"head\."), inverse(_DINO))
    return "", {}


def _mae(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    depth = count_blocks(tensors, r"decoder_(?:blocks|layers|encoder\.layer)\.(\d+)\.")
    table = inverse(key_table(depth, _MAE, _BLOCK, "decoder_blocks.{}.")) | hf.layer_table(depth, *_HF_LAYERS)
    return {f"decoder.{name}": value for name, value in fuse(rename(tensors, table)).items()}


def _some(tensors: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
    """The tensors whose names begin as a pattern."""
    return {name: tensors[name] for name in tensors if re.match(pattern, name)}
