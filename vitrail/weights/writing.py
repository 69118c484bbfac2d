"""Writes weights in the formats of other libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save as to_bytes
from torch import Tensor

from vitrail.errors import UserError
from vitrail.files import atomic_write, write_text
from vitrail.models import Model, family
from vitrail.progress import log, log_to_console
from vitrail.weights import Card, recognise
from vitrail.weights.card import write_card
from vitrail.weights.formats import Format, FormatSpec, hf


def write_weights(path: Path, model: Model, card: Card, to: Format) -> None:
    """Writes a model's tensors for timm, Hugging Face, torchvision or JAX, with vitrail's card next to them."""
    state = _writer(card, to)(model.state_dict(), card.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    if to == "hf":
        config = recognise.MODULES[family(card.config)].hf_config(card.config)
        for name, document in hf.sidecar_files(config, card.classes, card.preprocess).items():
            write_text(path.with_name(name), json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    _write(path, state)
    if note := _not_held(vars(card.config), to, recognise.formats_of(family(card.config))[to]):
        log_to_console()
        log.info(note)
    write_card(path.with_suffix(".json"), card)


def _not_held(config: Mapping[str, Any], to: Format, spec: FormatSpec) -> str | None:
    """What the code that reads a format has to be told, because the file does not hold it."""
    act, eps = config.get("act"), config.get("eps", spec.eps)
    if to == "hf" or act is None or (act in (spec.act, "swiglu") and eps == spec.eps):
        return None
    if to == "timm":
        return f"Create the model in timm with act_layer='{act}' and norm_layer=partial(nn.LayerNorm, eps={eps:g})."
    return (
        f"The model has act='{act}' and eps={eps:g}, but the code for {to} computes {spec.act} with {spec.eps:g}: its "
        "outputs will differ slightly."
    )


def _writer(card: Card, to: Format) -> Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]]:
    """The function that writes the card's model in a format; an unsupported format raises UserError."""
    formats = recognise.formats_of(family(card.config))
    write = formats[to].write if to in formats else None
    if write is None:
        *most, last = ["vitrail", *(format for format, spec in formats.items() if spec.write is not None)]
        known = f"{', '.join(most)} or {last}" if most else last
        raise UserError(f"A {card.model} can be written for {known}, but not for {to}.")
    feature = formats[to].unsupported(card.config)
    if feature is None and not card.task.interchange and to == "hf":
        feature = f"the task {card.task.name}"
    if feature:
        raise UserError(f"The model has {feature}, which {to} does not support. Write it with --to vitrail.")
    return write


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    with atomic_write(path) as temporary:
        if path.suffix == ".npz":
            with temporary.open("wb") as file:
                arrays: dict[str, Any] = {name: value.numpy() for name, value in state.items()}
                np.savez(file, **arrays)
        else:
            content = to_bytes({name: value.contiguous() for name, value in state.items()}, metadata={"format": "pt"})
            temporary.write_bytes(content)
