"""Own models: any module from images to logits, models of the contract, and subclasses of registered families."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import vitrail
from vitrail import models
from vitrail.errors import UserError
from vitrail.models.module import MODULES, ModuleModel
from vitrail.models.vit import ViT, ViTConfig

pytestmark = pytest.mark.usefixtures("plain_runs", "own_models")

X, Y = load_digits(return_X_y=True)
X, Y = (X[:400].reshape(-1, 8, 8) * 15).astype(np.uint8), Y[:400]
QUICK = {"epochs": 3, "batch_size": 32, "lr": 3e-3, "img_size": 8, "opt": "adamw"}


class Small(nn.Module):
    """A convolutional network that knows nothing of vitrail."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(128, classes)

    def forward(self, images):
        return self.head(self.norm(self.conv(images)).relu().flatten(1))


@dataclass(frozen=True)
class MineConfig(ViTConfig):
    pass


class Mine(ViT):
    config: MineConfig

    def forward(self, images):
        return 2 * super().forward(images)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    return vitrail.train((X, Y), model=Small(), model_ema=0.5, out=tmp_path_factory.mktemp("runs"), name="run", **QUICK)


def test_any_module_is_trained_evaluated_predicted_reported_and_exported(run):
    models.register_module(Small())
    assert run.scores["top1"] > 0.5
    assert vitrail.evaluate(run).top1 == pytest.approx(run.scores["top1"], abs=1e-6)
    assert len(list(run.predict(list(X[:5])))) == 5
    assert "Small" in run.report().read_text()
    proof = vitrail.export(run, overwrite=True, no_preprocess=True)
    assert proof.same == proof.images
    said = (run / "train.log").read_text()
    assert "'Small' is a plain module, so embed, probes, attention maps" in said
    assert "Given as Python objects: data, model." in (run / "config.yaml").read_text()


def test_what_a_plain_module_lacks_is_said(run, tmp_path):
    models.register_module(Small())
    with pytest.raises(UserError, match="The module 'Small' has no feature vectors"):
        list(vitrail.embed(run, X[:1]))
    drawn = vitrail.explain(run, X[:1], out=tmp_path)
    assert {file.stem for file in drawn.files} == {"filters"}


def test_a_module_is_loaded_once_it_is_known(run):
    MODULES.pop("Small", None)
    message = r"'Small', which is not stored with its weights\. .* first: vitrail\.models\.register_module\(Small\("
    with pytest.raises(UserError, match=message):
        vitrail.load(run)
    models.register_module(Small())
    model = vitrail.load(run)
    assert type(model) is ModuleModel
    assert type(model.module) is Small
    assert vitrail.evaluate(model.module, (X, Y)).top1 == pytest.approx(vitrail.evaluate(run, (X, Y)).top1)


def test_training_starts_from_the_weights_of_the_module_and_leaves_it_alone(tmp_path):
    module = Small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    still = QUICK | {"lr": 1e-12, "epochs": 0.05}
    run = vitrail.train((X, Y), model=module, out=tmp_path, **still)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    torch.testing.assert_close(run.model().module.head.weight, before["head.weight"])


def test_a_model_of_the_contract_trains_from_its_weights(tmp_path):
    model = vitrail.create("vit_nano4", img_size=8, channels=1, classes=10, stem="patch")
    run = vitrail.train((X, Y), model=model, out=tmp_path, name="still", **QUICK | {"lr": 1e-12, "epochs": 0.05})
    assert run.card.model == "vit_nano4"
    for name, value in model.state_dict().items():
        torch.testing.assert_close(vitrail.load(run).state_dict()[name], value)
    with pytest.raises(UserError, match=r"does not fit the data and the settings: it has classes 10 instead of 2"):
        vitrail.train((X, Y % 2), model=model, out=tmp_path, **QUICK)


def test_subclasses_are_never_replaced_by_their_base(tmp_path):
    config = MineConfig(64, 2, 2, 128, 2, img_size=(8, 8), channels=1)
    models.register("mine", MineConfig, Mine, {"mine_tiny": config})
    assert type(vitrail.create("mine_tiny", classes=10)) is Mine
    run = vitrail.train((X, Y), model="mine_tiny", out=tmp_path, name="named", **QUICK)
    assert type(vitrail.load(run)) is type(run.model()) is Mine
    assert type(vitrail.load(vitrail.convert(run, tmp_path / "model.safetensors"))) is Mine
    assert vitrail.evaluate(run).top1 == pytest.approx(run.scores["top1"], abs=1e-6)
    resized = models.resize(run.model(), 16)
    assert type(resized) is Mine


def test_an_unregistered_subclass_registers_itself(tmp_path):
    model = Mine(MineConfig(64, 2, 2, 128, 2, img_size=(8, 8), channels=1, classes=10))
    run = vitrail.train((X, Y), model=model, out=tmp_path, **QUICK)
    assert (run.card.model, models.family(run.card.config)) == ("Mine", "Mine")
    assert type(run.model()) is Mine

    class Other(ViT):
        pass

    with pytest.raises(UserError, match="A Other would be loaded as a ViT, because both have a ViTConfig"):
        vitrail.train((X, Y), model=Other(ViTConfig(64, 2, 2, 128, 2, img_size=(8, 8), channels=1)), out=tmp_path)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Small(7), r"must return outputs of shape \(2, 10\) for this data, but got \(2, 7\)"),
        (nn.Linear(3, 4), r"cannot compute images of shape \(2, 1, 8, 8\)"),
    ],
    ids=["classes", "shape"],
)
def test_a_module_that_does_not_fit_is_refused_before_a_run_begins(module, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vitrail.train((X, Y), model=module, out=tmp_path, **QUICK)
    assert not list(tmp_path.iterdir())


def test_model_objects_are_evaluated(trained):
    model = vitrail.load(trained)
    model.train()
    assert vitrail.evaluate(model, (X, Y)).top1 == vitrail.evaluate(trained, (X, Y)).top1
    assert model.training
    scores = vitrail.evaluate(Small(), (X, Y))
    assert (scores.images, scores.folder) == (400, None)
    with pytest.raises(UserError, match="No data was given"):
        vitrail.evaluate(model)
    with pytest.raises(UserError, match="--method knn needs a run"):
        vitrail.evaluate(model, (X, Y), method="knn")
    values = vitrail.evaluate(Small(1), (X, Y / 3.0))
    assert values.images == 400
