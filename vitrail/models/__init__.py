"""The model registry: families, named configurations, other spellings of their names, and `create`.

A family is one file with a frozen dataclass, its `ModelConfig`, and a `Model`. `register` adds it under its name, from
this package or from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import Size, coerce, habits
from vitrail.errors import UserError, nearest
from vitrail.models import aliases, bit, coatnet, hybrid, mixer, pvt, pvt_v2, sized, swin, swin_v2, vit_configs
from vitrail.models.bit import BiT, BiTConfig
from vitrail.models.coatnet import CoAtNet, CoAtNetConfig
from vitrail.models.counts import COUNTS
from vitrail.models.dense import Dense, DenseConfig
from vitrail.models.hybrid import Hybrid, HybridConfig
from vitrail.models.image_tower import ImageTowerConfig
from vitrail.models.mixer import Mixer, MixerConfig
from vitrail.models.model import Model as Model
from vitrail.models.model import ModelConfig as ModelConfig
from vitrail.models.module import FAMILY, MODULES, ModuleConfig, ModuleModel
from vitrail.models.position import Interpolation
from vitrail.models.pvt import PVT, PVTConfig
from vitrail.models.pvt_v2 import PVTv2, PVTv2Config
from vitrail.models.swin import Swin, SwinConfig
from vitrail.models.swin_v2 import SwinV2, SwinV2Config
from vitrail.models.two_tower import TwoTower, TwoTowerConfig
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.zero_shot import ZeroShot, ZeroShotConfig

# Every family by the name used in model cards: the types of its configuration and model.
FAMILIES: dict[str, tuple[type[Any], type[Model]]] = {}

# The models that `vitrail models` lists. ViTs of other patch sizes are built from their names.
CONFIGS: dict[str, ModelConfig] = {}


def register(name: str, config: type[Any], model: type[Model], configs: Mapping[str, Any]) -> None:
    """Registers a family of models under its name, with the configurations of its named models.

    The first configuration is for small images, the second is the smallest for photographs.
    """
    for taken in {name} & FAMILIES.keys() | configs.keys() & CONFIGS.keys():
        raise UserError(f"There already is a model '{taken}'. Choose another name.")
    FAMILIES[name] = (config, model)
    CONFIGS.update(configs)


register("vit", ViTConfig, ViT, vit_configs.CONFIGS)
register("hybrid", HybridConfig, Hybrid, hybrid.CONFIGS)
register("bit", BiTConfig, BiT, bit.CONFIGS)
register("mixer", MixerConfig, Mixer, mixer.CONFIGS)
register("swin", SwinConfig, Swin, swin.CONFIGS)
register("swin_v2", SwinV2Config, SwinV2, swin_v2.CONFIGS)
register("pvt", PVTConfig, PVT, pvt.CONFIGS)
register("pvt_v2", PVTv2Config, PVTv2, pvt_v2.CONFIGS)
register("coatnet", CoAtNetConfig, CoAtNet, coatnet.CONFIGS)
register("dense", DenseConfig, Dense, {})  # a backbone of any family with a head for masks or boxes
register("two_tower", TwoTowerConfig, TwoTower, {})  # its image tower has a name
register("zero_shot", ZeroShotConfig, ZeroShot, {})


def register_module(module: nn.Module, name: str = "") -> str:
    """Makes a module known to every verb, by default under the name of its class; returns its name.

    A `Model` registers its family, unless that is known. Any other module from images to logits is a `ModuleModel`.
    """
    name = name or type(module).__name__
    if isinstance(module, Model):
        kind = type(module.config)
        own = next((model for config, model in FAMILIES.values() if config is kind), None)
        if own is not None and own is not type(module):
            raise UserError(
                f"A {type(module).__name__} would be loaded as a {own.__name__}, because both have a {kind.__name__}. "
                f"Give it a configuration class of its own, derived from {kind.__name__}."
            )
        if own is None:
            register(name, kind, type(module), {})
        if (listed := name_of(module.config)) in CONFIGS:
            return listed
    elif name in CONFIGS or (name in FAMILIES and name != FAMILY):
        raise UserError(f"There already is a model '{name}'. Choose another name.")
    else:
        FAMILIES.setdefault(FAMILY, (ModuleConfig, ModuleModel))
    MODULES[name] = module
    return name


def as_model(module: nn.Module, img_size: Size, channels: int, outputs: int) -> Model:
    """A plain module from images of this size to logits, as a model."""
    model = build(ModuleConfig(register_module(module), img_size, channels, outputs))
    assert isinstance(model, ModuleModel)
    model.check()
    return model


def canonical(name: str) -> tuple[str, ModelConfig]:
    """The short name and the configuration of a model, however the name is spelled.

    >>> canonical("google/vit-base-patch16-384")[0]
    'vit_b16'
    """
    if name in MODULES:
        module = MODULES[name]
        return name, module.config if isinstance(module, Model) else ModuleConfig(name)
    if sized_config := sized.of_name(name):
        return name, sized_config
    short, changes = (name, {}) if name in CONFIGS else aliases.find(name) or ("", {})
    config = CONFIGS.get(short) or vit_configs.of_any_patch(short)
    if config is None:
        if (answer := habits.model(name)) is not None:
            raise UserError(f"There is no model '{name}': {answer}")
        raise UserError(
            f"There is no model '{name}'.{nearest(name, CONFIGS)} `vitrail models` lists the models; a ViT may have "
            f"any patch size up to {vit_configs.LARGEST_PATCH} in its name."
        )
    return short, replace(config, **changes)


def named_size(name: str) -> Size | None:
    """The image size that a name states: (384, 384) for vit_base_patch16_384."""
    size: Size | None = (aliases.find(name) or ("", {}))[1].get("img_size")
    return size


def is_meant(name: str, asked: str) -> bool:
    """Whether `asked`, in any spelling, is the model with this short name or its family."""
    if asked == "deit":
        return name.startswith("deit_")
    if asked in FAMILIES:  # unlisted models are named after their family, except ViTs
        return asked == (family(CONFIGS[name]) if name in CONFIGS else name if name in FAMILIES else "vit")
    return name == asked or name == canonical(asked)[0]


_ANY = ("img_size", "channels", "classes", "drop", "drop_path", "act", "eps", "resample", "attention")


def family(config: ModelConfig) -> str:
    """The name of a model's family."""
    for name, (kind, _) in FAMILIES.items():
        if type(config) is kind:
            return name
    raise UserError(f"{type(config).__name__} belongs to no known family. Add it with vitrail.models.register.")


def shape(config: ModelConfig) -> dict[str, Any]:
    """The fields that identify an architecture: all but size, channels, classes, regularisation and numerics."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _ANY}


def backbone(config: ModelConfig) -> ModelConfig:
    """The configuration without a dense head or a text tower, if there is one."""
    if isinstance(config, DenseConfig):
        return config.body
    return config.image if isinstance(config, ImageTowerConfig) else config


def name_of(config: ModelConfig) -> str:
    """The listed name of a model or its backbone; otherwise its family, or `vit_w…d…p…`."""
    config = backbone(config)
    if type(config) is ViTConfig:
        return vit_configs.name_of(config)
    for name, other in CONFIGS.items():
        if type(other) is type(config) and shape(other) == shape(config):
            return name
    return family(config)


def configure(name: str, **changes: object) -> ModelConfig:
    """The configuration of a named model with some fields changed; unknown or ill-typed fields are a UserError."""
    _, config = canonical(name)
    known = {field.name: field for field in fields(config)}
    for key in changes:
        if key not in known:
            hint = habits.model_option(key) or f"{nearest(key, known)} It takes {', '.join(known)}."
            raise UserError(f"A model has no option '{key}'.{hint}")
    values = {key: coerce(type(config), key, value) for key, value in changes.items()}
    return replace(config, **values)


def build(config: ModelConfig) -> Model:
    """Builds the model of a configuration, with fresh weights."""
    kind: Any = FAMILIES[family(config)][1]
    model: Model = kind(config)
    return model


def create(name: str, **changes: object) -> Model:
    """Builds a named model with fresh weights: `create("vit_b16", classes=10, img_size=384, pool="gap")`."""
    return build(configure(name, **changes))


def resize(model: Model, img_size: int | Size, method: Interpolation | None = None) -> Model:
    """The same model for another image size: position embeddings are resampled, other weights are kept.

    `method` defaults to that of the library the weights come from, `model.config.resample`.
    """
    config = replace(model.config, img_size=coerce(type(model.config), "img_size", img_size))
    resized = build(config).to(next(model.parameters()))  # same device and dtype
    resized.load_state_dict(resized_state(model.state_dict(), model.config, config, method))
    return resized.train(model.training)


def resized_state(
    state: Mapping[str, Tensor], old: ModelConfig, new: ModelConfig, method: Interpolation | None = None
) -> dict[str, Tensor]:
    """A copy of a model's state dict for another image size. Tensors that need no change are shared, not copied."""
    return FAMILIES[family(old)][1].resized_state(state, old, new, method or old.resample)


def head(model: Model) -> nn.Linear | nn.Conv2d:
    """The layer that computes the logits; for DeiT, that of the class token. A headless model raises UserError."""
    for layer in model.classifiers():
        return layer
    raise UserError("The model has no classification head. Build or load it with classes=N.")


@cache
def parameters(config: ModelConfig) -> int:
    """The number of parameters, counted without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


@cache
def macs(config: ModelConfig) -> int:
    """Multiply-accumulate operations of a forward pass on one image: what ViT papers report as FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = build(config).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, config.channels, *config.img_size))
    return counter.get_total_flops() // 2


@dataclass(frozen=True)
class Row:
    """One line of `vitrail models`."""

    name: str
    params: int
    macs: int
    tokens: int
    img_size: Size


def rows(pattern: str = "") -> Iterator[Row]:
    """Yields every listed model whose name contains `pattern`; lazily, since counting a registered one takes time."""
    chosen = {name: config for name, config in CONFIGS.items() if pattern in name}
    if not chosen:
        raise UserError(f"No model has '{pattern}' in its name. `vitrail models` without a pattern lists them all.")
    return (
        Row(name, *(COUNTS.get(name) or (parameters(c), macs(c))), c.length, c.img_size) for name, c in chosen.items()
    )
