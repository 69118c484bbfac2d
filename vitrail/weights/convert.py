"""`convert`: weights from any supported format to any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors.torch import save as to_bytes
from torch import Tensor

from vitrail.errors import UserError, nearest
from vitrail.files import atomic_write, write_text
from vitrail.models import ModelConfig, family
from vitrail.weights import WEIGHTS_FILE, Card, Source, open_run, recognise, save
from vitrail.weights.formats import Format, hf

To = Literal["vitrail", "timm", "hf", "npz", "torchvision"]


def convert(
    source: Source,
    out: str | Path,
    *,
    to: To = "vitrail",
    model: str | ModelConfig | None = None,
    classes: int | Sequence[str] | None = None,
    partial: bool = False,
    overwrite: bool = False,
) -> Path:
    """Converts weights to another format and writes them with their card; returns the path of the tensors.

    `out` is a file or, for `hf`, a folder for `from_pretrained`. `model`, `classes` and `partial` are as in `load`.
    """
    if to not in get_args(To):
        raise UserError(f"'to' must be one of {', '.join(get_args(To))}, but it is {to!r}.{nearest(to, get_args(To))}")
    path = Path(out) / WEIGHTS_FILE if to == "hf" else Path(out)
    suffix = ".npz" if to == "npz" else ".safetensors"
    if path.suffix != suffix:
        raise UserError(f"Weights for {to} must be a {suffix} file, but got {out}. Name it {path.name}{suffix}.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} already exists. Choose another name, or replace it with --overwrite.")
    loaded, card = open_run(source, model=model, classes=classes, partial=partial)
    if to == "vitrail":
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, loaded, card)
        return path
    state = _writer(card, to)(loaded.state_dict(), card.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    if to == "hf":
        config = recognise.MODULES[family(card.config)].hf_config(card.config)
        for name, document in hf.sidecar_files(config, card.classes, card.preprocess).items():
            write_text(path.with_name(name), json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    _write(path, state)
    write_text(path.with_suffix(".json"), json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")
    return path


def _writer(card: Card, to: Format) -> Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]]:
    """The function that writes the card's model in a format; a UserError if the format cannot represent it."""
    formats = recognise.formats_of(family(card.config))
    write = formats[to].write if to in formats else None
    if write is None:
        *most, last = ["vitrail", *(format for format, spec in formats.items() if spec.write is not None)]
        raise UserError(f"A {card.model} can be written for {', '.join(most)} or {last}, but not for {to}.")
    feature = formats[to].unsupported(card.config)
    if feature is None and card.task != "multiclass" and to == "hf":
        feature = f"the task {card.task}"
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
