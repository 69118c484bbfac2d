"""Segmentation: its scores by hand, its losses, its answers, and a run from training to the service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from segmented import CLASSES, folder, picture
from sklearn.metrics import confusion_matrix, jaccard_score

import vitrail
from vitrail.errors import UserError
from vitrail.tasks import Masks
from vitrail.tasks.mask_loss import SegmentationLoss
from vitrail.tasks.mask_scores import boundary_scores
from vitrail.tasks.placement import fitted, truths
from vitrail.weights import open_run

pytestmark = pytest.mark.usefixtures("plain_runs")


class Given:
    """A mask in memory."""

    def __init__(self, labels: np.ndarray):
        self._labels = labels.astype(np.int16)

    @property
    def counts(self) -> np.ndarray:
        return np.bincount(self._labels[self._labels >= 0], minlength=3)

    def labels(self) -> np.ndarray:
        return self._labels


def _batch(seed: int, images: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Logits on a grid over an input of 16x16, and truths of images of 12x16."""
    rng = np.random.default_rng(seed)
    masks = [Given(rng.integers(-1, 3, (12, 16))) for _ in range(images)]
    return rng.normal(size=(images, 3, 4, 4)).astype(np.float32), truths(masks, [fitted((12, 16), (16, 16))] * images)


def test_scores_are_those_of_all_pixels_at_the_original_size():
    outputs, targets = _batch(0)
    scores = Masks(CLASSES).measure(outputs, targets)
    said, true = [], []
    for logits, truth in zip(outputs, targets, strict=True):
        full = F.interpolate(torch.from_numpy(logits)[None], (16, 16), mode="bilinear")[0, :, :12]
        said.append(full.argmax(0).numpy())
        true.append(truth.annotation.labels())
    said, true = np.stack(said), np.stack(true)
    seen = true >= 0
    assert np.array_equal(scores.confusion, confusion_matrix(true[seen], said[seen]))
    iou = jaccard_score(true[seen], said[seen], average=None)
    assert [score.iou for score in scores.per_class] == pytest.approx(iou)
    assert scores.main == pytest.approx(iou.mean())
    assert scores.accuracy == pytest.approx((said == true)[seen].mean())
    assert scores.dice == pytest.approx((2 * iou / (1 + iou)).mean())


def test_merged_meters_measure_what_one_would_have():
    task = Masks(CLASSES)
    one, first, second = task.meter(), task.meter(), task.meter()
    for meter in (one, first):
        meter.add(*_batch(0))
    for meter in (one, second):
        meter.add(*_batch(1))
    first.merge(second)
    assert first.scores().to_json() == one.scores().to_json()
    assert task.restore(one.scores().to_json()).miou == pytest.approx(one.scores().miou, abs=1e-6)


def test_samples_are_the_scores_of_the_images_drawn():
    """One of three images has the last class, which is also predicted where it is not."""
    rng = np.random.default_rng(0)
    masks = [Given(rng.integers(0, 2 + (i == 0), (12, 16))) for i in range(3)]
    outputs, targets = rng.normal(size=(3, 3, 4, 4)).astype(np.float32), truths(masks, [fitted((12, 16), (16, 16))] * 3)
    task = Masks(CLASSES)
    samples = task.sample(task.measure(outputs, targets), outputs, targets)
    for i, rows in enumerate(np.random.default_rng(0).integers(0, 3, (1000, 3))[:20]):
        scores = task.measure(outputs[rows], targets[rows])
        for name, values in samples.whole.items():
            assert values[i] == pytest.approx(getattr(scores, name)), name


def test_boundaries_may_be_a_pixel_off():
    true = np.zeros((40, 40), int)
    true[10:30, 10:30] = 1
    assert boundary_scores(true, true, 2).tolist() == [[1, 1], [1, 1]]
    assert boundary_scores(true, np.roll(true, 1, 0), 2)[0, 1] == pytest.approx(1)
    assert boundary_scores(true, np.roll(true, 6, 0), 2)[0, 1] < 0.8
    assert boundary_scores(true, 0 * true, 2)[0, 1] == 0


def test_losses_leave_out_what_has_no_label_and_weigh_classes():
    logits, labels = torch.randn(2, 3, 8, 8), torch.randint(-1, 3, (2, 8, 8))
    model = torch.nn.Identity()
    plain = SegmentationLoss(model).compare(logits, labels)
    assert plain == pytest.approx(F.cross_entropy(logits, labels, ignore_index=-1).item(), rel=1e-5)
    changed = torch.where(labels[:, None] == -1, torch.full_like(logits, 50.0), logits)
    for loss in ("ce", "dice", "focal"):
        objective = SegmentationLoss(model, loss, torch.tensor([1.0, 2.0, 3.0]))
        assert objective.compare(logits, labels) == pytest.approx(objective.compare(changed, labels).item(), rel=1e-5)
    right = 20.0 * F.one_hot(labels.clamp(min=0), 3).permute(0, 3, 1, 2).float()
    assert SegmentationLoss(model, "dice").compare(right, labels) < 1e-3
    assert SegmentationLoss(model, "focal").compare(logits, labels) < plain


# A run ------------------------------------------------------------------------------------------------------

SETTINGS = {"model": "vit_nano4", "img_size": 32, "batch_size": 8, "lr": 3e-3, "stem": "patch", "model_ema": 0.9}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("segmented") / "shapes", 32, 8)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.train(data, epochs=5, name="run", out=tmp_path_factory.mktemp("runs"), loss="dice", **SETTINGS)


def test_it_learns_shapes(run):
    card = json.loads((run / "model.json").read_text())
    assert (card["task"], card["classes"], card["family"], card["config"]["head"]) == (
        "masks",
        list(CLASSES),
        "dense",
        "linear",
    )
    assert card["metrics"]["miou"] > 0.5
    assert vitrail.evaluate(run).miou == pytest.approx(card["metrics"]["miou"], abs=1e-5)
    report = vitrail.report(run).read_text()
    assert "mIoU" in report
    assert "the true annotation, beside the prediction" in report


def test_it_resumes_to_the_bit(data, tmp_path):
    stopped = tmp_path / "stopped"

    def copy(progress):
        if len(progress.rows) == 2:  # the checkpoint is still that of the first epoch
            shutil.copytree(tmp_path / "whole", stopped)

    whole = vitrail.train(data, epochs=2, name="whole", out=tmp_path, on_epoch=copy, **SETTINGS)
    resumed = vitrail.train(resume=stopped)
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_masks_and_overlays_are_written_at_the_size_of_the_image(run, data, tmp_path, capsys):
    from vitrail.cli import main

    images = sorted((data / "images" / "val").iterdir())
    words = ["predict", str(run), *map(str, images), "--out", str(tmp_path / "areas.csv")]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--pictures", str(tmp_path / "p")])
    rows = (tmp_path / "areas.csv").read_text().splitlines()
    assert rows[0] == "file,height,width,pixels of ground,pixels of disc,pixels of square,error"
    with Image.open(images[0]) as image, Image.open(tmp_path / "p" / f"{images[0].stem}.png") as first:
        assert first.mode == "P"
        assert first.size == image.size
        mask = np.asarray(first)
    areas = [int(cell) for cell in rows[1].split(",")[3:6]]
    assert np.bincount(mask.ravel(), minlength=3).tolist() == areas
    with Image.open(tmp_path / "p" / f"{images[0].stem}_overlay.jpg") as overlay:
        assert overlay.size == mask.shape[::-1]
    capsys.readouterr()


def test_pictures_are_not_written_among_the_images_to_predict(run, data, tmp_path, capsys):
    from vitrail.cli import main

    photos, links = tmp_path / "photos", tmp_path / "links"
    image = shutil.copy(next((data / "images" / "val").iterdir()), photos.mkdir() or photos / "x.PNG")
    links.symlink_to(photos)
    (tmp_path / "linked.png").symlink_to(image)
    before, out = image.read_bytes(), tmp_path / "areas.csv"
    for given, pictures in ((photos, photos), (image, links), (tmp_path / "linked.png", photos)):
        with pytest.raises(SystemExit, match="2"):
            main(["predict", str(run), str(given), "--pictures", str(pictures), "--out", str(out)])
        assert "must not be a folder of images to predict" in capsys.readouterr().err
    assert image.read_bytes() == before
    assert [*photos.iterdir()] == [image]
    assert not out.exists()


def test_pictures_replace_only_pictures(run, data, tmp_path, capsys):
    from vitrail.cli import main

    image = next((data / "images" / "val").iterdir())
    drawn = tmp_path / f"{image.stem}.png"
    drawn.write_bytes(b"a mask drawn by hand")
    long = shutil.copy(image, tmp_path / f"{'n' * 251}.png")
    with pytest.raises(SystemExit, match="2"):
        main(["predict", str(run), str(image), "--pictures", str(tmp_path)])
    assert f"{drawn} was not written by --pictures" in capsys.readouterr().err
    assert drawn.read_bytes() == b"a mask drawn by hand"
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            main(["predict", str(run), str(image), str(long), "--pictures", str(tmp_path / "new")])
    found = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert found == sorted(f"{name}{end}" for name in (image.stem, "n" * 200) for end in (".png", "_overlay.jpg"))


def test_a_classifier_gives_its_backbone_and_a_segmenter_its_own(run, data, tmp_path, made_classifier):
    tuned = vitrail.train(data, weights=made_classifier, epochs=1, name="a", out=tmp_path, img_size=32, batch_size=8)
    card = json.loads((tuned / "model.json").read_text())
    assert card["config"]["head"] == "linear"
    again = vitrail.train(data, weights=run, epochs=1, name="b", out=tmp_path, batch_size=8, freeze="all")
    before, after = (open_run(r)[0].state_dict() for r in (run, again))
    assert torch.equal(before["backbone.blocks.0.mlp.fc1.weight"], after["backbone.blocks.0.mlp.fc1.weight"])
    log = (again / "train.log").read_text()
    assert "new head" not in log


@pytest.fixture(scope="module")
def made_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (32, 16, 16, 3), np.uint8), np.arange(32) % 2
    place = tmp_path_factory.mktemp("classifier")
    return vitrail.train(
        (pixels, labels), model="vit_nano4", epochs=1, out=place, name="c", stem="patch", batch_size=16
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixup": 0.2}, "--mixup does not apply to segmentation data"),
        ({"head": "tanh"}, "The head of segmentation must be one of"),
        ({"model": "swin_nano", "head": "setr-pup"}, "The head setr-pup needs the blocks of a plain encoder"),
        ({"fit": "crop"}, "needs whole images: use --fit pad"),
        ({"loss": "bce"}, "--loss must be one of ce, dice, focal"),
        ({"smoothing": 0.1}, "--smoothing does not apply"),
        ({"best": "top1"}, "Choose one of miou, dice, loss"),
        ({"task": "multiclass", "mask_values": ("0=a", "1=b")}, "--mask-values is for images with masks"),
    ],
)
def test_settings_that_do_not_apply_are_refused(data, settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vitrail.train(data, epochs=1, out=tmp_path, **settings)
    assert not list(tmp_path.iterdir())


# Files, the service and explanations ------------------------------------------------------------------------


def test_the_exported_graph_has_the_padding_and_the_upsampling_and_needs_no_torch(run, data, tmp_path):
    import onnxruntime
    from torchless import predict_evaluate_and_serve

    proof = vitrail.export(run, out=tmp_path / "masks.onnx")
    assert proof.same == proof.images
    assert proof.resized == (8, 8)
    image = np.asarray(Image.open(data / "images" / "val" / "0.png").convert("RGB"))
    session = onnxruntime.InferenceSession(tmp_path / "masks.onnx")
    logits, chances = session.run(["logits", "probabilities"], {"pixels": image[None]})
    assert logits.shape[:2] == (1, 3)
    assert chances.shape == (1, 3, *image.shape[:2])
    assert chances.sum(axis=1) == pytest.approx(1, abs=1e-4)
    (ours,) = vitrail.predict(run, [data / "images" / "val" / "0.png"])
    (theirs,) = vitrail.predict(tmp_path / "masks.onnx", [data / "images" / "val" / "0.png"])
    assert (chances[0].argmax(axis=0) == ours.answer.mask).mean() > 0.99
    assert (theirs.answer.mask == ours.answer.mask).mean() > 0.99
    predict_evaluate_and_serve(tmp_path / "masks.onnx", data, data / "images" / "val" / "0.png", tmp_path)
    scores = json.loads((tmp_path / "metrics.json").read_text())
    assert scores["miou"] == pytest.approx(vitrail.evaluate(run).miou, abs=0.01)


def test_the_service_sends_the_mask(run, data):
    import base64
    import io

    from served import in_thread

    file = data / "images" / "val" / "1.png"
    (expected,) = vitrail.predict(run, [file])
    with in_thread(f"masks={run}") as service:
        found = service.predict(file.read_bytes(), scores=True, layer=True)
        assert service.get("/model").json()["form"] == "areas"
        assert "layer" not in service.predict(file.read_bytes())
    assert found["size"] == [32, 40]
    assert sum(found["pixels"].values()) == 32 * 40
    assert found["scores"] == pytest.approx(expected.answer.scores())
    layer = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["layer"]))))
    assert np.array_equal(layer[..., 3] == 0, expected.answer.mask == 0)  # the ground is transparent


def test_windows_see_a_large_picture_at_its_own_scale(run, tmp_path):
    from vitrail.runs.windows import boxes

    assert len(boxes((100, 64), (32, 32))) == 5 * 3
    assert boxes((20, 40), (32, 32)) == [(0, 0, 20, 32), (0, 8, 20, 32)]
    image, mask = picture(np.random.default_rng(5), (96, 120))
    Image.fromarray(image).save(tmp_path / "large.png")
    (whole,), (parts,) = (list(vitrail.predict(run, [tmp_path / "large.png"], windows=w)) for w in (False, True))
    assert parts.answer.mask.shape == mask.shape
    assert (parts.answer.mask == mask).mean() > (whole.answer.mask == mask).mean() - 0.05
    with pytest.raises(UserError, match="--top is for classes and labels"):
        list(vitrail.predict(run, [tmp_path / "large.png"], top=1))
    for windows in (False, True):
        with pytest.raises(UserError, match="A threshold does not apply to masks"):
            list(vitrail.predict(run, [tmp_path / "large.png"], windows=windows, threshold=0.5))


def test_evidence_is_for_a_class_in_its_region(run, data, tmp_path):
    from vitrail.explain import relevance

    model, card = open_run(run)
    image = np.asarray(Image.open(data / "images" / "val" / "0.png").convert("RGB"))
    maps = relevance(model, card.preprocess(image)[None], 1)
    assert maps.shape == (1, 8, 8)
    assert maps.max() > 0
    drawn = vitrail.explain(run, [data / "images" / "val" / "0.png"], out=tmp_path, target="disc")
    assert "relevance" in {path.stem for path in drawn.files}, drawn.notes


def test_memory_and_time_are_planned(data):
    planned = vitrail.train(data, plan=True, **SETTINGS)
    assert planned.parameters > 100_000
