"""Recognises foreign weights: their family, format, configuration and preprocessing."""

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
from vitrail.errors import UserError, shortlist
from vitrail.models import FAMILIES, ModelConfig, canonical, family, name_of, shape
from vitrail.models.dense import BACKBONE, HEAD, DenseConfig
from vitrail.models.two_tower import TwoTowerConfig
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import (
    HALF,
    Format,
    FormatSpec,
    bit,
    check_match,
    coatnet,
    dense,
    hf,
    hybrid,
    identity,
    mixer,
    npz,
    pvt,
    pvt_v2,
    swin,
    swin_v2,
    timm,
    two_tower,
    vit,
)
from vitrail.weights.sidecar import Sidecar, read_json
from vitrail.weights.tensors import Tensors

# In order of recognition: ViTs come last, because towers, hybrids and Swins have their marker tensors too, and Swin v2s
# have those of Swins.
MODULES: dict[str, ModuleType] = {
    "two_tower": two_tower,
    "dense": dense,
    "hybrid": hybrid,
    "bit": bit,
    "mixer": mixer,
    "swin_v2": swin_v2,
    "swin": swin,
    "pvt": pvt,
    "pvt_v2": pvt_v2,
    "coatnet": coatnet,
    "vit": vit,
}

_TOWERS = {"two_tower": "vit"}  # the family of the image tower, which sidecar files are about

_FORMATS = "timm, Hugging Face, JAX, torchvision, the families' authors or vitrail"
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
# Tensors that only pre-training needs, in words: decoders of MAE and SimMIM, projection heads of DINO and iBOT.
_PRETRAINING = {
    "the decoder": re.compile(r"decoder[._]"),
    "the mask token": re.compile(r"mask_token"),
    "the projection head": re.compile(r"head\.(mlp|last_layer)|(dino|ibot)_head"),
    "the student": re.compile(r"student\."),
    "the text tower": re.compile(r"text_model\.|text_projection|logit_(scale|bias)$|txt/|[tb]$"),
    "the projection to it": re.compile(r"visual_projection"),
}
NOT_IN_TENSORS = ("heads", "groups", "shrink")  # configuration fields that tensor shapes do not show


def formats_of(name: str) -> dict[Format, FormatSpec]:
    """The foreign formats of a family; none if there is no module for it."""
    formats: dict[Format, FormatSpec] = MODULES[name].FORMATS if name in MODULES else {}
    return formats


@dataclass(frozen=True)
class Weights:
    """Tensors of a known family and format, not yet read."""

    where: str
    family: str
    format: Format
    spec: FormatSpec
    tensors: Tensors

    @property
    def kind(self) -> str:
        """The family's name as in its paper."""
        return FAMILIES[self.family][0].__name__.removesuffix("Config")

    def shapes(self, config: ModelConfig | None = None) -> dict[str, Tensor]:
        """All tensors under our names, on the meta device."""
        return self._translate(self.tensors.shapes, config)

    def read(self, config: ModelConfig) -> dict[str, Tensor]:
        """All tensors under our names, adapted to a configuration."""
        return self._translate(self.tensors, config)

    def _translate(self, tensors: Mapping[str, Tensor], config: ModelConfig | None) -> dict[str, Tensor]:
        try:
            state = self.spec.read(tensors)
            return vit.adapt_state(state, config) if isinstance(config, ViTConfig) else state
        except (RuntimeError, ValueError, IndexError, KeyError) as error:  # from torch, on unexpected shapes
            line = str(error).splitlines()[0].rstrip(".")
            raise UserError(f"{self.where} does not have the shapes of a {self.kind}: {line}.") from error


def of_family(tensors: Tensors, where: str, name: str) -> Weights:
    """Tensors that a card says are of this family, in any format; a family without other formats has our own names."""
    if name not in MODULES or all(tensor.startswith((BACKBONE, HEAD)) for tensor in tensors):
        return Weights(where, name, "vitrail", FormatSpec("", identity), tensors)
    weights = recognise(tensors, where)
    if weights.family != name:
        raise UserError(f"it is a {weights.kind}.")
    return weights


def recognise(tensors: Tensors, where: str) -> Weights:
    """The family and format of tensors, by their names."""
    plain = {_WRAPPERS.sub("", name): name for name in tensors}
    for kind in MODULES:
        for format, spec in formats_of(kind).items():
            pattern = re.compile(rf"(|.*[./]){spec.marker}")
            prefixes = {match[1] for name in plain if (match := pattern.fullmatch(name))}  # "vit.", "backbone."
            if len(prefixes) > 1:
                models = shortlist(sorted(prefixes), 6)
                raise UserError(f"{where} contains several models: {models}. Give the state dict of one of them.")
            for prefix in prefixes:
                names = {_strip(prefix, name): old for name, old in plain.items()}
                return Weights(where, kind, format, spec, _renamed(tensors, names))
    raise UserError(f"{where} is not a model known from {_FORMATS}: it contains {shortlist(sorted(plain), 4)}.")


def _strip(prefix: str, name: str) -> str:
    """A name without the part of a prefix that it has: with `model.vit.norm` there may be `model.head`."""
    while not name.startswith(prefix):
        prefix = re.sub(r"[^./]+[./]$", "", prefix)
    return name.removeprefix(prefix)


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    shapes = {name: tensors.shapes[old] for name, old in names.items()}
    return Tensors(shapes, lambda name: tensors[names[name]], tensors.wrapped)


def read_sidecar(weights: Weights, folder: Path | None, like: ModelConfig | None = None) -> Sidecar:
    """The sidecar of weights in a folder; fields that it lacks are taken from `like`, a model of the same family."""
    sidecar = Sidecar()
    if folder is not None:
        path = folder / "config.json"
        document = read_json(path)
        try:
            if "pretrained_cfg" in document:
                sidecar = timm.read_sidecar(document)
            elif weights.family == "two_tower" and (own := read_json(folder / "open_clip_config.json")):
                sidecar = two_tower.read_open_clip(own)
            elif "model_type" in document and weights.format == "hf":
                document, processor = hf.own_part(document), read_json(folder / "preprocessor_config.json")
                sidecar = hf.read_sidecar(document, processor, MODULES[weights.family].hf_fields(document))
            sidecar = replace(sidecar, fields=_coerced(_TOWERS.get(weights.family, weights.family), sidecar.fields))
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is not a valid configuration: {error!r}.") from error
    defaults = {}
    if like is not None and family(like) == weights.family:
        # `pos`, because a class token without a position embedding may stay so or get a zero one; Swin v2's windows.
        names = (*NOT_IN_TENSORS, "pos", "window", "pretrained")
        defaults = {f.name: getattr(like, f.name) for f in fields(like) if f.name in names}
    shown = npz.shown(weights.tensors.shapes) if weights.format in ("npz", "big_vision") else {}
    return replace(sidecar, fields={**defaults, **sidecar.fields, **_coerced(weights.family, shown)})


def _coerced(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are fields of a family's configuration, in their types."""
    kind = FAMILIES[name][0]
    kind = ViTConfig if kind is DenseConfig else kind  # of whose backbone they are
    known = {f.name for f in fields(kind)}
    return {key: coerce(kind, key, value) for key, value in values.items() if key in known and value is not None}


def architecture(weights: Weights, sidecar: Sidecar, model: ModelConfig | None) -> ModelConfig:
    """The configuration of the weights, from tensor shapes and sidecar; `classes` is 0 if there is no head."""
    where, name = weights.where, weights.family
    if model is not None and family(model) != name:
        raise UserError(f"{where} is a {weights.kind}, but `model` is {name_of(model)}.")
    try:
        config: ModelConfig = MODULES[name].architecture(where, weights.shapes(), sidecar, model)
    except UserError as error:  # an impossible configuration, or missing tensors
        if str(error).startswith(where):
            raise
        raise UserError(f"{where} is not a {weights.kind} that vitrail can build: {error}") from error
    # For a ViT, and a tower that is one, pooling and more follow the tensors.
    if model is not None and not isinstance(config, ViTConfig | TwoTowerConfig):
        check_match(where, shape(config), shape(model))
    numerics: Any = _numerics(weights, sidecar, model, config)
    return replace(config, **numerics)


def _numerics(weights: Weights, sidecar: Sidecar, model: ModelConfig | None, config: ModelConfig) -> dict[str, Any]:
    """What no tensor shows: the activation, LayerNorm's epsilon, how positions are resampled, the attention pattern.

    Sidecar files say it, else `model`, if it differs from its family's default, else it is as in the source's code.
    """
    spec, values = weights.spec, {}
    usual = {"act": spec.act} | ({"resample": spec.resample} if spec.resample else {})
    if isinstance(config, ViTConfig):
        usual |= vit.numerics(weights.format, weights.tensors, config)
    said = {**({} if sidecar.eps is None else {"eps": sidecar.eps}), **sidecar.fields}
    for field in fields(config):
        if field.name in ("act", "eps", "resample", "attention") and getattr(config, field.name) != "swiglu":
            asked = field.default if model is None else getattr(model, field.name)
            known = asked if asked != field.default else usual.get(field.name, getattr(config, field.name))
            values[field.name] = said.get(field.name, known)
    return values


def expected(model: str | ModelConfig | None) -> ModelConfig | None:
    """The configuration of a model given by name."""
    return canonical(model)[1] if isinstance(model, str) else model


def preprocessing(weights: Weights, config: ModelConfig, sidecar: Sidecar) -> tuple[Preprocess, str | None]:
    """The preprocessing of the weights, and a note on the values that were assumed."""
    usual = weights.spec.defaults
    if isinstance(config, ViTConfig):
        usual = vit.defaults(weights.format, weights.tensors, weights.tensors.wrapped, config)
    mean, std = (usual.mean, usual.std) if len(usual.mean) in (1, config.channels) else (HALF.mean, HALF.std)
    crop, interpolation = 1.0 if max(config.img_size) >= 384 else usual.crop, usual.interpolation
    assumed = []
    if sidecar.mean is not None and sidecar.std is not None and len(sidecar.mean) in (1, config.channels):
        mean, std = sidecar.mean, sidecar.std
    else:
        assumed += [f"mean {mean[0]:g}", f"std {std[0]:g}"]
    if sidecar.crop is None and not isinstance(config, DenseConfig):
        assumed += [f"crop {crop:g}"]
    if sidecar.interpolation is None:
        assumed += [f"{interpolation} resizing"]
    note = f"{', '.join(assumed)}: assumed as usual for such weights, without a sidecar file" if assumed else None
    crop, interpolation = sidecar.crop or crop, sidecar.interpolation or interpolation
    if isinstance(config, DenseConfig):
        padded = config.img_size, config.channels, 1.0, mean, std
        return Preprocess(*padded, interpolation=interpolation, fit="pad"), note
    return Preprocess(config.img_size, config.channels, crop, mean, std, interpolation=interpolation), note


def pretraining_only(names: Mapping[str, Tensor]) -> tuple[list[str], str]:
    """The names of tensors that only pre-training needs, and what they are in words; empty if there are none."""
    found = {what: [name for name in names if marker.match(name)] for what, marker in _PRETRAINING.items()}
    words = [what for what, members in found.items() if members]
    return [name for members in found.values() for name in members], " and ".join(words)
