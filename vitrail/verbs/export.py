"""`vitrail export`: exports a model to ONNX or OpenVINO."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data import Source
    from vitrail.export.proof import Proof


def export(
    run: str | PathLike[str],
    *,
    format: Literal["onnx", "openvino"] = "onnx",
    int8: bool | Literal["auto"] = False,
    out: str | Path | None = None,
    data: str | Path | Source | None = None,
    calibrate: str | Path | None = None,
    no_preprocess: bool = False,
    max_drop: float | None = None,
    overwrite: bool = False,
    workers: int = 2,
) -> Proof:
    """Export a model to ONNX or OpenVINO, with preprocessing inside, and check it against PyTorch.

    The file reads the pixels of images of any size, (B, H, W, C), and needs neither PyTorch nor vitrail. It is run on
    up to 1,000 validation images, or on random pixels if the run's own data cannot be opened. If its answers differ
    from PyTorch's, or int8 loses too much accuracy, no file is written. The proof is saved beside it as .json.

    Args:
        run: run folder or weights file
        format: file format
        int8 (auto): quantise to 8-bit integers; auto leaves layers in float32 until the loss is within --max-drop
        out (FILE): file to write, .onnx or .xml (default: RUN/model.onnx or RUN/model.xml)
        data: data set whose images are used for the check (default: the run's own)
        calibrate (DATA): data set whose training images calibrate int8 (default: the run's own)
        no_preprocess: leave preprocessing to the caller: the input is normalised, float32, of the model's size
        max_drop: points of accuracy that may be lost (default: 0; int8: 0.5)
        overwrite: replace an existing file
        workers: threads that read images
    """
    from vitrail.export.sample import to_calibrate, to_check
    from vitrail.export.write import FORMATS, Order, need_packages, write_proven
    from vitrail.weights import home, locate, open_card, open_run

    if format not in FORMATS:
        raise UserError(f"'format' must be one of {', '.join(FORMATS)}, but it is '{format}'.")
    if int8 not in (True, False, "auto"):
        raise UserError(f"'int8' must be True, False or 'auto', but it is {int8!r}.")
    if calibrate is not None and not int8:
        raise UserError("--calibrate applies to --int8 only. Add --int8, or remove --calibrate.")
    if max_drop is not None and not 0 <= max_drop <= 100:
        raise UserError(f"'max_drop' must be 0 to 100 points, but it is {max_drop}.")
    need_packages(format, bool(int8))
    run = run if isinstance(run, str) else Path(run)
    open_card(run).need_head(run, f", so there is nothing to export. Train one: vitrail train DATA --weights {run}")
    suffix: str = FORMATS[format].SUFFIX
    path = home(run) / locate(run).with_suffix(suffix).name if out is None else Path(out)
    if path.suffix != suffix:
        raise UserError(f"--out must be an {suffix} file, but it is {path}. Name it {path.name}{suffix}.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists. Choose another name with --out, or replace it with --overwrite.")
    model, card = open_run(run)
    calibration = to_calibrate(run, card, calibrate, workers) if int8 else None
    sample = to_check(run, card, data, workers)
    if int8 and sample.random:
        raise UserError(f"int8 must be checked on images, but there are only {sample.source} Give images: --data DATA.")
    order = Order(format, not no_preprocess, int8, max_drop, calibration)
    return write_proven(path, model, card, sample, order, run)


def show(proof: Proof) -> int:
    """Print the proof."""
    print(proof.table())
    return 0
