"""Models for other programs: `vitrail.export(run)` is `vitrail export RUN`.

`onnx` writes the file, `check` proves that it gives the answers of PyTorch.
"""

from __future__ import annotations

from vitrail.export.proof import Proof
from vitrail.export.verbs import export
from vitrail.verb import callable_package

__all__ = ["Proof", "export"]

callable_package(__name__, export)
