"""Box heads: parameters, places of their predictions, YOLOS against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import TINY as FAMILIES
from peers import TOLERANCE, distance, randomise, transformers

from vitrail import models
from vitrail.models.dense import DenseConfig
from vitrail.models.heads.boxes import SimplePyramid, Towers
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import yolos

TINY = ViTConfig(width=32, depth=2, heads=2, mlp=64, patch=16, img_size=(64, 96), classes=0)


def dense(head: str, body=TINY, classes: int = 3) -> models.Model:
    torch.manual_seed(0)
    return models.build(DenseConfig.of(body, (head,), classes)).eval()


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameters_of_the_published_heads():
    with torch.device("meta"):
        centreness = 256 * 9 + 1  # which our head does without
        assert count(Towers(256, 80, 4, [8, 16, 32, 64, 128])) == 4_920_661 - centreness
        counts = [count(SimplePyramid(width, 256)) for width in (192, 384, 768, 1024)]
    assert counts == [2_664_880, 3_298_144, 5_560_000, 7_805_184]


@pytest.mark.parametrize(
    ("width", "depth", "heads", "size", "head", "parameters"),
    [
        (192, 12, 3, (800, 1328), "yolos", 6_488_736),
        (384, 12, 6, (512, 864), "yolos-mid", 30_684_768),
        (330, 14, 6, (512, 864), "yolos-mid", 27_561_696),
        (768, 12, 12, (800, 1344), "yolos-mid", 127_798_368),
    ],
)
def test_parameters_of_yolos(width, depth, heads, size, head, parameters):
    body = ViTConfig(width=width, depth=depth, heads=heads, mlp=4 * width, patch=16, img_size=size, classes=0)
    with torch.device("meta"):
        assert count(models.build(DenseConfig.of(body, (head,), 91))) == parameters


@pytest.mark.parametrize("head", ["fcos", "pyramid"])
def test_every_point_predicts_a_box_around_itself(head):
    model = dense(head)
    outputs = model(torch.zeros(1, 3, 64, 96))
    assert outputs[..., 4:].sigmoid().max() < 0.05
    predicts_around_its_points(model)


def predicts_around_its_points(model: models.Model) -> None:
    """Without weights in the last layer, sides of boxes are two strides from their point."""
    size = model.config.img_size
    torch.nn.init.zeros_(model.head.towers.box.weight)
    points = model.head.points(size)
    places, sides = points[:, :2], 2 * points[:, 2:3]
    boxes = model(torch.zeros(1, 3, *size))[0, :, :4]
    torch.testing.assert_close(boxes, torch.cat([places - sides, places + sides], dim=1))


@pytest.mark.parametrize("head", ["fcos", "pyramid"])
@pytest.mark.parametrize("family", ["bit", "swin", "swin_v2", "pvt_v2", "coatnet"])
def test_points_of_padded_images_are_true_strides_apart(family, head):
    """The sides of the image are not multiples of the last stride, 8 or 16; `fcos` upsamples the latter."""
    coarse = {"shrink": True} if family in ("bit", "coatnet") else {"patch": 8}
    model = dense(head, replace(FAMILIES[family], img_size=(36, 52), channels=3, classes=0, **coarse))
    if head == "pyramid":
        assert model.head.towers.strides == [model.config.stride // 2, model.config.stride]
    predicts_around_its_points(model)


@pytest.mark.parametrize("middle", [False, True])
def test_yolos_is_that_of_transformers_in_both_directions(middle):
    hf = transformers()
    size = {"image_size": [64, 96], "patch_size": 16, "num_detection_tokens": 100, "num_labels": 3}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = hf.YolosConfig(**size, **shape, use_mid_position_embeddings=middle, layer_norm_eps=1e-12)
    theirs = randomise(hf.YolosForObjectDetection(config), 0)
    ours = dense("yolos-mid" if middle else "yolos", replace(TINY, eps=1e-12))
    state = {name.removeprefix("vit."): value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(yolos.read(state))
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        answer, outputs = theirs(images), ours(images)
    assert distance(outputs[..., 4:], answer.logits) < TOLERANCE
    x, y, w, h = answer.pred_boxes.unbind(-1)
    boxes = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1) * torch.tensor([96, 64, 96, 64])
    assert distance(outputs[..., :4], boxes) < TOLERANCE
    written = yolos.write(ours.state_dict(), ours.config)
    back = yolos.read({name.removeprefix("vit."): value for name, value in written.items()})
    assert all(torch.equal(back[name], value) for name, value in ours.state_dict().items())


def test_a_head_that_does_not_fit_says_why():
    with pytest.raises(Exception, match="yolos needs a ViT with a class token"):
        dense("yolos", replace(TINY, pool="gap"))
