"""`vitrail.Run`: a run folder, as `vitrail.train` returns it, with verbs as methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vitrail.data.image_like import ImageLike
from vitrail.runs import run as folders
from vitrail.runs.predictor import Prediction
from vitrail.verbs.predict import predict
from vitrail.verbs.report import report


class Run(folders.Run):
    """A run folder: its `path`, `scores`, `model()` and more, see `vitrail.runs.run`. It can be used as a path."""

    def predict(
        self, images: ImageLike | Iterable[ImageLike], *, top: int | None = None, **how: Any
    ) -> Iterator[Prediction]:
        """`vitrail.predict` of this run."""
        return predict(self.path, images, top=top, **how)

    def report(self, **how: Any) -> Path:
        """`vitrail.report` of this run: writes the page and returns its path."""
        return report(self.path, **how)
