"""Teachers: what they see and say, as weights and as ONNX files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from peers import randomise
from safetensors.torch import save_file

from vitrail.config import DistillConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import CONFIGS, build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass, Regression
from vitrail.train.teacher import Teacher
from vitrail.weights import Card, open_run, save

DIGITS = tuple("0123456789")
NARROW = ViTConfig(width=32, depth=1, heads=2, mlp=64, patch=4, img_size=(8, 8), channels=1, classes=10, pool="gap")


def write(path, config=NARROW, classes=DIGITS, seed=0, name="vit_nano4", task=None, **card):
    """A model of random weights as a file, whose answers differ from image to image and from class to class."""
    config = replace(config, classes=len(classes))
    preprocess = card.pop("preprocess", Preprocess(config.img_size, config.channels))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = randomise(build(config), seed)
    task = task or Multiclass(classes)
    save(path, whole, Card(model=name, config=config, task=task, preprocess=preprocess, **card))
    return str(path)


def batch(outputs=10):
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(6, 1, 8, 8, generator=generator)
    return images, *(2 * torch.randn(6, outputs, generator=generator) for _ in range(2))


CASES = {
    "the same": (Preprocess((8, 8), 1), Preprocess((8, 8), 1)),
    "another mean": (Preprocess((8, 8), 1, mean=(0.13,), std=(0.31,)), Preprocess((8, 8), 1, mean=(0.4,), std=(0.2,))),
    "larger": (Preprocess((8, 8), 1), Preprocess((16, 16), 1)),
    "another shape": (Preprocess((8, 12), 1), Preprocess((16, 16), 1, interpolation="bilinear")),
    "smaller, by Pillow": (Preprocess((16, 16), 3), Preprocess((8, 8), 3, interpolation="lanczos")),
    "grey to colour": (Preprocess((8, 8), 1), Preprocess((8, 8), 3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))),
    "colour to grey": (Preprocess((8, 8), 3), Preprocess((16, 16), 1)),
    "deep to shallow": (Preprocess((8, 8), 1, bits=16), Preprocess((8, 8), 1)),
    "shallow to deep": (Preprocess((8, 8), 1), Preprocess((16, 16), 1, bits=16)),
    "floats": (Preprocess((8, 8), 1, bits=32), Preprocess((16, 16), 1, mean=(0.3,), bits=32)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_teacher_sees_the_students_pixels_in_its_own_way(tmp_path, case):
    seen, own = CASES[case]
    kinds = {8: np.uint8, 16: np.uint16, 32: np.float32}
    rng = np.random.default_rng(0)
    stored = (rng.random((5, *seen.img_size, seen.channels)) * {8: 255, 16: 65535, 32: 1}[seen.bits]).astype(
        kinds[seen.bits]
    )
    config = replace(NARROW, img_size=own.img_size, channels=own.channels)
    file = write(tmp_path / "teacher.safetensors", config, DIGITS[::-1], preprocess=own)
    student = Card(model="", config=NARROW, task=Multiclass(DIGITS), preprocess=seen)
    teacher = Teacher(DistillConfig(teacher=file), student, "cpu")
    images = seen.normalise(torch.from_numpy(seen.pixels(stored)))

    model, _ = open_run(file)
    with torch.no_grad():
        alone = model(own.normalise(torch.from_numpy(own.pixels(stored))))
    taught = teacher(images, torch.arange(5))
    tolerance = 1e-5 if 32 in (seen.bits, own.bits) else 0.0  # floats are restored within rounding
    torch.testing.assert_close(taught, alone.flip(1), rtol=tolerance, atol=tolerance)
    assert not taught.requires_grad


def test_weights_of_others_teach_the_classes_in_their_order(tmp_path, caplog):
    config = ViTConfig(width=192, depth=1, heads=3, mlp=768, patch=16, img_size=(32, 32), channels=3, classes=10)
    model = randomise(build(config))
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    classes = tuple(f"class {letter}" for letter in "abcdefghij")
    student = Card(model="", config=NARROW, task=Multiclass(classes), preprocess=Preprocess((8, 8), 1))
    images = batch()[0].clamp(-1, 1)
    settings = DistillConfig(teacher=str(tmp_path / "timm.safetensors"))
    taught = Teacher(settings, student, "cpu")(images, torch.arange(6))
    assert "no names. They are assumed to be in the order of the data's: class a, class b" in caplog.text

    own = Preprocess((32, 32), 3)
    stored = student.preprocess.restore(images).permute(0, 2, 3, 1).numpy()
    with torch.no_grad():
        assert torch.equal(taught, model(own.normalise(torch.from_numpy(own.pixels(stored)))))

    save_file(build(NARROW).state_dict(), tmp_path / "narrow.safetensors")
    with pytest.raises(UserError, match=r"do not show.* For a teacher, the option is --teacher-model\."):
        Teacher(DistillConfig(teacher=str(tmp_path / "narrow.safetensors")), student, "cpu")


def test_the_model_of_a_teacher_may_be_a_family(tmp_path):
    file = write(tmp_path / "deit.safetensors", replace(NARROW, pool="cls_dist"), name="deit_nano4")
    student = Card(model="", config=NARROW, task=Multiclass(DIGITS), preprocess=Preprocess((8, 8), 1))
    for name in ("vit", "deit", "deit_nano4"):
        assert Teacher(DistillConfig(teacher=file, teacher_model=name), student, "cpu").card.model == "deit_nano4"
    with pytest.raises(UserError, match="are a deit_nano4, not a swin"):
        Teacher(DistillConfig(teacher=file, teacher_model="swin"), student, "cpu")


def onnx_file(path, shape, kind, weights, card=None, axis=1):
    """A linear model as a file: of the pixels (batch, height, width, channels) if it has a card, else of images."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    name = "x" if card is None else "pixels"
    nodes = [
        helper.make_node("Cast", [name], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["float"], ["flat"], axis=axis),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info(name, kind, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", weights.shape[1]])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    if card is not None:
        helper.set_model_props(model, {"vitrail": json.dumps(card if isinstance(card, dict) else card.to_json())})
    onnx.save(model, path)
    return str(path)


@pytest.mark.parametrize("batches", ["batch", 1])
def test_an_onnx_file_of_others_reads_images_with_the_mean_of_imagenet(tmp_path, batches, caplog):
    weights = np.random.default_rng(0).normal(size=(3 * 16 * 16, 10)).astype(np.float32)
    file = onnx_file(tmp_path / "a.onnx", [batches, 3, 16, 16], 1, weights)
    classes = tuple(f"class {letter}" for letter in "abcdefghij")
    student = Card(model="", config=NARROW, task=Multiclass(classes), preprocess=Preprocess((8, 8), 1))
    images = batch()[0].clamp(-1, 1)
    with caplog.at_level("INFO", logger="vitrail"):
        taught = Teacher(DistillConfig(teacher=file), student, "cpu")(images, torch.arange(6))
    assert "ImageNet's mean and std, as the file has none" in caplog.text
    assert "no names. They are assumed to be in the order of the data's: class a, class b" in caplog.text

    own = Preprocess((16, 16), 3, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    stored = student.preprocess.restore(images).permute(0, 2, 3, 1).numpy()
    seen = own.normalise(torch.from_numpy(own.pixels(stored)))
    torch.testing.assert_close(taught, torch.from_numpy(seen.flatten(1).numpy() @ weights), rtol=1e-5, atol=1e-4)


def test_an_onnx_file_of_vitrail_reads_pixels_and_says_what_it_is(tmp_path):
    weights = np.random.default_rng(0).normal(size=(8 * 8 * 3, 10)).astype(np.float32)
    card = Card(
        model="vit_nano4",
        config=replace(NARROW, channels=3),
        task=Multiclass(DIGITS[::-1]),
        preprocess=Preprocess((8, 8), 3, mean=(0.1,), std=(0.9,)),
    )
    file = onnx_file(tmp_path / "a.onnx", ["batch", 8, 8, 3], 2, weights, card)
    student = Card(model="", config=NARROW, task=Multiclass(DIGITS), preprocess=Preprocess((8, 8), 3))
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (6, 3, 8, 8), dtype=np.uint8))
    teacher = Teacher(DistillConfig(teacher=file), student, "cpu")
    expected = pixels.permute(0, 2, 3, 1).flatten(1).float() @ torch.from_numpy(weights)
    taught = teacher(student.preprocess.normalise(pixels), torch.arange(6))
    torch.testing.assert_close(taught, expected.flip(1), rtol=1e-5, atol=1e-2)
    assert teacher.card.model == "vit_nano4"

    state = teacher.state_dict()
    Teacher(DistillConfig(teacher=file), student, "cpu").load_state_dict(state)
    onnx_file(tmp_path / "a.onnx", ["batch", 8, 8, 3], 2, weights + 1, card)
    with pytest.raises(UserError, match="has changed since the run began"):
        Teacher(DistillConfig(teacher=file), student, "cpu").load_state_dict(state)


def test_an_onnx_file_for_deep_images_reads_rounded_ones(tmp_path):
    seen, own = Preprocess((8, 8), 1, bits=16), Preprocess((16, 16), 1, bits=16)
    weights = np.ones((16 * 16, 10), np.float32)
    card = Card(model="", config=replace(NARROW, img_size=(16, 16)), task=Multiclass(DIGITS), preprocess=own)
    file = onnx_file(tmp_path / "a.onnx", ["batch", 16, 16, 1], 4, weights, card)
    stored = np.random.default_rng(0).integers(0, 65536, (2, 8, 8, 1), np.uint16)
    images = seen.normalise(torch.from_numpy(seen.pixels(stored)))
    student = Card(model="", config=NARROW, task=Multiclass(DIGITS), preprocess=seen)
    taught = Teacher(DistillConfig(teacher=file), student, "cpu")(images, torch.arange(2))
    expected = np.rint(own.pixels(stored).astype(np.float64)).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(taught[:, 0], expected, atol=30)  # cut off, they would be 128 less


def test_onnx_files_that_cannot_teach(tmp_path):
    student = Card(model="", config=NARROW, task=Multiclass(DIGITS), preprocess=Preprocess((8, 8), 1))

    def refused(message):
        with pytest.raises(UserError, match=message):
            Teacher(DistillConfig(teacher=str(tmp_path / "a.onnx")), student, "cpu")

    weights = np.zeros((64, 10), np.float32)
    onnx_file(tmp_path / "a.onnx", ["batch", 8, 8, 1], 2, weights)
    refused(r"must have one input, float images \(batch, channels, height, width\)")
    onnx_file(tmp_path / "a.onnx", [4, 1, 8, 8], 1, weights)
    refused("a batch size of 1 or any")
    onnx_file(tmp_path / "a.onnx", ["batch", 1, "height", "width"], 1, weights)
    refused("must have fixed channels, height and width")
    onnx_file(tmp_path / "a.onnx", ["batch", 1, 8, 8], 1, weights[:, :7])
    refused("has 7 outputs, but the data has 10 classes")
    onnx_file(tmp_path / "a.onnx", ["batch", 1, 8, 8], 1, weights, axis=0)
    refused("cannot be run on 2 images")
    onnx_file(tmp_path / "a.onnx", ["batch", 8, 8, 1], 2, weights, {"classes": ["a"]})
    refused("is not a vitrail model card")
    (tmp_path / "a.onnx").write_bytes(b"no model")
    refused("is not a valid ONNX file")


def test_numbers_are_taught_in_the_students_units(tmp_path):
    names = ("x", "y")
    file = write(tmp_path / "a.safetensors", NARROW, names, task=Regression(names, (5.0, 50.0), (2.0, 20.0)))
    student = replace(open_run(file)[1], task=Regression(("y", "x"), (40.0, 4.0), (10.0, 1.0)))
    images = batch()[0].clamp(-1, 1)
    pixels = student.preprocess.restore(images)
    with torch.no_grad():
        x, y = open_run(file)[0](student.preprocess.normalise(pixels)).unbind(1)
    expected = torch.stack([(y * 20 + 50 - 40) / 10, x * 2 + 5 - 4], dim=1)
    taught = Teacher(DistillConfig(teacher=file), student, "cpu")(images, torch.arange(6))
    torch.testing.assert_close(taught, expected)


def test_a_teacher_with_batch_norm_is_not_changed_by_what_it_sees(tmp_path):
    config = replace(CONFIGS["coatnet_nano"], classes=10, img_size=(32, 32), channels=1)
    file = write(tmp_path / "a.safetensors", config)
    card = open_run(file)[1]
    teacher = Teacher(DistillConfig(teacher=file), card, "cpu")
    images = torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    first = teacher(images, torch.arange(3))
    torch.testing.assert_close(teacher(images[:1], torch.arange(1)), first[:1])
    assert torch.equal(teacher(images, torch.arange(3)), first)
