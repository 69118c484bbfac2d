"""CLIP's image tower in transformers: `CLIPVisionModel`, and the tower in a `CLIPModel`.

The text tower and the projections to the joint space are left out. timm's towers have our names: see `timm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.vit import ViTConfig
from vitrail.weights.key_tables import count_blocks, fuse, inverse, key_table, rename, split_qkv

MARKER = "embeddings.patch_embedding.weight"

# Their defaults, which a nested `vision_config` may leave out.
DEFAULTS = {"num_attention_heads": 12, "image_size": 224, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}

TOP = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding.weight",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm_pre": "pre_layrnorm",  # their spelling
    "norm": "post_layernorm",
}
BLOCK = {
    "norm1": "layer_norm1",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
WHERE = "encoder.layers.{}."


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    if "classifier.weight" in tensors:
        raise UserError(
            "CLIPForImageClassification averages tokens before the final norm. Load its vision_model alone."
        )
    depth = count_blocks(tensors, r"encoder\.layers\.(\d+)\.")
    table = inverse(key_table(depth, TOP, BLOCK, WHERE))
    state = fuse(rename(tensors, table))
    state.pop("embeddings.position_ids", None)  # indices, in files of older versions
    state["cls_token"] = state["cls_token"].reshape(1, 1, -1)
    state["pos_embed"] = state["pos_embed"].unsqueeze(0)
    return state


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under their names."""
    theirs = split_qkv(state)
    theirs["cls_token"] = theirs["cls_token"].flatten()
    theirs["pos_embed"] = theirs["pos_embed"][0]
    named = rename(theirs, key_table(config.depth, TOP, BLOCK, WHERE))
    return {f"vision_model.{name}": value for name, value in named.items()}


def unsupported(config: ViTConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    parts = {
        "a classification head on CLIP's image tower": config.classes,
        f"pooling '{config.pool}' with CLIP's stem": config.pool != "cls",
        "registers with CLIP's stem": config.registers,
        "LayerScale with CLIP's stem": config.layer_scale,
        "gated MLPs with CLIP's stem": config.act == "swiglu",
    }
    return next((what for what, there in parts.items() if there), None)


def hf_config(config: ViTConfig) -> dict[str, Any]:
    """The tower for `config.json`."""
    return {"architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "intermediate_size": config.mlp}
