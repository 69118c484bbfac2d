"""Every family, task and kind of pixels gives in ONNX what it gives in PyTorch; what a file says about itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from peers import randomise
from torch import Tensor, nn

from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.export import onnx as writing
from vitrail.export.onnx import describe_preprocessing, write
from vitrail.export.proof import prove
from vitrail.export.sample import to_check
from vitrail.models import ModelConfig
from vitrail.models.bit import BiTConfig
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.pvt import PVTConfig
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.models.swin import SwinConfig
from vitrail.models.swin_v2 import SwinV2Config
from vitrail.models.vit import ViTConfig
from vitrail.runs.exported import ExportedModel, parts
from vitrail.runs.run import Run
from vitrail.tasks import Multiclass, Multilabel, Regression, Task
from vitrail.version import VERSION
from vitrail.weights import Card, open_run

POOLS, POSITIONS = (get_args(get_type_hints(ViTConfig)[field]) for field in ("pool", "pos"))
VIT = ViTConfig(width=16, depth=1, heads=2, mlp=32, patch=4, img_size=(8, 12), classes=3)


class Together(nn.Module):
    """Several models that read the same images, with their logits side by side: one export serves them all."""

    def __init__(self, configs: list[ModelConfig]):
        super().__init__()
        self.parts = nn.ModuleList(map(models.build, configs))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([part(images) for part in self.parts], dim=1)


def vits() -> list[ModelConfig]:
    """Every pool and every position, and every switch."""
    switched = replace(VIT, pos="relative", head="tanh", stem="conv", act="swiglu", registers=2, layer_scale=0.1)
    return [*(replace(VIT, pool=pool, pos=pos) for pool, pos in zip(cycle(POOLS), POSITIONS)), switched]


def patterned() -> list[ModelConfig]:
    """Every attention pattern; two blocks where they differ."""
    base = replace(VIT, patch=2)
    depths = {"window:3,shift": 2, "axial": 2, "neighbourhood:3": 1, "strided:4": 1}
    return [replace(base, attention=pattern, depth=depth) for pattern, depth in depths.items()]


NAMES = ("class 0", "class 1", "class 2")


def card(config: ModelConfig, task: Task | None = None, bits: int = 8) -> Card:
    mean, std = (0.1, 0.5, 0.3, 0.2)[: config.channels], (0.2, 0.3, 0.1, 0.4)[: config.channels]
    preprocess = Preprocess(config.img_size, config.channels, mean=mean, std=std, bits=bits)
    return Card(model="a model", config=config, task=task or Multiclass(NAMES), preprocess=preprocess)


# A model of each family, and among them every task and every kind of pixels.
SIZE: dict[str, Any] = {"img_size": (16, 24), "classes": 3}
CASES: dict[str, tuple[Callable[[], nn.Module], Card]] = {
    name: (lambda config=about.config: models.build(config), about)
    for name, about in {
        "hybrid, 4 channels": card(HybridConfig(16, 1, 2, 32, (16, 32), (1, 1), first=4, groups=2, **SIZE, channels=4)),
        "bit, regression": card(
            BiTConfig((16, 32), (1, 1), groups=2, **SIZE, channels=1),
            Regression(NAMES, (5.0, -200.0, 0.0), (0.1, 30.0, 2.0)),
        ),
        "mixer, labels, 16 bits": card(
            MixerConfig(16, 1, 8, 32, patch=4, img_size=(8, 12), channels=1, classes=3),
            Multilabel(NAMES, (0.5, 0.3, 0.6)),
            bits=16,
        ),
        "pvt, floats": card(PVTConfig((8, 16), (1, 1), (1, 2), (4, 2), (2, 1), patch=4, **SIZE), bits=32),
        "coatnet": card(CoAtNetConfig((16, 32, 32), (1, 1, 1), 8, convs=1, img_size=(25, 32), classes=3)),
    }.items()
}
SWINS = ((8, 16), (2, 1), (2, 4), 3)
PYRAMID = ((8, 16), (1, 1), (1, 2), (4, 2), (2, 1))
for name, configs in {
    "vits": vits(),
    "patterns": patterned(),
    "swins": [kind(*SWINS, patch=2, img_size=(15, 22), classes=3) for kind in (SwinConfig, SwinV2Config)],
    "pvt_v2": [PVTv2Config(*PYRAMID, linear, img_size=(17, 23), classes=3) for linear in (False, True)],
}.items():
    many = tuple(f"class {i}" for i in range(3 * len(configs)))
    about = card(replace(configs[0], classes=len(many)), Multiclass(many))
    CASES[name] = (lambda configs=configs: Together(configs), about)


def noise(about: Card, batch: int) -> NDArray[Any]:
    """Pixels (B, C, H, W) of every value that there can be."""
    p = about.preprocess
    random, shape = np.random.default_rng(batch), (batch, p.channels, *p.img_size)
    if p.bits == 32:
        return random.normal(size=shape).astype(np.float32)
    return random.integers(0, {8: 255, 16: 65535}[p.bits], shape, endpoint=True).astype(p.dtype)


@pytest.mark.parametrize(("build", "about"), CASES.values(), ids=CASES)
def test_every_family_gives_what_pytorch_gives(build, about, tmp_path):
    model = randomise(build())
    inside = about.preprocess.bits > 8  # a few are enough: preprocessing knows no family
    write(tmp_path / "model.onnx", model, about, preprocess=inside)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    if not inside:
        reads_normalised_images(tmp_path / "model.onnx", about.preprocess)
    file = ExportedModel(tmp_path / "model.onnx")
    for batch in (1, 3):
        pixels = noise(about, batch)
        logits, meant = map(torch.from_numpy, file.answers(pixels))
        white = {8: 255, 16: 65535, 32: 1}[about.preprocess.bits]
        mean, std = (np.reshape(numbers, (-1, 1, 1)) for numbers in (about.preprocess.mean, about.preprocess.std))
        with torch.no_grad():
            expected = model(torch.from_numpy((pixels / np.float64(white) - mean) / std).float())
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert batch == 1 or not torch.allclose(logits[0], logits[1])
        if isinstance(about.task, Regression):
            expected = expected * torch.tensor([0.1, 30, 2]) + torch.tensor([5, -200, 0])
        else:
            expected = expected.sigmoid() if isinstance(about.task, Multilabel) else expected.softmax(1)
        torch.testing.assert_close(meant, expected, rtol=1e-4, atol=1e-4)


def reads_normalised_images(file: Path, preprocess: Preprocess) -> None:
    session = onnxruntime.InferenceSession(file)
    (images,) = session.get_inputs()
    shape = ["batch", preprocess.channels, *preprocess.img_size]
    assert (images.name, images.type, images.shape) == ("images", "tensor(float)", shape)
    normalised = f"subtract {list(preprocess.mean)}, divide by {list(preprocess.std)}"
    assert normalised in session.get_modelmeta().custom_metadata_map["preprocess"]


def test_the_file_says_what_it_is(exported, trained):
    session = onnxruntime.InferenceSession(exported.file)
    (pixels,) = session.get_inputs()
    assert (pixels.name, pixels.type, pixels.shape) == ("pixels", "tensor(uint8)", ["batch", "height", "width", 1])
    assert [(o.name, o.shape) for o in session.get_outputs()] == [
        ("logits", ["batch", 10]),
        ("probabilities", ["batch", 10]),
    ]
    about, run = session.get_modelmeta().custom_metadata_map, Run(trained)
    assert Card.from_json(json.loads(about["vitrail"])) == open_run(trained)[1]
    assert json.loads(about["names"]) == list("0123456789")
    assert about["task"] == "multiclass"
    assert json.loads(about["temperature"]) == run.card.task.temperature
    assert about["version"] == VERSION
    assert about["weights_sha256"] == hashlib.sha256(run.weights_file.read_bytes()).hexdigest()
    assert "in any size" in about["preprocess"]
    graph = onnx.load(exported.file)
    onnx.checker.check_model(graph, full_check=True)
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", 20)]
    assert not [node for node in graph.graph.node if node.doc_string or node.metadata_props]  # paths of this machine
    names = [node.name for node in graph.graph.node]
    assert {"blocks.0.attn.qkv.0", "blocks.5.mlp.fc2", "head"} <= {*names}
    assert len({*names}) == len(names)


def test_an_empty_image_does_not_end_the_process(exported):
    session = onnxruntime.InferenceSession(exported.file)
    for height, width in ((0, 8), (8, 0)):  # integers divided by zero would
        assert np.isfinite(session.run(None, {"pixels": np.zeros((1, height, width, 1), np.uint8)})[0]).all()


def test_large_weights_lie_beside_the_file(exported, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_ONE_FILE", 1000)
    writing.save(onnx_ir.load(exported.file), tmp_path / "large.onnx")
    model, about = open_run(trained)
    proof = prove(tmp_path / "large.onnx", model, about, to_check(trained, about, None, 1), "ONNX")
    assert [part.name for part in parts(tmp_path / "large.onnx")] == ["large.onnx", "large.onnx.data"]
    assert proof.parts["large.onnx"].bytes < proof.parts["large.onnx.data"].bytes
    assert re.search(r"^weights +large.onnx.data, .* must stay next to it$", proof.table(), re.M)


def test_description_of_preprocessing():
    assert describe_preprocessing(Preprocess((224, 192), 3, crop=0.875), inside=False) == (
        "Rotate the image by its EXIF orientation, resize it (bicubic, antialiased, keeping its aspect ratio) to just "
        "cover 256 x 219 (height x width), crop the centre 224 x 192, divide its RGB values (0 to 255) by 255, "
        "subtract [0.5], divide by [0.5], and pass it as float32 (batch, channels, height, width)."
    )
    assert "grey, as uint16, 0 to 65535, in any size." in describe_preprocessing(Preprocess((8, 8), 1, bits=16))
    assert "5 channels, as float32, unscaled, in any" in describe_preprocessing(Preprocess((8, 8), 5, bits=32))
