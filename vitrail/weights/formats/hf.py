"""Hugging Face transformers: ViT, DeiT, ViT-MAE, ViT-MSN, and DINOv2 with and without registers.

Their files have other names than their modules since transformers 5; both are read, and those of the files are written,
which every version understands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.data.preprocess import Preprocess, Resizing
from vitrail.errors import UserError
from vitrail.models.vit import ViTConfig
from vitrail.weights.key_tables import count_blocks, inverse, join, rename, split_qkv, stems
from vitrail.weights.sidecar import Beside

MARKER = "embeddings.patch_embeddings.projection.weight"

_TOP = {
    "cls_token": "embeddings.cls_token",
    "dist_token": "embeddings.distillation_token",
    "reg_token": "embeddings.register_tokens",
    "mask_token": "embeddings.mask_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
}
_TWO_HEADS = {"head": "cls_classifier", "head_dist": "distillation_classifier"}
_ATTENTION = {
    "attn.q": "attention.attention.query",
    "attn.k": "attention.attention.key",
    "attn.v": "attention.attention.value",
    "attn.proj": "attention.output.dense",
}
_VIT = _ATTENTION | {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_DINOV2 = _ATTENTION | {
    "norm1": "norm1",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2": "norm2",
    "ls2.gamma": "layer_scale2.lambda1",
}
_MLP = {
    "gelu": {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
    "swiglu": {"mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"},
}
_MODULES = {
    "attn.q": "attention.q_proj",
    "attn.k": "attention.k_proj",
    "attn.v": "attention.v_proj",
    "attn.proj": "attention.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
_RESAMPLE: dict[Resizing, int] = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # Pillow's numbers
_FILE, _MODULE = "encoder.layer.{}.", "layers.{}."


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    depth = count_blocks(tensors, r"(?:encoder\.layer|layers)\.(\d+)\.")
    table = inverse(_TOP) | inverse(_TWO_HEADS)
    for block in (_VIT, _DINOV2, *_MLP.values(), _MODULES):
        for where in (_FILE, _MODULE):
            table |= inverse(stems(depth, {}, block, where))
    return join(rename(tensors, table))


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under the names of their files.

    DINOv2's head reads the class token and the average of the patches: one of the class token alone gets zeros.
    """
    theirs = split_qkv(state)
    kind = _model_type(config)
    if kind.startswith("dinov2"):
        if config.pool == "cls":
            theirs["head.weight"] = torch.cat([state["head.weight"], torch.zeros_like(state["head.weight"])], dim=1)
        if config.registers:
            theirs["mask_token"] = torch.zeros(1, config.width)
    block = _DINOV2 | _MLP[config.act] if kind.startswith("dinov2") else _VIT
    top = _TOP | _TWO_HEADS if kind == "deit" else _TOP
    named = rename(theirs, stems(config.depth, top, block, _FILE))
    return {name if "classifier." in name else f"{kind}.{name}": value for name, value in named.items()}


def cannot(config: ViTConfig) -> str | None:
    """What of a model the format has no place for."""
    parts = {
        f"pooling '{config.pool}'": config.pool not in ("cls", "cls_dist", "cls_gap"),
        "a hidden tanh layer before the head": config.head != "linear",
        "LayerScale beside a distillation token": config.layer_scale and config.pool == "cls_dist",
        "registers without LayerScale": config.registers and not config.layer_scale,
        "gated MLPs without LayerScale": config.act != "gelu" and not config.layer_scale,
        "a head on the average of the patches without LayerScale": config.pool == "cls_gap" and not config.layer_scale,
        f"an MLP of {config.mlp} for a width of {config.width}": config.layer_scale and _mlp_ratio(config) is None,
    }
    return next((what for what, there in parts.items() if there), None)


def hf_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` says of a ViT and tensors do not show."""
    check_act(document)
    return {"heads": document.get("num_attention_heads")}


def hf_document(config: ViTConfig) -> dict[str, Any]:
    """What `config.json` must say of a ViT."""
    kind = _model_type(config)
    architecture = {
        "vit": "ViTForImageClassification",
        "deit": "DeiTForImageClassificationWithTeacher",
        "dinov2": "Dinov2ForImageClassification",
        "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    }[kind]
    about: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "patch_size": config.patch,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
    }
    if config.layer_scale:
        about |= {"mlp_ratio": _mlp_ratio(config), "use_swiglu_ffn": config.act == "swiglu", "use_mask_token": False}
        about |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        about |= {"intermediate_size": config.mlp}
    return about


def documents(about: Mapping[str, Any], classes: tuple[str, ...], preprocess: Preprocess) -> dict[str, dict[str, Any]]:
    """The files that stand beside the tensors: `config.json`, with what it says of the architecture, and
    `preprocessor_config.json`."""
    h, w = preprocess.img_size
    channels = preprocess.channels
    document = {
        **about,
        "image_size": h if h == w else [h, w],
        "num_channels": channels,
        "id2label": {str(i): name for i, name in enumerate(classes)},
        "label2id": {name: i for i, name in enumerate(classes)},
    }
    resized = {"height": int(h / preprocess.crop), "width": int(w / preprocess.crop)}
    # Ours keeps the shape of a picture and crops it. Theirs has no words for that but for squares, the usual case.
    processor = {
        "image_processor_type": "BitImageProcessor" if h == w else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": resized["height"]} if h == w else resized,
        "do_center_crop": h == w or preprocess.crop != 1,
        "crop_size": {"height": h, "width": w},
        "resample": _RESAMPLE[preprocess.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean) * (channels if len(preprocess.mean) == 1 else 1),
        "image_std": list(preprocess.std) * (channels if len(preprocess.std) == 1 else 1),
    }
    return {"config.json": document, "preprocessor_config.json": processor}


def settings(document: Mapping[str, Any], processor: Mapping[str, Any], fields: Mapping[str, Any]) -> Beside:
    """What `config.json` and `preprocessor_config.json` say; `fields` is what the first says of the architecture."""
    labels = document.get("id2label") or {}
    names = [str(labels[str(i)]) for i in range(len(labels)) if str(i) in labels]
    if names == [f"LABEL_{i}" for i in range(len(names))]:  # what transformers writes where there are none
        names = []
    crop = None
    if processor:
        whole, part = _edge(processor.get("size")), _edge(processor.get("crop_size"))
        crop = part / whole if whole and part and processor.get("do_center_crop") and part <= whole else 1.0
    return Beside(
        fields=fields,
        img_size=document.get("image_size") or _made(processor),
        classes=tuple(names),
        mean=processor.get("image_mean"),
        std=processor.get("image_std"),
        crop=crop,
        interpolation=next((name for name, number in _RESAMPLE.items() if number == processor.get("resample")), None),
        eps=document.get("layer_norm_eps"),
    )


def check_act(document: Mapping[str, Any]) -> None:
    """Refuses another activation than that of our transformers."""
    if document.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"Its activation is {document['hidden_act']!r}, but vitrail's models have GELU.")


def _mlp_ratio(config: ViTConfig) -> int | None:
    """The whole number from which DINOv2's classes work out the hidden width; None if there is none."""

    def hidden(ratio: int) -> int:
        full = config.width * ratio
        return full if config.act == "gelu" else (int(full * 2 / 3) + 7) // 8 * 8

    return next((ratio for ratio in range(1, 33) if hidden(ratio) == config.mlp), None)


def _made(processor: Mapping[str, Any]) -> Any:
    """The size of the images that their processor makes: networks that take any have none in their `config.json`."""
    size = processor.get("crop_size" if processor.get("do_center_crop") else "size")
    if isinstance(size, Mapping):
        return size.get("shortest_edge") or [size["height"], size["width"]]
    return size


def _edge(size: Any) -> int | None:
    """The shorter side of a size as their processors write it: a number, or a dictionary of one kind or another."""
    if isinstance(size, Mapping):
        size = size.get("shortest_edge") or min(size.get("height", 0), size.get("width", 0))
    return size if isinstance(size, int) and size > 0 else None


def _model_type(config: ViTConfig) -> str:
    if not config.layer_scale:
        return "deit" if config.pool == "cls_dist" else "vit"
    return "dinov2_with_registers" if config.registers else "dinov2"
