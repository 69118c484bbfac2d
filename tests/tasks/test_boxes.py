"""Boxes: placing, detecting, answers, and every backbone with every head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import TINY

from vitrail import UserError, models
from vitrail.models.dense import DenseConfig
from vitrail.models.heads import HEADS
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Boxes
from vitrail.tasks.box_loss import BoxLoss
from vitrail.tasks.detect import detect, detections
from vitrail.tasks.objective import Batch
from vitrail.tasks.placement import Placement, Truth, drawn, fitted, truths

TASK = Boxes(("cat", "dog"), (0.5, 0.3))
ANNOTATION = np.array([[0, 10, 20, 50, 60, 0], [1, 0, 0, 100, 80, 0], [0, 90, 70, 100, 80, 1]], np.float32)
SIZE, INPUT = (80, 100), (32, 40)
TARGETS = np.array([ANNOTATION, np.zeros((0, 6), np.float32), None], dtype=object)[:2]


@pytest.mark.parametrize("seed", range(4))
def test_boxes_move_with_the_pixels(seed):
    """A box painted on the image lies where the placed box says, also if it is cut off or mirrored."""
    from vitrail.data.preprocess import Preprocess

    placement = drawn(SIZE, INPUT, 0.25, 0.5, np.random.default_rng(seed))
    image = np.zeros((*SIZE, 1), np.uint8)
    image[20:60, 10:50] = 255
    pixels = Preprocess(INPUT, 1, fit="pad").place(image, placement)[0]
    kind, x0, y0, x1, y1, _ = TASK.placed(ANNOTATION[:1], placement)[0]
    assert kind == 0
    rows, columns = (np.flatnonzero((pixels > 127).any(axis=axis)) for axis in (1, 0))
    found = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    np.testing.assert_allclose(found, [x0, y0, x1, y1], atol=1.01)


def test_little_of_an_object_is_ignored_and_nothing_is_left_out():
    cut = Placement(SIZE, INPUT, (20, 40, 40, 50), (0, 0, 32, 40))  # shows x from 40 to 90: a quarter of the first
    placed = TASK.placed(ANNOTATION[:2], cut)
    assert placed[:2].tolist() == [[1, 0, 0, 40, 32, 1], [0, 0, 0, 8, 32, 1]]
    assert (placed[2:, 0] == -1).all()


def outputs(*boxes: tuple[float, ...], softmax: bool = False) -> torch.Tensor:
    """Sure predictions of x0, y0, x1, y1, logit, class, in pixels of the input."""
    found = torch.full((1, len(boxes) + 3, 6 + softmax), -9.0)
    found[..., :4] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for i, (*box, logit, kind) in enumerate(boxes):
        found[0, i, :4], found[0, i, 4 + int(kind)] = torch.tensor(box), logit
    return found


def test_detections_are_suppressed_within_a_class_but_not_in_a_set():
    twice = (4, 8, 20, 24, 3.0, 0), (4, 8, 20, 23, 2.0, 0), (4, 8, 20, 24, 1.0, 1)
    dense = TASK.meaning(outputs(*twice))[0]
    assert dense[:3, 4].tolist() == pytest.approx(torch.tensor([3.0, 1.0, -9.0]).sigmoid().tolist(), abs=1e-6)
    assert dense[:2, 5].tolist() == [0, 1]
    assert TASK.meaning(outputs(*twice, softmax=True)).shape == (1, 6, 6)
    assert (TASK.meaning(outputs(*twice, softmax=True))[0, :3, 4] > 0.7).sum() == 3


@pytest.mark.parametrize("classes", [2, 1])
def test_arrays_and_tensors_give_the_same_detections(classes):
    """Dense predictions that overlap a lot; with one class the second logit is "no object"."""
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(2, 400, 2, generator=generator) * 60
    size, logits = (torch.rand(2, 400, 2, generator=generator) for _ in range(2))
    found = torch.cat([corner, corner + 20 + 20 * size, 9 * logits - 6], dim=-1)
    np.testing.assert_allclose(detections(found.numpy(), classes), detect(found, classes).numpy(), atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # within torch itself
def test_graphs_of_every_runtime_give_the_same_detections(tmp_path):
    """Also of a chain of boxes that each overlap the next, so that every decision depends on all before it."""
    import onnxruntime

    from vitrail.runs.openvino import import_openvino

    class Both(torch.nn.Module):
        def forward(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return detect(outputs, 2), detect(outputs, 1)  # of a dense head, and of a set of predictions

    left = torch.arange(60) * 2.0
    chain = torch.stack([left, 0 * left, left + 10, 0 * left + 10, 3 - left / 60, -6 - left / 30], dim=1)
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(60, 2, generator=generator) * 60
    other = torch.cat([corner, corner + 25, 9 * torch.rand(60, 2, generator=generator) - 6], dim=1)
    batch, file = torch.stack([chain, other]), tmp_path / "detect.onnx"
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(Both().eval(), (batch,), file, dynamic_shapes=shapes, dynamo=True, verbose=False)
    core = import_openvino().Core()
    session, compiled = onnxruntime.InferenceSession(file), core.compile_model(core.read_model(file), "CPU")
    for part in (batch, batch[:1]):
        expected = [detections(part.numpy(), classes) for classes in (2, 1)]
        assert (expected[0][0, :60, 4] > 0.5).sum() == 30
        for found in (session.run(None, {"outputs": part.numpy()}), compiled([part.numpy()]).values()):
            for ours, theirs in zip(expected, found, strict=True):
                there = ours[..., 4:5] > 0  # the others are in no order
                np.testing.assert_allclose(theirs * there, ours * there, atol=1e-4)


def test_an_answer_is_in_pixels_of_the_image():
    placement = fitted(SIZE, INPUT)
    answer = TASK.located(outputs((4, 8, 20, 24, 3.0, 0), (0, 0, 40, 32, -0.5, 1))[0].numpy(), placement)
    assert answer.labels == ("cat", "dog")
    assert answer.boxes == ((10, 20, 50, 60), (0, 0, 100, 80))
    assert answer.text() == "1 cat, 1 dog"
    assert answer.detections()[0] == {"category_id": 0, "bbox": [10, 20, 40, 40], "score": answer.probabilities[0]}
    assert answer.rows()[1][:1] + answer.rows()[1][2:] == ["dog", "0.00", "0.00", "100.00", "80.00"]
    assert TASK.located(outputs((4, 8, 20, 24, 3.0, 0))[0].numpy(), placement, 0.99).rows() == [[""] * 6]
    layer = np.asarray(answer.layer())
    assert layer.shape == (*SIZE, 4)
    assert layer[60, 30, 3] == 255  # the lower side of the cat
    graph = TASK.meaning_at(outputs((4, 8, 20, 24, 3.0, 0)), SIZE, INPUT, INPUT)
    assert graph[0, 0, :4].tolist() == [10, 20, 50, 60]


def test_merged_meters_measure_what_one_would_have():
    placement = fitted(SIZE, INPUT)
    given = np.concatenate([outputs((4, 8, 20, 24, 3.0, 0)).numpy(), outputs((4, 8, 20, 24, 1.0, 1)).numpy()])
    targets = truths(TARGETS, [placement, placement])
    one, first, second = (TASK.meter() for _ in range(3))
    one.add(given, targets)
    first.add(given[:1], targets[:1])
    second.add(given[1:], targets[1:])
    first.merge(second)
    assert first.scores().to_json() == one.scores().to_json()
    scores = one.scores()
    assert scores.per_class[0].ap50 == pytest.approx(1)
    assert scores.per_class[1].recall == 0
    assert scores.confusion.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert TASK.restore(scores.to_json()).to_json() == scores.to_json()
    assert TASK.losses(given, targets).tolist() == pytest.approx([1 / 3, 1])
    assert TASK.confused(given, targets, 5, 3)[0].true in ("dog", "background")
    layers = TASK.layers(given[0], Truth(ANNOTATION, placement))
    assert {layer.size for layer in layers} == {(100, 80)}


def test_targets_without_boxes_are_refused():
    with pytest.raises(UserError, match="No training image of here has a 'dog'"):
        TASK.check({"train": np.array([ANNOTATION[:1], None], object)[:1]}, "here")
    assert TASK.counts(TARGETS).tolist() == [1, 1]
    assert [text for text, _ in TASK.describe(TARGETS)] == ["2 cat, 1 dog", "(none)"]
    swapped = TASK.reorder(TARGETS, ("dog", "cat"))
    assert swapped[0][:, 0].tolist() == [1, 0, 1]


BODIES = TINY | {
    "vit": ViTConfig(16, 2, 2, 32, 4, (16, 8), 1, 0),
    "vit, gap": ViTConfig(16, 2, 2, 32, 4, (16, 8), 1, 0, "gap"),
}


@pytest.mark.parametrize("head", Boxes.heads)
@pytest.mark.parametrize("name", BODIES)
def test_every_backbone_learns_with_every_head_or_says_why_not(name, head):
    # Backbones that pad images have sides that are no multiples of their stride.
    size = (32, 32) if BODIES[name].step > 1 else (29, 39)
    body = replace(BODIES[name], img_size=size)
    if HEADS[head].misfit(body):
        with pytest.raises(UserError, match=f"The head {head} needs "):
            DenseConfig.of(body, Boxes.heads, 2, head)
        assert head.startswith("yolos")
        return
    config = DenseConfig.of(body, Boxes.heads, 2, head)
    torch.manual_seed(0)
    model = models.build(config)
    assert models.build(type(config).from_plain(config.to_plain())).config == config
    objective = BoxLoss(model, 3)
    targets = torch.full((2, 3, 6), -1.0)
    targets[0, 0] = torch.tensor([1.0, 4, 4, 28, 20, 0])
    batch = Batch(torch.randn(2, 1, *size), targets, torch.arange(2))
    loss = objective(batch)["loss"]
    loss.backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert loss.isfinite()
    assert all(".norm" in n or "cls_token" in n or "head" in n for n in unused), unused
    staged = [p for stage in model.stages() for p in stage.parameters()]
    assert sorted(map(id, staged)) == sorted(map(id, model.parameters()))
    assert TASK.meaning(model.eval()(batch.images)).shape[-1] == 6


@pytest.mark.parametrize("threshold", [float("nan"), float("inf")])
def test_thresholds_in_a_card_are_finite(threshold):
    with pytest.raises(UserError, match="'thresholds' must have one number for each of 2 classes, all finite"):
        Boxes.from_json({**TASK.to_json(), "classes": ["cat", "dog"], "thresholds": [0.5, threshold]})
