"""YOLOS in transformers: `YolosForObjectDetection`, a ViT with detection tokens.

Their position table holds the class token, the patches and the detection tokens; ours is split between the backbone and
the head. Since transformers 5 the middle positions have another name in modules than in files; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError
from vitrail.models.dense import BACKBONE, HEAD, DenseConfig
from vitrail.models.heads.yolos import TOKENS
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import hf, tensor_shape, vit
from vitrail.weights.key_tables import rename
from vitrail.weights.sidecar import Sidecar

MARKER = r"embeddings\.detection_tokens"
EPS = 1e-12  # their default

_POSITIONS = "embeddings.position_embeddings"
_HEAD = {  # theirs -> ours
    "embeddings.detection_tokens": "det_token",
    "encoder.mid_position_embeddings": "mid_pos",
    "encoder.interpolation.mid_position_embeddings": "mid_pos",
    **{f"class_labels_classifier.layers.{i}": f"class_embed.layers.{i}" for i in range(3)},
    **{f"bbox_predictor.layers.{i}": f"bbox_embed.layers.{i}" for i in range(3)},
}


def _of_head(name: str) -> bool:
    return name in _HEAD or name.rpartition(".")[0] in _HEAD


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    head = rename({name: tensors[name] for name in tensors if _of_head(name)}, _HEAD)
    tokens = head["det_token"].shape[1]
    if tokens != TOKENS:
        raise UserError(f"It has {tokens} detection tokens, but a YOLOS of vitrail has {TOKENS}.")
    body = {name: tensors[name] for name in tensors if not _of_head(name)}
    positions = body[_POSITIONS]
    body[_POSITIONS], head["det_pos"] = positions[:, :-TOKENS], positions[:, -TOKENS:]
    state = hf.read(body)
    return {BACKBONE + name: value for name, value in state.items()} | {HEAD + name: v for name, v in head.items()}


def write(state: Mapping[str, Tensor], config: DenseConfig) -> dict[str, Tensor]:
    """Our tensors under the names of their files."""
    assert isinstance(config.body, ViTConfig)
    body = hf.write({n.removeprefix(BACKBONE): v for n, v in state.items() if n.startswith(BACKBONE)}, config.body)
    head = {n.removeprefix(HEAD): v for n, v in state.items() if n.startswith(HEAD)}
    at = f"vit.{_POSITIONS}"
    body[at] = torch.cat([body[at], head.pop("det_pos")], dim=1)
    names = {ours: theirs for theirs, ours in _HEAD.items() if ".interpolation." not in theirs}
    for name, value in rename(head, names).items():
        body[name if "classifier" in name or "predictor" in name else f"vit.{name}"] = value
    return body


def unsupported(config: DenseConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    if not config.head.startswith("yolos"):
        return f"the head {config.head}"
    assert isinstance(config.body, ViTConfig)
    return vit.FORMATS["hf"].unsupported(config.body)


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: DenseConfig | None) -> DenseConfig:
    """The configuration, from tensor shapes and the sidecar, which has the image size of the position table."""
    body = {n.removeprefix(BACKBONE): value for n, value in state.items() if n.startswith(BACKBONE)}
    patch = tensor_shape(where, "YOLOS", body, "patch_embed.proj.weight", 4)[-1]
    size: Size | None = sidecar.img_size
    if size is not None:  # 800x1333 stands for 50x83 patches of 16 pixels
        size = size[0] // patch * patch, size[1] // patch * patch
        sidecar = replace(sidecar, img_size=size)
    config = vit.architecture(where, body, sidecar, model.body if model is not None else None)  # type: ignore[arg-type]
    numerics = {"eps": EPS if sidecar.eps is None else sidecar.eps, "act": sidecar.fields.get("act", "gelu")}
    config = replace(config, resample="bicubic_plain", **numerics)
    classes = tensor_shape(where, "YOLOS", state, f"{HEAD}class_embed.layers.2.weight", 2)[0] - 1
    head = "yolos-mid" if f"{HEAD}mid_pos" in state else "yolos"
    return DenseConfig(config, head, classes, config.img_size, config.channels, config.drop, config.drop_path)


def hf_config(config: DenseConfig) -> dict[str, Any]:
    """A YOLOS for `config.json`."""
    assert isinstance(config.body, ViTConfig)
    return hf.hf_config(config.body) | {
        "architectures": ["YolosForObjectDetection"],
        "model_type": "yolos",
        "num_detection_tokens": TOKENS,
        "use_mid_position_embeddings": config.head == "yolos-mid",
    }
