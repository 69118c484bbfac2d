"""ViT format of Hugging Face transformers: ViT, DeiT, ViT-MAE, ViT-MSN, DINOv2 with and without registers, and CLIP's
image tower (`clip.py`).

Since transformers 5 the names in files and in modules differ. Both are read; those of files, which every version
understands, are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.data.preprocess import Preprocess, Resizing
from vitrail.errors import UserError
from vitrail.models.layers import Activation
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import clip
from vitrail.weights.key_tables import count_blocks, fuse, inverse, key_table, rename, split_qkv
from vitrail.weights.sidecar import Sidecar

MARKER = r"embeddings\.(?:patch_embeddings\.projection|patch_embedding)\.weight"

ACT: Activation = "gelu"

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
# The names of activations in `config.json`; the first of each is written.
_ACTS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_FILE, _MODULE = "encoder.layer.{}.", "layers.{}."


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    if clip.MARKER in tensors:
        return clip.read(tensors)
    depth = count_blocks(tensors, r"(?:encoder\.layer|layers)\.(\d+)\.")
    table = inverse(_TOP) | inverse(_TWO_HEADS) | layer_table(depth, _FILE, _MODULE)
    return fuse(rename(tensors, table))


def layer_table(depth: int, *prefixes: str) -> dict[str, str]:
    """Their names of transformer layers, in files and in modules, to ours; `prefixes` contain {} for the number."""
    table: dict[str, str] = {}
    for block in (_VIT, _DINOV2, *_MLP.values(), _MODULES):
        for where in prefixes:
            table |= inverse(key_table(depth, {}, block, where))
    return table


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under the names of their files.

    DINOv2's head reads the class token and the patch average: a head on the class token alone is padded with zeros.
    """
    if config.stem == "clip":
        return clip.write(state, config)
    theirs = split_qkv(state)
    kind = _model_type(config)
    if kind.startswith("dinov2"):
        if config.pool == "cls" and config.classes:
            theirs["head.weight"] = torch.cat([state["head.weight"], torch.zeros_like(state["head.weight"])], dim=1)
        if config.registers:
            theirs["mask_token"] = torch.zeros(1, config.width)
    block = _DINOV2 | _MLP["swiglu" if config.act == "swiglu" else "gelu"] if kind.startswith("dinov2") else _VIT
    top = _TOP | _TWO_HEADS if kind == "deit" else _TOP
    named = rename(theirs, key_table(config.depth, top, block, _FILE))
    return {name if "classifier." in name else f"{kind}.{name}": value for name, value in named.items()}


def unsupported(config: ViTConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    if config.stem == "clip":
        return clip.unsupported(config)
    parts = {
        f"pooling '{config.pool}'": config.pool not in ("cls", "cls_dist", "cls_gap"),
        "a hidden tanh layer before the head": config.head != "linear",
        "LayerScale with a distillation token": config.layer_scale and config.pool == "cls_dist",
        "registers without LayerScale": config.registers and not config.layer_scale,
        "gated MLPs without LayerScale": config.act == "swiglu" and not config.layer_scale,
        "a head on the patch average without LayerScale": config.pool == "cls_gap" and not config.layer_scale,
        f"an MLP of {config.mlp} for a width of {config.width}": config.layer_scale and _mlp_ratio(config) is None,
    }
    return next((what for what, there in parts.items() if there), None)


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ViT that only `config.json` has."""
    return {"heads": document.get("num_attention_heads"), "act": activation(document)}


def activation(document: Mapping[str, Any]) -> Activation:
    """The activation that `config.json` names."""
    name = document.get("hidden_act", "gelu")
    if name not in _ACTS:
        raise UserError(f"Its activation is {name!r}, but a ViT of vitrail has {', '.join(_ACTS)}.")
    return _ACTS[name]


def hf_config(config: ViTConfig) -> dict[str, Any]:
    """A ViT for `config.json`."""
    common = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "patch_size": config.patch,
        "hidden_act": act_name(config.act),
        "layer_norm_eps": config.eps,
    }
    if config.stem == "clip":
        return clip.hf_config(config) | common
    kind = _model_type(config)
    architecture = {
        "vit": "ViTForImageClassification",
        "deit": "DeiTForImageClassificationWithTeacher",
        "dinov2": "Dinov2ForImageClassification",
        "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    }[kind]
    document: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        **common,
        "qkv_bias": True,
    }
    if config.layer_scale:
        document |= {"mlp_ratio": _mlp_ratio(config), "use_swiglu_ffn": config.act == "swiglu", "use_mask_token": False}
        document |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        document |= {"intermediate_size": config.mlp}
    return document


def act_name(act: Activation) -> str:
    """The name of an activation in `config.json`."""
    return next((theirs for theirs, ours in _ACTS.items() if ours == act), "gelu")


def sidecar_files(
    architecture: Mapping[str, Any], classes: tuple[str, ...], preprocess: Preprocess
) -> dict[str, dict[str, Any]]:
    """The contents of `config.json`, including `architecture`, and of `preprocessor_config.json`."""
    h, w = preprocess.img_size
    channels = preprocess.channels
    document = {
        **architecture,
        "image_size": h if h == w else [h, w],
        "num_channels": channels,
        "id2label": {str(i): name for i, name in enumerate(classes)},
        "label2id": {name: i for i, name in enumerate(classes)},
    }
    resized = {"height": int(h / preprocess.crop), "width": int(w / preprocess.crop)}
    # We resize with the aspect ratio kept and crop. Their processors can express that for square sizes only.
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
    if preprocess.fit == "pad":
        document["image_size"] = [h, w]
        kind = "Detr" if architecture["model_type"] == "detr" else "Yolos"
        processor |= {"image_processor_type": f"{kind}ImageProcessor", "do_center_crop": False, "do_pad": True}
        processor |= {"size": {"max_height": h, "max_width": w}, "pad_size": {"height": h, "width": w}}
    return {"config.json": document, "preprocessor_config.json": processor}


def own_part(document: dict[str, Any]) -> dict[str, Any]:
    """The part of `config.json` about the image model: all of it, the image tower of a CLIP, or DETR's backbone too."""
    kind = str(document.get("model_type", ""))
    if kind == "detr":
        return {**document, **(document.get("backbone_config") or {}), "id2label": document.get("id2label")}
    if kind.startswith(("clip", "siglip")):
        usual = clip.DEFAULTS | ({} if kind.startswith("clip") else clip.SIGLIP)
        return {**usual, **document, **(document.get("vision_config") or {})}
    return document


def read_sidecar(document: Mapping[str, Any], processor: Mapping[str, Any], fields: Mapping[str, Any]) -> Sidecar:
    """The content of `config.json` and `preprocessor_config.json`; `fields` are the family's `hf_fields`."""
    labels = document.get("id2label") or {}
    names = [str(labels[str(i)]) for i in range(len(labels)) if str(i) in labels]
    if names == [f"LABEL_{i}" for i in range(len(names))]:  # placeholders of transformers
        names = []
    crop = None
    if processor:
        resized, cropped = _edge(processor.get("size")), _edge(processor.get("crop_size"))
        center = processor.get("do_center_crop")
        crop = cropped / resized if resized and cropped and center and cropped <= resized else 1.0
    return Sidecar(
        fields=fields,
        img_size=document.get("image_size") or _output_size(processor),
        classes=tuple(names),
        mean=processor.get("image_mean"),
        std=processor.get("image_std"),
        crop=crop,
        interpolation=next((name for name, number in _RESAMPLE.items() if number == processor.get("resample")), None),
        eps=document.get("layer_norm_eps"),
        text=document.get("text_config") or {},
    )


def check_act(document: Mapping[str, Any]) -> None:
    """Rejects activations other than GELU."""
    if document.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"Its activation is {document['hidden_act']!r}, but vitrail's models have GELU.")


def _mlp_ratio(config: ViTConfig) -> int | None:
    """The integer from which DINOv2's classes derive the hidden width; None if there is none."""

    def hidden(ratio: int) -> int:
        full = config.width * ratio
        return full if config.act != "swiglu" else (int(full * 2 / 3) + 7) // 8 * 8

    return next((ratio for ratio in range(1, 33) if hidden(ratio) == config.mlp), None)


def _output_size(processor: Mapping[str, Any]) -> Any:
    """The output size of their processor, for models of any size, whose `config.json` has none."""
    size = processor.get("crop_size" if processor.get("do_center_crop") else "size")
    if isinstance(size, Mapping):
        return size.get("shortest_edge") or [size["height"], size["width"]]
    return size


def _edge(size: Any) -> int | None:
    """The shorter side of a size in one of their notations: a number or a dictionary."""
    if isinstance(size, Mapping):
        size = size.get("shortest_edge") or min(size.get("height", 0), size.get("width", 0))
    return size if isinstance(size, int) and size > 0 else None


def _model_type(config: ViTConfig) -> str:
    if not config.layer_scale:
        return "deit" if config.pool == "cls_dist" else "vit"
    return "dinov2_with_registers" if config.registers else "dinov2"
