"""Attention and relevance of one image, for `/explain`: as numbers, as a PNG, or compact for the page.

This module needs torch. Layers and heads are counted from 1.
"""

from __future__ import annotations

import io
import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.images import Pixels
from vitrail.data.pixels import to_pil
from vitrail.errors import UserError
from vitrail.explain.attention import attention_maps, patch_attention, rollout
from vitrail.explain.figures.tiles import HEAT, SIGNED
from vitrail.explain.geometry import attends, geometries
from vitrail.explain.pairwise import pairwise_attention
from vitrail.explain.relevance import explainable, relevance, signed
from vitrail.models import Model
from vitrail.runs.predictor import Predictor
from vitrail.serve.errors import ApiError

Array = NDArray[np.float32]

_SIDE = 448  # pixels of a PNG's shorter side, at least
_VEIL = 0.62  # opacity of the colours over the image


@dataclass(frozen=True, eq=False)
class Map:
    """One number per patch."""

    values: Array  # h w
    signed: bool = False  # whether there is evidence against, below 0
    target: str | None = None


def warm_up(predictor: Predictor, pixels: Pixels) -> None:
    """Computes once what is slow the first time."""
    if explainable(_model(predictor)):
        class_relevance(predictor, pixels, None)


def facts(predictor: Predictor) -> dict[str, Any]:
    """What can be explained: the grids and heads of the attention layers."""
    model = _model(predictor)
    layers = geometries(model) if attends(model) else []
    return {
        "relevance": explainable(model),
        "signed": signed(model),
        "layers": [{"grid": list(layer.grid), "heads": layer.heads} for layer in layers],
    }


def attention(
    predictor: Predictor, pixels: Pixels, layer: int | None, head: int | None, patch: tuple[int, int] | None
) -> Map:
    """Attention of the whole image, or of a patch: of a layer and head, or rollout through all layers."""
    model, image = _model(predictor), _image(predictor, pixels)
    _need_attention(model)
    layers = geometries(model)
    if layer is None and patch is None and head is None:
        return Map(rollout(model, image)[0])
    number = len(layers) if layer is None else layer
    if not 1 <= number <= len(layers):
        raise ApiError(422, "no_such_layer", f"The model has layers 1 to {len(layers)}, but not {number}.")
    if head is not None and not 1 <= head <= layers[number - 1].heads:
        raise ApiError(
            422, "no_such_head", f"Layer {number} has heads 1 to {layers[number - 1].heads}, but not {head}."
        )
    try:
        found = attention_maps(model, image) if patch is None else patch_attention(model, image, *patch)
    except UserError as error:
        raise ApiError(422, "no_such_patch", str(error)) from error
    heads = found[number - 1][0]
    return Map(heads.mean(axis=0) if head is None else heads[head - 1])


def class_relevance(predictor: Predictor, pixels: Pixels, target: str | None) -> Map:
    """The evidence for an output: a class, a label or a value; by default the strongest."""
    model, image, names = _model(predictor), _image(predictor, pixels), predictor.card.task.output_names
    if target is None:
        with torch.inference_mode():
            chosen = int(predictor.card.task.strength(model(image).float())[0].argmax())
    elif target in names:
        chosen = names.index(target)
    else:
        raise ApiError(422, "unknown_target", f"The model has no output {target[:64]!r}. See /model.")
    if not explainable(model):
        raise ApiError(422, "not_supported", "Relevance is not available for this model.")
    return Map(relevance(model, image, chosen)[0], signed(model), names[chosen] if names else None)


def everything(predictor: Predictor, pixels: Pixels) -> bytes:
    """Attention of every layer and head between all patches, as one binary document.

    A little-endian uint32 with the length of a JSON header, the header, then one byte per number, each row divided by
    its maximum. The header has the grid, heads and offset of every layer, and the grid and offset of the rollout.
    """
    model, image = _model(predictor), _image(predictor, pixels)
    _need_attention(model)
    layers = pairwise_attention(model, image)
    through = rollout(model, image)[0]
    parts = [_bytes(layer.weights) for layer in layers]
    offsets = np.cumsum([0, *map(len, parts)]).tolist()
    header = {
        "layers": [
            {"grid": layer.grid, "heads": len(layer.weights), "offset": offset}
            for layer, offset in zip(layers, offsets, strict=False)
        ],
        "rollout": {"grid": through.shape, "offset": offsets[-1]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)
    return b"".join([struct.pack("<I", len(text)), text, *parts, _bytes(through.reshape(-1))])


def png(pixels: Pixels, found: Map) -> bytes:
    """A map over the image as the model sees it."""
    picture = to_pil(np.ascontiguousarray(pixels.transpose(1, 2, 0))).convert("RGB")
    times = max(1, -(-_SIDE // min(picture.size)))
    picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.BICUBIC)
    values = found.values if found.signed else found.values - found.values.min()
    top = float(np.abs(values).max()) or 1.0
    smooth = np.asarray(Image.fromarray(values / top).resize(picture.size, Image.Resampling.BICUBIC)).clip(-1, 1)
    if found.signed:
        colours, opacity = SIGNED((smooth + 1) / 2)[..., :3], np.abs(smooth)
    else:
        colours, opacity = colormaps[HEAT](smooth.clip(0))[..., :3], np.ones_like(smooth)
    veil = (_VEIL * opacity)[..., None]
    mixed = np.asarray(picture) * (1 - veil) + colours * 255 * veil
    file = io.BytesIO()
    Image.fromarray(mixed.round().astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def _bytes(weights: Array) -> bytes:
    """Rows (..., Q) as bytes, divided by their maxima."""
    most = weights.max(axis=-1, keepdims=True)
    return np.rint(255 * weights / np.where(most > 0, most, 1)).astype(np.uint8).tobytes()


def _model(predictor: Predictor) -> Model:
    if predictor.module is None:
        raise ApiError(
            422, "not_supported", "An exported file cannot be explained. Serve the run it was exported from."
        )
    return predictor.module


def _need_attention(model: Model) -> None:
    if not attends(model):
        raise ApiError(422, "not_supported", "This model has no attention. Ask for method=relevance.")


def _image(predictor: Predictor, pixels: Pixels) -> Tensor:
    """The normalised image, (1, C, H, W), on the model's device."""
    device = next(_model(predictor).parameters()).device
    return predictor.card.preprocess.normalise(torch.from_numpy(pixels)[None].to(device))
