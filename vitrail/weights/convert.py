"""`convert`: weights of any format in any other, so that a model goes where it is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors.torch import save as to_bytes
from torch import Tensor

from vitrail.errors import UserError, nearest
from vitrail.files import replacing, write_text
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
    """Writes weights of any format in another one, with their card beside them; returns the path of the tensors.

    `out` is a file, or for `hf` a folder that `from_pretrained` reads. `model`, `classes` and `partial` are
    those of `load`.
    """
    if to not in get_args(To):
        raise UserError(f"'to' must be one of {', '.join(get_args(To))}, but it is {to!r}.{nearest(to, get_args(To))}")
    path = Path(out) / WEIGHTS_FILE if to == "hf" else Path(out)
    suffix = ".npz" if to == "npz" else ".safetensors"
    if path.suffix != suffix:
        raise UserError(f"Weights for {to} are a {suffix} file, but {out} is none. Name it {path.name}{suffix}.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} is there already. Choose another name, or give --overwrite to replace it.")
    whole, card = open_run(source, model=model, classes=classes, partial=partial, headless=True)
    if to == "vitrail":
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, whole, card)
        return path
    state = _writer(card, to)(whole.state_dict(), card.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    if to == "hf":
        about = recognise.MODULES[family(card.config)].hf_document(card.config)
        for name, document in hf.documents(about, card.classes, card.preprocess).items():
            write_text(path.with_name(name), json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    _write(path, state)
    write_text(path.with_suffix(".json"), json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")
    return path


def _writer(card: Card, to: Format) -> Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]]:
    """What writes a model for others, if they have a place for all of it."""
    layouts = recognise.layouts(family(card.config))
    write = layouts[to].write if to in layouts else None
    if write is None:
        formats = ["vitrail", *(format for format, layout in layouts.items() if layout.write is not None)]
        known = f"{', '.join(formats[:-1])} or {formats[-1]}" if len(formats) > 1 else formats[0]
        raise UserError(f"A {card.model} is written for {known}, but not for {to}.")
    missing = layouts[to].cannot(card.config)
    if missing is None and card.task != "multiclass" and to == "hf":
        missing = f"the task {card.task}"
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
