"""Export to other runtimes: `write` makes a file of a format and has `proof` verify it against PyTorch."""

from __future__ import annotations

from vitrail.export.proof import Proof

__all__ = ["Proof"]
