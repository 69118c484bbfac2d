"""`vitrail convert`: converts weights between formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitrail.errors import UserError, nearest

if TYPE_CHECKING:
    from vitrail.models import ModelConfig

To = Literal["vitrail", "timm", "hf", "npz", "big_vision", "torchvision", "mmseg", "original"]


def convert(
    source: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    to: To = "vitrail",
    model: str | ModelConfig | None = None,
    classes: int | Sequence[str] | None = None,
    partial: bool = False,
    push: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Convert weights between vitrail, timm, Hugging Face, torchvision and JAX.

    Returns the path of the weights; vitrail's card is written beside them. For hf there is also a README.md, the hub's
    model card, with metrics and classes.

    Args:
        source (SRC): run, weights file of any of these formats, timm:NAME or hf:REPO
        out (DST): .safetensors or .npz file to write; for hf a folder
        to: format to write; original is that of OpenAI's CLIP and open_clip
        model (NAME): model name, if the tensors do not determine it
        classes: number of classes of a new head, for weights without one
        partial: load the tensors that fit, and initialise the rest
        push (OWNER/NAME): with --to hf, upload the folder to this repository of the Hugging Face hub
        overwrite: replace existing files
    """
    from vitrail.progress import log
    from vitrail.runs.run import Run
    from vitrail.weights import WEIGHTS_FILE, open_run, save
    from vitrail.weights.readme import push as push_folder
    from vitrail.weights.readme import write_readme
    from vitrail.weights.writing import write_weights

    if to not in get_args(To):
        raise UserError(f"'to' must be one of {', '.join(get_args(To))}, but it is {to!r}.{nearest(to, get_args(To))}")
    path = Path(out) / WEIGHTS_FILE if to == "hf" else Path(out)
    suffix = ".npz" if to in ("npz", "big_vision") else ".safetensors"
    if path.suffix != suffix:
        raise UserError(f"Weights for {to} must be a {suffix} file, but got {out}. Name it {path.name}{suffix}.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} already exists. Choose another name, or replace it with --overwrite.")
    if push is not None and (to != "hf" or push.count("/") != 1):
        raise UserError(f"--push OWNER/NAME uploads a folder written with --to hf, but got --push {push} --to {to}.")
    whole, card = open_run(source, model=model, classes=classes, partial=partial, headless=True)
    if to == "vitrail":
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, whole, card)
    else:
        write_weights(path, whole, card, to)
    if to == "hf":
        run = None if isinstance(source, Mapping) else Run(source)
        data = Path(run.config.data.removeprefix("hf:")).stem if run is not None and run.exists else None
        write_readme(path.parent, card, push or path.parent.resolve().name, data)
    if push is not None:
        log.info(f"Pushed to {push_folder(path.parent, push)}")
    return path


def show(path: Path) -> int:
    """Print the path of the weights."""
    print(path)
    return 0
