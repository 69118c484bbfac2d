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
from vitrail.files import replacing, write_text
from vitrail.models import Model, family
from vitrail.weights import Card, recognise
from vitrail.weights.formats import Format, hf


def write_weights(path: Path, model: Model, card: Card, to: Format) -> None:
    """Writes a model's tensors for timm, Hugging Face, torchvision or JAX, with vitrail's card beside them."""
    state = _writer(card, to)(model.state_dict(), card.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    if to == "hf":
        about = recognise.MODULES[family(card.config)].hf_document(card.config)
        for name, document in hf.documents(about, card.classes, card.preprocess).items():
            write_text(path.with_name(name), json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    _write(path, state)
    write_text(path.with_suffix(".json"), json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")


def _writer(card: Card, to: Format) -> Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]]:
    """The function that renames a model's tensors for a format, if the format can hold all of the model."""
    layouts = recognise.layouts(family(card.config))
    write = layouts[to].write if to in layouts else None
    if write is None:
        formats = ["vitrail", *(format for format, layout in layouts.items() if layout.write is not None)]
        known = f"{', '.join(formats[:-1])} or {formats[-1]}" if len(formats) > 1 else formats[0]
        raise UserError(f"A {card.model} is written for {known}, but not for {to}.")
    missing = layouts[to].cannot(card.config)
    if missing is None and not card.task.interchange and to == "hf":
        missing = f"the task {card.task.name}"
    if missing:
        raise UserError(f"The model has {missing}, for which {to} has no place. It can be kept as vitrail's own.")
    return write


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    with replacing(path) as temporary:
        if path.suffix == ".npz":
            with temporary.open("wb") as file:
                arrays: dict[str, Any] = {name: value.numpy() for name, value in state.items()}
                np.savez(file, **arrays)
        else:
            content = to_bytes({name: value.contiguous() for name, value in state.items()}, metadata={"format": "pt"})
            temporary.write_bytes(content)
