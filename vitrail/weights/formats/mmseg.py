"""ViTs with dense heads in mmsegmentation's names: SETR and Segmenter.

Its ViT has a final LayerNorm only with `final_norm=True`, as Segmenter's. SETR's heads begin with a LayerNorm of their
own, so a final one without scale and shift changes nothing: such files are read with that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.dense import BACKBONE, HEAD, DenseConfig
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import IMAGENET, Format, FormatSpec, vit
from vitrail.weights.sidecar import Sidecar

MARKER = r"decode_head\.(?:conv_seg\.weight|cls_emb)"
_OWN = ("decode_head.", "auxiliary_head.", "neck.")  # parts of a head that has several
_BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv.": "attn.attn.in_proj_",
    "attn.proj": "attn.attn.out_proj",
    "mlp.fc1": "ffn.layers.0.0",
    "mlp.fc2": "ffn.layers.1",
}


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    whole = any(name.startswith(("neck.", "decode_head.up_convs.")) for name in tensors)  # SETR
    found: dict[str, Tensor] = {}
    for name in tensors:
        if name.startswith(BACKBONE):
            found[BACKBONE + _body_name(name.removeprefix(BACKBONE))] = tensors[name]
        elif whole and name.startswith(_OWN):
            found[HEAD + name] = tensors[name]
        elif name.startswith("decode_head."):
            found[HEAD + _block_name(name.removeprefix("decode_head."))] = tensors[name]
    if f"{BACKBONE}norm.weight" not in found and f"{BACKBONE}cls_token" in found:
        like = found[f"{BACKBONE}cls_token"][0, 0]
        found |= {f"{BACKBONE}norm.weight": torch.ones_like(like), f"{BACKBONE}norm.bias": torch.zeros_like(like)}
    return found


def write(state: Mapping[str, Tensor], config: DenseConfig) -> dict[str, Tensor]:
    """Our tensors under their names, for a ViT with `final_norm=True`."""
    whole = config.head.startswith("setr")
    found = {}
    for name, value in state.items():
        if name.startswith(BACKBONE):
            found[BACKBONE + _their_body_name(name.removeprefix(BACKBONE))] = value
        else:
            inner = name.removeprefix(HEAD)
            found[inner if whole else f"decode_head.{_their_block_name(inner)}"] = value
    return found


def unsupported(config: DenseConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    body = config.body
    if not isinstance(body, ViTConfig):
        return "a backbone other than a ViT"
    parts = {
        f"the head {config.head}": not config.head.startswith(("linear", "mask", "setr")),
        f"the pooling {body.pool}": body.pool != "cls",
        f"{body.pos} positions": body.pos != "learned",
        f"the stem {body.stem}": body.stem != "patch",
        "registers": body.registers > 0,
        "LayerScale": body.layer_scale > 0,
        f"the activation {body.act}": body.act != "gelu",
    }
    return next((what for what, there in parts.items() if there), None)


def architecture(
    where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: DenseConfig | ViTConfig | None
) -> DenseConfig:
    """The configuration, from tensor shapes."""
    inner = {name.removeprefix(BACKBONE): value for name, value in state.items() if name.startswith(BACKBONE)}
    like = model.body if isinstance(model, DenseConfig) else model
    body = vit.architecture(where, inner, sidecar, like if isinstance(like, ViTConfig) else None)
    head, classes = _head(where, state)
    return DenseConfig.of(body, (head,), classes, head)


def _head(where: str, state: Mapping[str, Tensor]) -> tuple[str, int]:
    """The name of the head and its classes."""
    if f"{HEAD}cls_emb" in state:
        return "mask", state[f"{HEAD}cls_emb"].shape[1]
    if f"{HEAD}conv_seg.weight" in state:
        return "linear", state[f"{HEAD}conv_seg.weight"].shape[0]
    last = state.get(f"{HEAD}decode_head.conv_seg.weight")
    if last is None:
        raise UserError(f"{where} has a head that vitrail does not know. It reads those of SETR and Segmenter.")
    convs = {name.split(".")[3] for name in state if name.startswith(f"{HEAD}decode_head.up_convs.")}
    if any(name.startswith(f"{HEAD}neck.") for name in state):
        return "setr-mla", last.shape[0]
    return "setr-pup" if len(convs) > 1 else "setr-naive", last.shape[0]


def _body_name(name: str) -> str:
    name = name.replace("patch_embed.projection", "patch_embed.proj")
    name = re.sub(r"^ln1\.", "norm.", name)
    return re.sub(r"^layers\.", "blocks.", _block_name(name))


def _their_body_name(name: str) -> str:
    name = name.replace("patch_embed.proj.", "patch_embed.projection.")
    name = re.sub(r"^norm\.", "ln1.", name)
    return re.sub(r"^blocks\.", "layers.", _their_block_name(name))


def _block_name(name: str) -> str:
    if not name.startswith("layers."):
        return name
    for ours, theirs in _BLOCK.items():
        name = name.replace(f".{theirs}", f".{ours}")
    return name


def _their_block_name(name: str) -> str:
    if not name.startswith(("blocks.", "layers.")):
        return name
    for ours, theirs in _BLOCK.items():
        name = name.replace(f".{ours}", f".{theirs}")
    return name


FORMATS: dict[Format, FormatSpec] = {"mmseg": FormatSpec(MARKER, read, write, unsupported, IMAGENET, task="masks")}
