"""A new architecture is one file: this one, which no file of the package knows, goes the whole way.

It is a plain convolutional network with a little attention at its end, so that most capabilities have something to say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrail
from vitrail import models
from vitrail.errors import UserError
from vitrail.models.layers import Block, head_of
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.position import Grid
from vitrail.models.validate import check_counts, check_heads, check_images, check_rates
from vitrail.train.checkpoint import checkpoint_path

pytestmark = pytest.mark.usefixtures("plain_runs")

# The architecture ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvFormerConfig(ModelConfig):
    width: int
    depth: int
    heads: int = 2
    img_size: tuple[int, int] = (8, 8)
    channels: int = 3
    classes: int = 10
    drop: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, "width", "depth", "heads")
        check_heads((self.width,), (self.heads,))
        check_rates(self)

    @property
    def stride(self) -> int:
        return 2

    @property
    def grid(self) -> Grid:
        return -(-self.img_size[0] // 2), -(-self.img_size[1] // 2)


class Flat(nn.Module):
    """A convolution that halves the image, as tokens."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).relu().flatten(2).transpose(1, 2)  # B N D


class ConvFormer(Model):
    config: ConvFormerConfig

    def __init__(self, config: ConvFormerConfig):
        super().__init__()
        c = self.config = config
        self.stem = Flat(c.channels, c.width)
        self.blocks = nn.ModuleList(Block(c.width, c.heads, 2 * c.width, c.drop, c.drop_path) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width)
        self.head = head_of(c.width, c.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        return self.features(images).mean(dim=(2, 3))

    def features(self, images: Tensor, levels: bool = False) -> Any:
        check_images(images, self.config)
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        last = self.norm(x).transpose(1, 2).unflatten(2, self.config.grid)
        return [last] if levels else last

    def stages(self) -> list[nn.Module]:
        return [self.stem, *self.blocks, self.norm, *([self.head] if self.config.classes else [])]

    def attentions(self) -> list[AttentionLayer]:
        return [AttentionLayer(block.attn, self.config.grid, self.config.stride) for block in self.blocks]

    def last_map(self) -> tuple[nn.Module, int]:
        return self.norm, -1


CONFIGS = {"convformer_tiny": ConvFormerConfig(16, 2)}

# The whole way ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    models.register("convformer", ConvFormerConfig, ConvFormer, CONFIGS)
    yield
    del models.FAMILIES["convformer"]
    for name in CONFIGS:
        del models.CONFIGS[name]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two epochs of digits, and what a kill after the first epoch would have left of it."""
    folder = tmp_path_factory.mktemp("runs")
    killed, replace = folder / "killed", Path.replace

    def watched(source: Path, target: Path) -> Path:
        replaced = replace(source, target)
        if target == checkpoint_path(folder / "run") and not killed.exists():
            shutil.copytree(folder / "run", killed)
        return replaced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", watched)
        run = vitrail.train(
            "digits",
            model="convformer",
            epochs=2,
            lr=3e-3,
            batch_size=32,
            grad_checkpointing=True,
            model_ema=0.9,
            out=folder,
            name="run",
        )
    return run, killed


def test_it_is_listed():
    (row,) = vitrail.models("convformer")
    assert (row.name, row.tokens, row.img_size) == ("convformer_tiny", 16, (8, 8))


def test_it_resumes_to_the_bit(finished):
    run, killed = finished
    vitrail.train(resume=killed)
    assert (killed / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_it_is_loaded_and_measured(finished):
    run, _ = finished
    assert json.loads((run / "model.json").read_text())["family"] == "convformer"
    model = vitrail.load(run)
    assert type(model) is ConvFormer
    assert vitrail.evaluate(run).top1 > 0.15  # chance is a tenth
    body = vitrail.load(run, classes=0)
    assert body(torch.zeros(1, 1, 8, 8)).shape == (1, 16)


def test_it_predicts_and_embeds(finished, digits):
    run, _ = finished
    files = sorted(digits.glob("3/*.png"))[:3]
    assert len(list(vitrail.predict(run, files))) == 3
    assert [np.shape(found.features) for found in vitrail.embed(run, files)] == [(16,)] * 3


def test_it_is_explained(finished, digits):
    run, _ = finished
    explained = vitrail.explain(run, [digits / "3" / "3.png"], data="digits")
    drawn = {file.stem.partition("-")[0] for file in explained.files}
    assert {"rollout", "relevance", "heads", "distance", "filters", "map"} <= drawn


def test_it_is_reported(finished):
    run, _ = finished
    assert "convformer_tiny" in vitrail.report(run).read_text(encoding="utf-8")


def test_it_is_exported(finished):
    run, _ = finished
    proof = vitrail.export(run, no_preprocess=True)  # whose shapes take most of the time
    assert proof.same == proof.images


def test_it_is_fine_tuned_frozen_and_in_part(finished, tmp_path):
    run, _ = finished
    again = vitrail.train("digits", weights=str(run), freeze=1, layer_decay=0.5, epochs=1, out=tmp_path, name="again")
    before, after = vitrail.load(run), vitrail.load(again)
    assert torch.equal(before.stem.conv.weight, after.stem.conv.weight)
    assert not torch.equal(before.head.weight, after.head.weight)


def test_it_is_converted_to_our_own_format_alone(finished, tmp_path):
    run, _ = finished
    assert type(vitrail.load(vitrail.convert(run, tmp_path / "model.safetensors"))) is ConvFormer
    with pytest.raises(UserError, match="A convformer_tiny can be written for vitrail, but not for timm"):
        vitrail.convert(run, tmp_path / "theirs.safetensors", to="timm")
