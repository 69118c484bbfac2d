"""ViT format of torchvision: `vit_b_16` and its siblings."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitrail.models.layers import Activation
from vitrail.models.vit import ViTConfig
from vitrail.weights.key_tables import count_blocks, inverse, key_table, rename

MARKER = r"conv_proj\.weight"
ACT: Activation = "gelu"

_TOP = {
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj": "conv_proj",
    "norm": "encoder.ln",
    "pre_logits": "heads.pre_logits",
    "head": "heads.head",
}
_BLOCK = {
    "norm1": "ln_1",
    "attn.qkv.weight": "self_attention.in_proj_weight",
    "attn.qkv.bias": "self_attention.in_proj_bias",
    "attn.proj": "self_attention.out_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
}
_OLD_BLOCK = {"mlp.fc1": "mlp.linear_1", "mlp.fc2": "mlp.linear_2"}  # before torchvision 0.12
_WHERE = "encoder.layers.encoder_layer_{}."


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    depth = count_blocks(tensors, r"encoder\.layers\.encoder_layer_(\d+)\.")
    old = key_table(depth, {}, _OLD_BLOCK, _WHERE)
    return rename(tensors, inverse(key_table(depth, _TOP, _BLOCK, _WHERE)) | inverse(old))


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under their names."""
    return rename(state, key_table(config.depth, _TOP, _BLOCK, _WHERE))


def unsupported(config: ViTConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    parts = {
        "registers": config.registers,
        "LayerScale": config.layer_scale,
        "gated MLPs": config.act == "swiglu",
        "QuickGELU": config.act == "quick_gelu",
        f"pooling '{config.pool}'": config.pool != "cls",
    }
    return next((what for what, there in parts.items() if there), None)
