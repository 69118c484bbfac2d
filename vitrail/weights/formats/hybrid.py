"""Hybrid formats: timm (our names), Hugging Face's `ViTHybridForImageClassification`, and the authors' `.npz` files
(`R50+ViT-B_16.npz` and AugReg's).

The ViT behind the ResNet is named as in the ViT formats. The authors count ResNet blocks from 1, and store kernels
output last and scales with four dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitrail.models.hybrid import CONFIGS, HybridConfig
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import Format, FormatSpec, bit, check_match, hf, identity, npz, pattern, tensor_shape, vit
from vitrail.weights.key_tables import inverse, new_name
from vitrail.weights.sidecar import Sidecar

_RESNET = "patch_embed.backbone."
_BLOCK = re.compile(r"stages\.(\d+)\.blocks\.(\d+)\.")

_HF_RESNET = "embeddings.patch_embeddings.backbone.bit."
_HF = {
    "stem.conv.": "embedder.convolution.",
    "stem.norm.": "embedder.norm.",
    "stages.": "encoder.stages.",
    ".blocks.": ".layers.",
}
_HF_KIND = {
    "layer_type": "bottleneck",
    "global_padding": "same",
    "embedding_dynamic_padding": True,
    "hidden_act": "relu",
}

_NPZ_STEM = {"conv": "conv_root", "norm": "gn_root"}
_NPZ_UNIT = {
    "conv1": "conv1",
    "norm1": "gn1",
    "conv2": "conv2",
    "norm2": "gn2",
    "conv3": "conv3",
    "norm3": "gn3",
    "downsample.conv": "conv_proj",
    "downsample.norm": "gn_proj",
}
_NPZ_BLOCK = re.compile(r"block(\d+)/unit(\d+)/")


def _read_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {}
    for name, value in hf.read(tensors).items():
        if name.startswith(_HF_RESNET):
            name = name.removeprefix(_HF_RESNET)
            for ours, theirs in _HF.items():
                name = name.replace(theirs, ours)
            name = _RESNET + name
        state[name] = value
    return state


def _write_hf(state: Mapping[str, Tensor], config: HybridConfig) -> dict[str, Tensor]:
    resnet, rest = _split(state)
    named = hf.write(rest, _vit(config))
    for name, value in resnet.items():
        for ours, theirs in _HF.items():
            name = name.replace(ours, theirs)
        named[f"vit.{_HF_RESNET}{name}"] = value
    return named


def _read_npz(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    read = npz.read(tensors)
    place = f"{_RESNET}stem." if any(_NPZ_BLOCK.match(name) for name in read) else _RESNET
    stem, unit = {theirs: place + ours for ours, theirs in _NPZ_STEM.items()}, inverse(_NPZ_UNIT)
    state = {}
    for name, value in read.items():
        if block := _NPZ_BLOCK.match(name):
            place = f"{_RESNET}stages.{int(block[1]) - 1}.blocks.{int(block[2]) - 1}."
            name = place + new_name(name[block.end() :], unit)
        else:
            name = new_name(name, stem)
        if name.startswith(_RESNET) and value.ndim == 4:
            value = value.flatten() if "norm" in name else value.permute(3, 2, 0, 1)
        state[name] = value
    return state


def _write_npz(state: Mapping[str, Tensor], config: HybridConfig) -> dict[str, Tensor]:
    resnet, rest = _split(state)
    named = npz.write(rest, _vit(config))
    for name, value in resnet.items():
        if block := _BLOCK.match(name):
            name = f"block{int(block[1]) + 1}/unit{int(block[2]) + 1}/{new_name(name[block.end() :], _NPZ_UNIT)}"
        else:
            name = new_name(name.removeprefix("stem."), _NPZ_STEM)
        scale = value.ndim == 1
        name = name.replace(".weight", "/scale" if scale else "/kernel").replace(".bias", "/bias")
        named[name] = value.reshape(1, 1, 1, -1) if scale else value.permute(2, 3, 1, 0).contiguous()
    return named


def _split(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the ResNet, without prefix, and those of the ViT."""
    resnet = {name.removeprefix(_RESNET): value for name, value in state.items() if name.startswith(_RESNET)}
    return resnet, {name: value for name, value in state.items() if not name.startswith(_RESNET)}


def _vit(config: HybridConfig) -> ViTConfig:
    """The ViT that reads the ResNet's feature map."""
    h, w = (side * config.patch for side in config.grid)
    features = config.widths[-1] if config.widths else config.first
    return ViTConfig(
        config.width,
        config.depth,
        config.heads,
        config.mlp,
        config.patch,
        (h, w),
        features,
        config.classes,
        act=config.act,
        eps=config.eps,
    )


def _unsupported(config: HybridConfig) -> str | None:
    if config.widths and config.widths[0] == config.first:
        return "a first stage as wide as its stem"  # theirs always has a projection shortcut there
    return bit.uneven(config.widths) or pattern(config)


def _unsupported_hf(config: HybridConfig) -> str | None:
    return _unsupported(config) if config.widths else "a ResNet without stages"


FORMATS: dict[Format, FormatSpec] = {
    "timm": FormatSpec(r"patch_embed\.backbone\.(?:stem\.)?conv\.weight", identity, identity, _unsupported),
    "hf": FormatSpec(
        re.escape(_HF_RESNET) + r"embedder\.convolution\.weight",
        _read_hf,
        _write_hf,
        _unsupported_hf,
        resample="bicubic_plain",
    ),
    "npz": FormatSpec(r"conv_root/kernel", _read_npz, _write_npz, pattern, act="gelu_tanh", resample="linear"),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: HybridConfig | None) -> HybridConfig:
    """The configuration, from tensor shapes; these do not show heads and groups."""
    resnet, rest = _split(state)
    widths, depths = bit.stages(where, "Hybrid", resnet, "stages")
    first, channels, _, _ = tensor_shape(where, "Hybrid", resnet, "stem.conv.weight" if widths else "conv.weight", 4)
    width = tensor_shape(where, "Hybrid", rest, "patch_embed.proj.weight", 4)[0]
    seen = {"width": width, "first": first, "widths": widths, "depths": depths}
    if model is not None:
        check_match(where, seen, vars(model))
    listed = [config for config in CONFIGS.values() if vars(config) | seen == vars(config)]
    similar = listed if model is None else [model]
    stride = 4 * 2 ** max(len(widths) - 1, 0)
    h, w = (max(side // stride, 1) for side in sidecar.img_size or (1, 1))
    known = {"heads": next((config.heads for config in similar), None), **sidecar.fields}
    inner = Sidecar(known, (h, w) if sidecar.img_size else None)
    encoder = vit.architecture(where, rest, inner, None if model is None else _vit(model))
    return HybridConfig(
        width=width,
        depth=encoder.depth,
        heads=encoder.heads,
        mlp=encoder.mlp,
        widths=widths,
        depths=depths,
        first=first,
        groups=bit.groups(where, "Hybrid", (4 * first, *widths), sidecar, similar),
        patch=encoder.patch,
        img_size=(encoder.img_size[0] * stride, encoder.img_size[1] * stride),
        channels=channels,
        classes=encoder.classes,
    )


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Heads and groups, which tensors do not show."""
    resnet = document.get("backbone_config") or _HF_KIND  # their default
    bit.check_hf(resnet, _HF_KIND)
    return {"groups": resnet.get("num_groups"), **hf.hf_fields(document)}


def hf_config(config: HybridConfig) -> dict[str, Any]:
    """The architecture for `config.json`."""
    encoder = _vit(config)
    return {
        **hf.hf_config(encoder),
        "architectures": ["ViTHybridForImageClassification"],
        "model_type": "vit-hybrid",
        "backbone_config": {**bit.hf_resnet(config, _HF_KIND), "out_features": [f"stage{len(config.widths)}"]},
        "backbone_featmap_shape": [1, encoder.channels, *encoder.img_size],
    }
