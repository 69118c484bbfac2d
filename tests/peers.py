"""Reference implementations for parity tests, with random weights: timm, transformers, open_clip, torchvision, JAX.

torchvision's ViT and the authors' JAX model are re-implemented here, because the packages may be missing.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.models.vit import ViTConfig

M = TypeVar("M", bound=nn.Module)

TOLERANCE = 1e-5


def timm(module: str = "timm") -> ModuleType:
    """timm, or one of its modules."""
    _torchvision()
    return importlib.import_module(module)


def transformers() -> ModuleType:
    _torchvision()
    return importlib.import_module("transformers")


def open_clip() -> ModuleType:
    _torchvision()
    return importlib.import_module("open_clip")


def randomise(model: M, seed: int = 0) -> M:
    """Adds noise to every parameter, so that none is zero or one and every omitted part changes the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The maximum absolute difference, relative to the maximum absolute value."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def images(config: ViTConfig) -> Tensor:
    """Two random images for a model."""
    return torch.randn(2, config.channels, *config.img_size, generator=torch.Generator().manual_seed(1))


def shown(config: Any) -> Any:
    """A configuration as tensors show it, without the activation, epsilon and resampling of the weights' source."""
    gelu = {"act": "gelu"} if getattr(config, "act", "swiglu") != "swiglu" else {}
    others = {name: getattr(type(config), name) for name in ("eps", "resample") if name in vars(config)}
    return replace(config, **gelu, **others)


def identical(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts are bit-identical."""
    return old.keys() == new.keys() and all(torch.equal(_bits(old[name]), _bits(new[name])) for name in old)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.int32)


# timm

_TIMM_POOL: dict[str, dict[str, Any]] = {
    "gap": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "gap_norm": {"class_token": False, "global_pool": "avg"},
    "mae": {"global_pool": "avg"},
    "map": {"class_token": False, "global_pool": "map"},
}


def timm_vit(config: ViTConfig, **options: Any) -> nn.Module:
    """timm's model of the same configuration with random weights; the distilled class for `pool="cls_dist"`."""
    gated = config.act == "swiglu"
    kind = "deit.VisionTransformerDistilled" if config.pool == "cls_dist" else "vision_transformer.VisionTransformer"
    module, _, name = kind.partition(".")
    shape = {
        "img_size": config.img_size,
        "patch_size": config.patch,
        "in_chans": config.channels,
        "num_classes": config.classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp / config.width * (2 if gated else 1),
        "init_values": config.layer_scale or None,
        "reg_tokens": config.registers,
        "norm_layer": partial(nn.LayerNorm, eps=config.eps),
        "pre_norm": config.stem == "clip",
        **(
            {"mlp_layer": timm("timm.layers").SwiGLUPacked, "act_layer": nn.SiLU}
            if gated
            else {"act_layer": config.act}
        ),
        **_TIMM_POOL.get(config.pool, {}),
    }
    return randomise(getattr(timm(f"timm.models.{module}"), name)(**(shape | options)))


def timm_features(model: Any, x: Tensor) -> Tensor:
    """The features that timm's head reads."""
    features: Tensor = model.forward_head(model.forward_features(x), pre_logits=True)
    return features


# Hugging Face


def hf_vit(name: str, config: ViTConfig, **options: Any) -> nn.Module:
    """One of transformers' models of the same configuration with random weights."""
    kind = re.sub("(Model|ForImageClassification.*)$", "", name)
    plain = {"intermediate_size": config.mlp} if kind in ("ViT", "DeiT", "ViTMAE") else {"mlp_ratio": 4}
    plain |= {"use_swiglu_ffn": True} if config.act == "swiglu" else {}
    plain |= {"num_register_tokens": config.registers} if kind == "Dinov2WithRegisters" else {}
    h, w = config.img_size
    about = getattr(transformers(), f"{kind}Config")(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        image_size=h if h == w else config.img_size,
        patch_size=config.patch,
        num_channels=config.channels,
        num_labels=config.classes,
        **({"layer_norm_eps": 1e-6 if kind.startswith("Dinov2") else 1e-12} | plain | options),  # as released
    )
    return randomise(getattr(transformers(), name)(about))


_HF_MODULES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.weights_out": "mlp.down_proj",
}


def hf_modules(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a transformers file under the module names of transformers 5."""
    found = {}
    for name, value in state.items():
        for old, new in _HF_MODULES.items():
            name = name.replace(old, new)
        if name.startswith(("vit.", "deit.")):
            name = name.replace("encoder.layer.", "layers.")
        if ".mlp.weights_in." in name:
            gate, up = value.chunk(2)
            found |= {name.replace("weights_in", "gate_proj"): gate, name.replace("weights_in", "up_proj"): up}
        else:
            found[name] = value
    return found


_PVT = {
    r"pvt\.encoder\.patch_embeddings\.(\d)\.projection": "patch_embed{}.proj",
    r"pvt\.encoder\.patch_embeddings\.(\d)\.layer_norm": "patch_embed{}.norm",
    r"pvt\.encoder\.patch_embeddings\.(\d)\.position_embeddings": "pos_embed{}",
    r"pvt\.encoder\.patch_embeddings\.\d\.cls_token": "cls_token",
    r"pvt\.encoder\.layer_norm": "norm",
    r"pvt\.encoder\.block\.(\d)": "block{}",
    r"layer_norm_(\d)": "norm{}",
    r"attention\.self\.query": "attn.q",
    r"attention\.self\.key": "attn.kv",
    r"attention\.self\.sequence_reduction": "attn.sr",
    r"attention\.self\.layer_norm": "attn.norm",
    r"attention\.output\.dense": "attn.proj",
    r"mlp\.dense(\d)": "mlp.fc{}",
    r"^classifier": "head",
}


def pvt_by_authors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' PVT under the authors' names: keys and values fused, stages counted from 1."""
    found = {}
    for name, value in state.items():
        if ".self.key." in name:
            value = torch.cat([value, state[name.replace(".key.", ".value.")]])
        for theirs, new in _PVT.items():
            if match := re.search(theirs, name):
                stage = [int(number) + ("encoder" in theirs) for number in match.groups()]
                name = name.replace(match[0], new.format(*stage))
        if ".self.value." not in name:
            found[name] = value
    return found


def set_authors_epsilon(pvt: nn.Module) -> None:
    """Sets the epsilon in the norms of patches and keys of transformers' PVT from 1e-6 to the authors' 1e-5."""
    for name, module in pvt.named_modules():
        if re.search(r"(patch_embeddings\.\d|patch_embedding|self|attention)\.layer_norm$", name):
            assert isinstance(module, nn.LayerNorm)
            module.eps = 1e-5


# torchvision: its VisionTransformer, with its own names and operations


class TorchvisionViT(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.conv_proj = nn.Conv2d(config.channels, config.width, config.patch, config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(torch.zeros(1, config.length, config.width))
        layers = {f"encoder_layer_{i}": _torchvision_block(config) for i in range(config.depth)}
        self.encoder.layers = nn.ModuleDict(layers)
        self.encoder.ln = nn.LayerNorm(config.width, eps=1e-6)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(config.width, config.classes))

    def features(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.encoder.pos_embedding
        blocks: Any = self.encoder.layers
        for block in blocks.values():
            y = block["ln_1"](x)
            x = x + block["self_attention"](y, y, y, need_weights=False)[0]
            x = x + block["mlp"](block["ln_2"](x))
        norm: Any = self.encoder.ln
        first: Tensor = norm(x)[:, 0]
        return first

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.heads(self.features(x))
        return logits


def _torchvision_block(config: ViTConfig) -> nn.ModuleDict:
    hidden, out = nn.Linear(config.width, config.mlp), nn.Linear(config.mlp, config.width)
    parts: dict[str, nn.Module] = {
        "ln_1": nn.LayerNorm(config.width, eps=1e-6),
        "self_attention": nn.MultiheadAttention(config.width, config.heads, batch_first=True),
        "ln_2": nn.LayerNorm(config.width, eps=1e-6),
        "mlp": nn.Sequential(hidden, nn.GELU(), nn.Dropout(0.0), out, nn.Dropout(0.0)),
    }
    return nn.ModuleDict(parts)


# The paper's authors: names and shapes of their files, and their forward pass


def jax_arrays(config: ViTConfig, scale: float = 0.2) -> dict[str, NDArray[np.float32]]:
    """Random arrays with the names and shapes of the authors' files."""
    d, m, h, p = config.width, config.mlp, config.heads, config.patch
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, d),
        "embedding/kernel": (p, p, config.channels, d),
        "embedding/bias": (d,),
        "Transformer/posembed_input/pos_embedding": (1, config.length, d),
        "Transformer/encoder_norm/scale": (d,),
        "Transformer/encoder_norm/bias": (d,),
        "head/kernel": (d, config.classes),
        "head/bias": (config.classes,),
    }
    if config.head == "tanh":
        shapes |= {"pre_logits/kernel": (d, d), "pre_logits/bias": (d,)}
    for i in range(config.depth):
        block = f"Transformer/encoderblock_{i}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes |= {f"{block}/{norm}/scale": (d,), f"{block}/{norm}/bias": (d,)}
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            shapes |= {f"{attention}/{part}/kernel": (d, h, d // h), f"{attention}/{part}/bias": (h, d // h)}
        shapes |= {f"{attention}/out/kernel": (h, d // h, d), f"{attention}/out/bias": (d,)}
        shapes |= {f"{block}/MlpBlock_3/Dense_0/kernel": (d, m), f"{block}/MlpBlock_3/Dense_0/bias": (m,)}
        shapes |= {f"{block}/MlpBlock_3/Dense_1/kernel": (m, d), f"{block}/MlpBlock_3/Dense_1/bias": (d,)}
    generator = np.random.default_rng(0)
    return {name: generator.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def jax_forward(arrays: Mapping[str, NDArray[np.float32]], x: Tensor) -> tuple[Tensor, Tensor]:
    """The authors' model on their arrays: (logits, features) of images (B, C, H, W)."""
    a = {name: torch.from_numpy(value) for name, value in arrays.items()}
    depth = len([name for name in a if name.endswith("LayerNorm_0/scale")])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], a[f"{name}/scale"], a[f"{name}/bias"], 1e-6)

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ a[f"{name}/kernel"] + a[f"{name}/bias"]

    p = a["embedding/kernel"].shape[0]
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
    x = torch.einsum("bhwpqc,pqcd->bhwd", x, a["embedding/kernel"]).flatten(1, 2) + a["embedding/bias"]
    x = torch.cat([a["cls"].expand(b, -1, -1), x], 1) + a["Transformer/posembed_input/pos_embedding"]
    for i in range(depth):
        block = f"Transformer/encoderblock_{i}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        y = norm(x, f"{block}/LayerNorm_0")
        q, k, v = (
            torch.einsum("bnd,dhe->bnhe", y, a[f"{attention}/{part}/kernel"]) + a[f"{attention}/{part}/bias"]
            for part in ("query", "key", "value")
        )
        weights = (torch.einsum("bnhe,bmhe->bhnm", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        y = torch.einsum("bhnm,bmhe->bnhe", weights, v)
        x = x + torch.einsum("bnhe,hed->bnd", y, a[f"{attention}/out/kernel"]) + a[f"{attention}/out/bias"]
        y = F.gelu(dense(norm(x, f"{block}/LayerNorm_2"), f"{block}/MlpBlock_3/Dense_0"), approximate="tanh")
        x = x + dense(y, f"{block}/MlpBlock_3/Dense_1")
    features = norm(x, "Transformer/encoder_norm")[:, 0]
    hidden = torch.tanh(dense(features, "pre_logits")) if "pre_logits/kernel" in a else features
    return dense(hidden, "head"), features


def _torchvision() -> None:
    """Makes torchvision importable, which the peers import, where its compiled operators do not match torch.

    No peer uses the operators, so declaring the two that the import looks up is enough.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
