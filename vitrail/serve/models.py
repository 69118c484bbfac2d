"""The served models by name, and the swap to a new version when its files change.

A version is a loaded model. Requests hold on to the version they were accepted with: a swap replaces the reference,
and the old version is freed when its last request is answered. A new version that cannot be loaded is reported, and the
old one stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.images import Pixels
from vitrail.errors import UserError, nearest
from vitrail.progress import log
from vitrail.runs.predictor import Predictor
from vitrail.runs.run import Run
from vitrail.serve.errors import ApiError
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import Settings

Array = NDArray[Any]
Stamp = tuple[tuple[int, int, int], ...]  # of the model's files: changes whenever they do


class Version:
    """A model in memory."""

    def __init__(self, name: str, source: str, settings: Settings):
        self.name = name
        self.stamp = stamp(source)
        # Exported files have their own runtime.
        self.predictor = Predictor(source, settings.device, engine="auto" if is_exported(source) else settings.engine)
        self.id = self.predictor.fingerprint[:12]
        self.loaded = time.time()
        self._warm_up(settings.max_batch)

    @property
    def explains(self) -> bool:
        """Whether it has attention maps or relevance; files of other runtimes have neither."""
        return self.predictor.module is not None

    @property
    def embeds(self) -> bool:
        """Whether it has feature vectors; files of other runtimes have none."""
        return self.predictor.module is not None

    @cached_property
    def facts(self) -> dict[str, Any] | None:
        """What can be explained."""
        if not self.explains:
            return None
        from vitrail.serve import maps

        return maps.facts(self.predictor)

    def outputs(self, images: Sequence[Pixels]) -> Array:
        return self.predictor.outputs(np.stack(images))

    def features(self, images: Sequence[Pixels]) -> Array:
        return self.predictor.features(np.stack(images))

    def _warm_up(self, max_batch: int) -> None:
        """Chooses the engine and computes the smallest and the largest batch, so that no request waits for it."""
        seen = self.predictor.card.preprocess
        noise = np.random.default_rng(0).integers(0, 256, (max_batch, seen.channels, *seen.img_size))
        images = noise.astype(seen.dtype)
        self.predictor.settle(images)
        self.predictor.outputs(images)
        self.predictor.outputs(images[:1])
        if self.explains:
            from vitrail.serve import maps

            maps.warm_up(self.predictor, images[0])


class Models:
    """The current version of every model."""

    def __init__(self, settings: Settings, metrics: Metrics):
        self._settings, self._metrics = settings, metrics
        self._sources = dict(settings.sources)
        self._seen: dict[str, Stamp] = {}  # the files of the last look, to swap only what is no longer written to
        self.current: dict[str, Version] = {}

    def load(self) -> None:
        """Loads every model; raises UserError."""
        for name, source in self._sources.items():
            version = self.current[name] = Version(name, source, self._settings)
            card = version.predictor.card
            log.info(f"Model {name}: {card.model}, {card.task}, version {version.id}, {version.predictor.engine}.")

    def get(self, name: str | None) -> Version:
        """A model by name, or the first one."""
        if name is None:
            return next(iter(self.current.values()))
        if name not in self.current:
            raise ApiError(
                404, "unknown_model", f"There is no model {name[:64]!r}.{nearest(name[:64], self.current)} See /models."
            )
        return self.current[name]

    def versions(self) -> list[tuple[str, str]]:
        return [(name, version.id) for name, version in self.current.items()]

    def refresh(self) -> None:
        """Swaps in new versions of models whose files have changed and are complete."""
        for name, source in self._sources.items():
            now, before = stamp(source), self._seen.get(name)
            self._seen[name] = now
            if now == before and now and now != self.current[name].stamp:
                self._swap(name, source)

    def _swap(self, name: str, source: str) -> None:
        old = self.current[name]
        try:
            new = Version(name, source, self._settings)
        except Exception as error:  # a damaged file raises nearly anything
            reason = str(error) if isinstance(error, UserError) else repr(error)
            log.warning(f"Model {name}: the new version cannot be loaded, so {old.id} stays. {reason}")
            self._metrics.add("reloads", model=name, result="failed")
            old.stamp = self._seen[name]  # until the files change again
            return
        if new.stamp != stamp(source):
            return  # it was written to meanwhile: at the next look
        self.current[name] = new
        self._metrics.add("reloads", model=name, result="swapped")
        log.info(f"Model {name}: version {new.id} replaces {old.id}.")


def is_exported(source: str) -> bool:
    """Whether a source is a file of another runtime, which needs no torch."""
    return Path(source).suffix.lower() in (".onnx", ".xml")


def stamp(source: str) -> Stamp:
    """Identifies the content of a model's files; empty for a hub name."""
    path = Path(source)
    weights = Run(path).weights_file if path.is_dir() else path
    found = []
    for file in (weights, *(weights.with_suffix(suffix) for suffix in (".json", ".bin") if suffix != weights.suffix)):
        try:
            facts = file.stat()
        except OSError:
            continue
        found.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
    return tuple(found)
