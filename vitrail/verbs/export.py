"""`vitrail export`: exports a model to ONNX."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data import Source
    from vitrail.export.proof import Proof


def export(
    run: str | PathLike[str],
    *,
    out: str | Path | None = None,
    data: str | Path | Source | None = None,
    overwrite: bool = False,
    workers: int = 2,
) -> Proof:
    """Export a model to ONNX, with preprocessing inside, and check it against PyTorch.

    The file reads pixels (B, H, W, C) of the model's image size and needs neither PyTorch nor vitrail. It is run on up
    to 64 validation images, or on random pixels if the run's own data cannot be opened. If its answers differ from
    PyTorch's, no file is written. The proof is saved beside it as .onnx.json.

    Args:
        run: run folder or weights file
        out (FILE): .onnx file to write (default: RUN/model.onnx)
        data: data set whose images are used for the check (default: the run's own)
        overwrite: replace an existing file
        workers: threads that read images
    """
    from vitrail.export.proof import images_to_check
    from vitrail.export.write import need_packages, write_proven
    from vitrail.weights import home, locate, open_card, open_run

    need_packages()
    run = run if isinstance(run, str) else Path(run)
    open_card(run).need_head(run, f", so there is nothing to export. Train one: vitrail train DATA --weights {run}")
    path = home(run) / locate(run).with_suffix(".onnx").name if out is None else Path(out)
    if path.suffix != ".onnx":
        raise UserError(f"--out must be an .onnx file, but it is {path}. Name it {path.name}.onnx.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists. Choose another name with --out, or replace it with --overwrite.")
    model, card = open_run(run)
    return write_proven(path, model, card, *images_to_check(run, card, data, workers))


def show(proof: Proof) -> int:
    """Print the proof."""
    print(proof.table())
    return 0
