"""Weights of others: which family and format they have, and which architecture, by the tensors and the files beside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from vitrail.config import coerce
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError, some
from vitrail.models import FAMILIES, ModelConfig, canonical, family, name_of, shape
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import (
    HALF,
    Format,
    Layout,
    bit,
    coatnet,
    compare,
    hf,
    hybrid,
    mixer,
    npz,
    pvt,
    pvt_v2,
    same,
    swin,
    timm,
    vit,
)
from vitrail.weights.sidecar import Beside, read_json
from vitrail.weights.tensors import Tensors

# Each family's module says by which names it is known. The first that is found counts, so ViTs come last: hybrids and
# Swins have their tensors too.
MODULES: dict[str, ModuleType] = {
    "hybrid": hybrid,
    "bit": bit,
    "mixer": mixer,
    "swin": swin,
    "pvt": pvt,
    "pvt_v2": pvt_v2,
    "coatnet": coatnet,
    "vit": vit,
}

_FORMATS = "timm, Hugging Face, JAX, torchvision, the families' authors or vitrail"
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
# What only pre-training needs: mask tokens, MAE's decoder, the projection heads of DINO and iBOT.
_PRETRAINING = re.compile(r"(mask_token|decoder[._]|head\.(mlp|last_layer)|(dino|ibot)_head|student\.)")
UNSEEN = ("heads", "groups", "shrink")  # what of an architecture no tensor shows


def layouts(name: str) -> dict[Format, Layout]:
    """The formats of others that a family is read from; none if there is no module for it."""
    found: dict[Format, Layout] = MODULES[name].LAYOUTS if name in MODULES else {}
    return found


@dataclass(frozen=True)
class Weights:
    """Tensors of a known family and format, not yet read."""

    where: str
    family: str
    format: Format
    layout: Layout
    tensors: Tensors

    @property
    def kind(self) -> str:
        """The family as its paper writes it."""
        return FAMILIES[self.family][0].__name__.removesuffix("Config")

    def shapes(self, config: ModelConfig | None = None) -> dict[str, Tensor]:
        """Every tensor under our name, on the meta device."""
        return self._translate(self.tensors.shapes, config)

    def read(self, config: ModelConfig) -> dict[str, Tensor]:
        """Every tensor under our name, for a model of this configuration."""
        return self._translate(self.tensors, config)

    def _translate(self, tensors: Mapping[str, Tensor], config: ModelConfig | None) -> dict[str, Tensor]:
        try:
            state = self.layout.read(tensors)
            return vit.settle(state, config) if isinstance(config, ViTConfig) else state
        except (RuntimeError, ValueError, IndexError, KeyError) as error:  # what torch says of shapes of nothing known
            line = str(error).splitlines()[0].rstrip(".")
            raise UserError(f"{self.where} does not have the shapes of a {self.kind}: {line}.") from error


def of_family(tensors: Tensors, where: str, name: str) -> Weights:
    """Tensors that a card says are of this family, in any format; a family without other formats has our own names."""
    if name not in MODULES:
        return Weights(where, name, "vitrail", Layout("", same), tensors)
    weights = recognise(tensors, where)
    if weights.family != name:
        raise UserError(f"it is a {weights.kind}.")
    return weights


def recognise(tensors: Tensors, where: str) -> Weights:
    """The family and the format of some tensors, by their names."""
    plain = {_WRAPPERS.sub("", name): name for name in tensors}
    for kind in MODULES:
        for format, layout in layouts(kind).items():
            pattern = re.compile(rf"(|.*[./]){layout.marker}")
            prefixes = {match[1] for name in plain if (match := pattern.fullmatch(name))}  # "vit.", "backbone."
            if len(prefixes) > 1:
                held = some(sorted(prefixes), 6)
                raise UserError(f"{where} holds several models: {held}. Give the state dict of one of them.")
            for prefix in prefixes:
                names = {_without(prefix, name): old for name, old in plain.items()}
                return Weights(where, kind, format, layout, _renamed(tensors, names))
    held = some(sorted(plain), 4)
    raise UserError(f"{where} is no ViT, and none of its relatives, of {_FORMATS}: it holds {held}.")


def _without(prefix: str, name: str) -> str:
    """A name without a prefix, or with as much of it gone as it has: `model.head` stands beside `model.vit.norm`."""
    while not name.startswith(prefix):
        prefix = re.sub(r"[^./]+[./]$", "", prefix)
    return name.removeprefix(prefix)


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    shapes = {name: tensors.shapes[old] for name, old in names.items()}
    return Tensors(shapes, lambda name: tensors[names[name]], tensors.wrapped)


def settings(weights: Weights, folder: Path | None, like: ModelConfig | None = None) -> Beside:
    """What the files in a folder say of the weights there; a model that is alike tells the numbers that they do not."""
    beside = Beside()
    if folder is not None:
        path = folder / "config.json"
        document = read_json(path)
        try:
            if "pretrained_cfg" in document:
                beside = timm.settings(document)
            elif "model_type" in document and weights.format == "hf":
                processor = read_json(folder / "preprocessor_config.json")
                beside = hf.settings(document, processor, MODULES[weights.family].hf_settings(document))
            beside = replace(beside, fields=_coerced(weights.family, beside.fields))
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} does not say what it should: {error!r}.") from error
    alike = {}
    if like is not None and family(like) == weights.family:
        # Also whether a class token without a position stays so, or gets one that adds nothing.
        alike = {f.name: getattr(like, f.name) for f in fields(like) if f.name in (*UNSEEN, "pos")}
    shown = {"heads": npz.heads(weights.tensors.shapes)} if weights.format == "npz" else {}
    return replace(beside, fields={**alike, **beside.fields, **_coerced(weights.family, shown)})


def _coerced(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some values that a family's configuration has, in its types."""
    kind = FAMILIES[name][0]
    known = {f.name for f in fields(kind)}
    return {key: coerce(kind, key, value) for key, value in told.items() if key in known and value is not None}


def architecture(weights: Weights, beside: Beside, model: ModelConfig | None) -> ModelConfig:
    """The configuration of the model that tensors are of, by their shapes; `classes` is 0 where there is no head."""
    where, name = weights.where, weights.family
    if model is not None and family(model) != name:
        raise UserError(f"{where} is a {weights.kind}, but `model` asks for {name_of(model)}.")
    try:
        config: ModelConfig = MODULES[name].architecture(where, weights.shapes(), beside, model)
    except UserError as error:  # of a configuration that cannot be, or of tensors that are missing
        if str(error).startswith(where):
            raise
        raise UserError(f"{where} is no {weights.kind} that vitrail can build: {error}") from error
    if model is not None and not isinstance(config, ViTConfig):  # a ViT is told how it pools, and more, by its tensors
        compare(where, shape(config), shape(model))
    return config


def expected(model: str | ModelConfig | None) -> ModelConfig | None:
    """The architecture that somebody says the weights have."""
    return canonical(model)[1] if isinstance(model, str) else model


def preprocessing(weights: Weights, config: ModelConfig, beside: Beside) -> tuple[Preprocess, str | None]:
    """How images must be prepared, and a sentence if only the habits of the family say it."""
    usual = weights.layout.habit
    if isinstance(config, ViTConfig):
        usual = vit.habit(weights.format, weights.tensors, weights.tensors.wrapped, config)
    mean, std = (usual.mean, usual.std) if len(usual.mean) in (1, config.channels) else (HALF.mean, HALF.std)
    crop, interpolation = 1.0 if max(config.img_size) >= 384 else usual.crop, usual.interpolation
    assumed = []
    if beside.mean is not None and beside.std is not None and len(beside.mean) in (1, config.channels):
        mean, std = beside.mean, beside.std
    else:
        assumed += [f"mean {mean[0]:g}", f"std {std[0]:g}"]
    if beside.crop is None:
        assumed += [f"crop {crop:g}"]
    if beside.interpolation is None:
        assumed += [f"{interpolation} resizing"]
    note = f"{', '.join(assumed)}: as usual for such weights, nothing beside them says it" if assumed else None
    crop, interpolation = beside.crop or crop, beside.interpolation or interpolation
    return Preprocess(config.img_size, config.channels, crop, mean, std, interpolation=interpolation), note


def pretraining(names: Mapping[str, Tensor]) -> list[str]:
    """Those of some names that belong to what only pre-training needs."""
    return [name for name in names if _PRETRAINING.match(name)]
