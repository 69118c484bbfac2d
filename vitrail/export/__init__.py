"""Export to other runtimes: `onnx` writes the graph, `proof` verifies it against PyTorch."""

from __future__ import annotations

from vitrail.export.proof import Proof

__all__ = ["Proof"]
