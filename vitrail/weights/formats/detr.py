"""DETR in transformers: `DetrForObjectDetection` on the last feature map of a DINOv2, a ViT with LayerScale.

The published models have a ResNet with frozen BatchNorm as backbone, which is no family of vitrail: they are refused.
transformers' BiT backbone gives the map before the final norm, ours after it, so DETR on a BiT stays in our own format.
Their decoder also masks the padding of a batch, which ours, like YOLOS, sees as black.

Since transformers 5 the names in files and in modules differ. Both are read; those of files are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.dense import BACKBONE, HEAD, DenseConfig
from vitrail.models.heads.detr import HEADS, QUERIES, sizes
from vitrail.models.position import Interpolation
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import hf, tensor_shape, vit
from vitrail.weights.sidecar import Sidecar

MARKER = r"query_position_embeddings\.weight"

_BODY = re.compile(r"backbone\.(?:conv_encoder\.)?model\.")
_FIXED = {  # what no tensor shows, in `config.json`
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "activation_function": "relu",
    "position_embedding_type": "sine",
}


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    body = {_BODY.sub("", name): tensors[name] for name in tensors if _BODY.match(name)}
    body.pop("embeddings.mask_token", None)  # only pre-training needs it
    if not any(re.fullmatch(hf.MARKER, name) for name in body):
        raise UserError(
            "it is a DETR whose backbone is not a DINOv2. Those with a ResNet, as the published ones, have BatchNorm, "
            "which no backbone of vitrail has."
        )
    head = {_head_name(name): tensors[name] for name in tensors if not _BODY.match(name)}
    state = hf.read(body)
    return {BACKBONE + name: value for name, value in state.items()} | {HEAD + name: v for name, v in head.items()}


def _head_name(name: str) -> str:
    return name.replace(".o_proj.", ".out_proj.").replace(".mlp.fc", ".fc")


def write(state: Mapping[str, Tensor], config: DenseConfig) -> dict[str, Tensor]:
    """Our tensors under the names of their files."""
    assert isinstance(config.body, ViTConfig)
    body = hf.write({n.removeprefix(BACKBONE): v for n, v in state.items() if n.startswith(BACKBONE)}, config.body)
    head = {n.removeprefix(HEAD): v for n, v in state.items() if n.startswith(HEAD)}
    named = {f"model.backbone.conv_encoder.model.{name.partition('.')[2]}": value for name, value in body.items()}
    outer = ("class_labels_classifier.", "bbox_predictor.")
    return named | {name if name.startswith(outer) else f"model.{name}": value for name, value in head.items()}


def unsupported(config: DenseConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    body = config.body
    if not isinstance(body, ViTConfig) or not body.layer_scale:
        return "the head detr on a backbone other than a ViT with LayerScale"
    if body.img_size[0] != body.img_size[1]:
        return "an image that is not square"
    return vit.FORMATS["hf"].unsupported(body)


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: DenseConfig | None) -> DenseConfig:
    """The configuration, from tensor shapes and the sidecar."""
    body = {n.removeprefix(BACKBONE): value for n, value in state.items() if n.startswith(BACKBONE)}
    config = vit.architecture(where, body, sidecar, model.body if model is not None else None)  # type: ignore[arg-type]
    act = config.act if config.act == "swiglu" else sidecar.fields.get("act", "gelu")
    resample: Interpolation = "bicubic" if config.registers else "bicubic_plain"
    config = replace(config, eps=sidecar.eps or 1e-6, act=act, resample=resample)
    classes = tensor_shape(where, "DETR", state, f"{HEAD}class_labels_classifier.weight", 2)[0] - 1
    return DenseConfig(config, "detr", classes, config.img_size, config.channels, config.drop, config.drop_path)


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the backbone that only `config.json` has; `document` includes the backbone's part."""
    for name, value in _FIXED.items():
        if document.get(name, value) != value:
            raise UserError(f"Its {name} is {document[name]!r}, but that of vitrail's DETR is {value!r}.")
    return hf.hf_fields(document)


def hf_config(config: DenseConfig) -> dict[str, Any]:
    """A DETR for `config.json`."""
    assert isinstance(config.body, ViTConfig)
    channels, mlp, layers = sizes(config.body.width)
    backbone = hf.hf_config(config.body) | {
        "image_size": config.img_size[0],
        "num_channels": config.channels,
        "out_features": [f"stage{config.body.depth}"],
    }
    return {
        "architectures": ["DetrForObjectDetection"],
        "model_type": "detr",
        "backbone_config": {name: value for name, value in backbone.items() if name != "architectures"},
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "d_model": channels,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_ffn_dim": mlp,
        "decoder_ffn_dim": mlp,
        "num_queries": QUERIES,
        **_FIXED,
    }
