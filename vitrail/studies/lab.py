"""The laboratory of a study: its data, its budget, and the runs that it can make."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitrail.models import configure, macs
from vitrail.studies.sets import Cut
from vitrail.studies.study import Fair, Job, Label, Results

RATES = (3e-4, 1e-3, 3e-3)  # learning rates of AdamW to choose from
TUNING = 0.25  # length of a tuning run, as a share of a full one
TUNING_SEED = 1000
_BEYOND = 2  # further learning rates that are tried if the best is the lowest or highest

# The same for all families, so that none has another's recipe: Adam, warm-up and cosine, light augmentation.
COMMON: dict[str, Any] = {
    "recipe": "small",
    "opt": "adamw",
    "lr": 1e-3,
    "sched": "cosine",
    "weight_decay": 0.05,
    "mixup": 0.0,
    "cutmix": 0.0,
    "drop_path": 0.0,
    "smoothing": 0.1,
}
# Fine-tuning is like training, whatever the weights come from; its learning rate is that of all layers.
TUNED: dict[str, Any] = {name: value for name, value in COMMON.items() if name != "drop_path"} | {
    "recipe": "finetune",
    "head_init": "zero",  # as in the paper
    "body_lr": 1.0,
    "layer_decay": 1.0,
}


_macs = cache(macs)  # a study asks for the same few models again and again


@dataclass(frozen=True)
class Lab:
    """What a study may use. `images` is the length of a full run: images seen, or for equal compute those of `unit`."""

    cut: Cut
    images: int
    seeds: int
    batch: int
    fair: Fair
    unit: float = 0.0  # multiply-accumulates of an image, to which equal compute refers
    targets: tuple[Cut, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """The side of the images: their own if they are small, else 64 pixels; a multiple of 4."""
        h, w = (min(side, 64) for side in self.cut.data.size)
        return max(round(h / 4), 2) * 4, max(round(w / 4), 2) * 4

    @property
    def patch(self) -> int:
        """The largest patch size with at least 7 patches a side, or 4 for tiny images."""
        shorter = min(self.size)
        most = max(shorter // (7 if shorter >= 28 else 4), 1)
        common = math.gcd(*self.size)
        return max(p for p in range(1, most + 1) if common % p == 0)

    def macs(self, model: str, **settings: Any) -> int:
        """Multiply-accumulates of a model for an image of this data."""
        arch = {name: settings[name] for name in ("pool", "pos", "stem", "attention") if name in settings}
        size = settings.get("img_size", self.size)
        channels, classes = self.cut.data.channels, len(self.cut.data.classes)
        return _macs(configure(model, img_size=size, channels=channels, classes=classes, **arch))

    def vit(self, width: int = 64, depth: int = 4, heads: int = 2, mlp: int = 128, patch: int | None = None) -> str:
        """The name of a ViT; by default the one to whose compute `unit` refers."""
        return f"vit_w{width}d{depth}h{heads}m{mlp}p{patch or self.patch}"

    def job(
        self,
        labels: Mapping[str, Label],
        model: str,
        *,
        seed: int,
        share: float = 1.0,
        train: int | None = None,
        epoch: int = 1,
        cut: Cut | None = None,
        method: str = "",
        weights: Job | None = None,
        forget: bool = False,
        probes: tuple[tuple[str, str], ...] = (),
        look: str = "",
        tuning: bool = False,
        **settings: Any,
    ) -> Job:
        """A run of a model. `share` is its length in full runs; `train` limits the training images.

        Arrays of training images are repeated until an epoch has at least `epoch` images, since each is validated.
        For equal compute, the number of images is that of a full run times the compute of `unit` over the model's.
        """
        cut = cut or self.cut
        count = cut.images if train is None else min(train, cut.images)
        seen = self.images * share
        if self.fair == "compute":
            seen *= self.unit / self.macs(model, **settings)
        times = math.ceil(epoch / count) if cut.arrays else 1
        per_epoch = max(times * count // self.batch, 1)  # batches: an incomplete last one is dropped
        epochs = max(seen / (per_epoch * min(self.batch, times * count)), 1 / per_epoch)
        data = str(cut.file(train, seed % TUNING_SEED, times))
        base: dict[str, Any]
        if weights is not None:
            base = {**TUNED, "warmup_epochs": round(0.1 * epochs, 4)}  # model and image size are those of the weights
        else:
            base = {"model": model, "img_size": self.size}
            base |= {} if method else {**COMMON, "warmup_epochs": round(0.1 * epochs, 4)}
        chosen = {**base, "seed": seed, "batch_size": self.batch, "cache_gb": 0.0, **settings}
        labels = {**labels, "seed": seed}
        name = "-".join(_slug(value) for value in labels.values())
        full = {**chosen, "epochs": round(epochs, 4)}
        digest = hashlib.blake2b(
            json.dumps([full, Path(data).name, method, weights.name if weights else "", forget], default=str).encode(),
            digest_size=3,
        ).hexdigest()
        return Job(
            name=f"{name}-{digest}",
            labels=dict(labels),
            data=data,
            settings=chosen,
            epochs=full["epochs"],
            method=method,
            weights=None if weights is None else weights.name,
            forget=forget,
            probes=probes,
            look=look,
            tuning=tuning,
            full=seen if share == 1 and not tuning else None,
        )

    def trial(self, name: str, model: Mapping[str, Any], lr: float) -> Job:
        """A short run that tries a learning rate, with a seed of its own."""
        settings = {"seed": TUNING_SEED, "share": TUNING, **model, "lr": lr}
        return self.job({"tuning": name, "lr": lr}, tuning=True, **settings)

    def choose_lr(
        self, models: Mapping[str, Mapping[str, Any]], rates: tuple[float, ...] = RATES
    ) -> Generator[list[Job], Results, dict[str, float]]:
        """The best learning rate of each model on held-out images, by short runs with a seed of their own.

        The rate of fine-tuning is chosen with the weights of such a run: `trial`, at the rate that it was chosen for.
        If the best is the lowest or highest that was tried, the next one is tried too, up to two beyond `rates`.
        """
        middle = sorted(rates)[len(rates) // 2]
        outwards = sorted(rates, key=lambda rate: abs(math.log(rate / middle)))  # the first of equals is chosen
        wanted: dict[str, list[float]] = dict.fromkeys(models, outwards)
        tried: dict[str, list[float]] = {name: [] for name in models}
        best: dict[str, float] = {}
        results = Results()
        for _ in range(1 + _BEYOND):
            results += yield [
                self.trial(name, model, lr) for name, model in models.items() for lr in wanted.get(name, [])
            ]
            tried |= {name: [*tried[name], *more] for name, more in wanted.items()}
            best = {name: float(results.best("held_out", "lr", tuning=name)[0]) for name in models}
            wanted = {name: [rate] for name in models if (rate := outside(best[name], tried[name])) is not None}
            if not wanted:
                break
        return best


def outside(best: float, tried: Sequence[float]) -> float | None:
    """The learning rate beyond the best one, in steps of 1, 3, 10, …; None unless that is the lowest or highest."""
    if min(tried) < best < max(tried):
        return None
    step = round(2 * math.log10(best)) + (1 if best == max(tried) else -1)
    return float(f"{3 if step % 2 else 1}e{step // 2}")


def _slug(value: Label) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(character if character.isalnum() or character in "._" else "_" for character in text)
