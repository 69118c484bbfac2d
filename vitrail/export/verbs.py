"""`export`: a trained model as a file that needs neither PyTorch nor vitrail, and the proof that it is the same."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from vitrail.errors import UserError
from vitrail.export.proof import Proof, images_to_check, prove
from vitrail.export.onnx import write
from vitrail.weights import home, locate, open_card, open_run


def export(
    run: str | Path,
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    overwrite: bool = False,
    workers: int = 2,
) -> Proof:
    """Writes the model of a run to an ONNX file with classes and preprocessing inside, and checks it against PyTorch.

    The file, by default `model.onnx` in the run, reads pixels (B, H, W, C) as they come from an image of the model's
    size. It is run on up to 64 validation images of the run's own data, or of `data`; on random pixels if the run's
    data cannot be opened. What comes out must be what PyTorch gives, else a UserError is raised and there is no file.
    The proof is written beside it, with `.json` behind its name.
    """
    _need_packages()
    if not open_card(run).classes:
        raise UserError(
            f"{run} has no head, so there is nothing that it could tell. Train one: vitrail train DATA --weights {run}"
        )
    path = home(run) / locate(run).with_suffix(".onnx").name if out is None else Path(out)
    if path.suffix != ".onnx":
        raise UserError(f"An exported model is an .onnx file, but --out is {path}. Name it {path.name}.onnx.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} is there already. Choose another name with --out, or give --overwrite to replace it.")
    model, card = open_run(run)
    pixels, source = images_to_check(run, card, data, workers)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under its own name, which large files have inside, in a folder that is gone if anything fails.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
            unfinished = Path(folder) / path.name
            write(unfinished, model, card)
            proof = replace(prove(unfinished, model, card, pixels, source), file=path)
            document = json.dumps(proof.to_json(), indent=2, ensure_ascii=False) + "\n"
            unfinished.with_name(f"{path.name}.json").write_text(document, encoding="utf-8")
            for file in sorted(Path(folder).iterdir()):
                file.replace(path.with_name(file.name))
            if f"{path.name}.data" not in proof.parts:
                path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # of a larger model that was here
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}. Choose another with --out.") from error
    return proof


def _need_packages() -> None:
    try:
        import onnx_ir  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"Exporting needs {error.name}: pip install 'vitrail[export]'") from error
