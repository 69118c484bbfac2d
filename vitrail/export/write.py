"""Writes an ONNX file with the proof that it matches PyTorch."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from vitrail.errors import UserError
from vitrail.export.onnx import write
from vitrail.export.proof import Array, Proof, prove
from vitrail.models import Model
from vitrail.weights import Card


def write_proven(path: Path, model: Model, card: Card, pixels: Array, source: str) -> Proof:
    """Writes a model to `path` and its proof next to it, or nothing if the answers differ from PyTorch's."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a temporary folder but under the final name, which external weights refer to.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
            unfinished = Path(folder) / path.name
            write(unfinished, model, card)
            proof = replace(prove(unfinished, model, card, pixels, source), file=path)
            document = json.dumps(proof.to_json(), indent=2, ensure_ascii=False) + "\n"
            unfinished.with_name(f"{path.name}.json").write_text(document, encoding="utf-8")
            for file in sorted(Path(folder).iterdir()):
                file.replace(path.with_name(file.name))
            if f"{path.name}.data" not in proof.parts:
                path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # of an older, larger model
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}. Choose another --out.") from error
    return proof


def need_packages() -> None:
    """Raises a UserError if a package needed for export is not installed."""
    try:
        import onnx_ir  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"Export needs {error.name}, which is not installed: pip install 'vitrail[export]'") from error
