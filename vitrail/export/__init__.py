"""Models for other runtimes: `onnx` writes the graph, `check` proves that it gives the answers of PyTorch."""

from __future__ import annotations

from vitrail.export.proof import Proof

__all__ = ["Proof"]
