"""Every family is chosen, trained and resumed like a ViT."""

from __future__ import annotations

import pytest

import vitrail
from vitrail import models
from vitrail.config import ArchConfig, TransferConfig, options
from vitrail.data.sources import open_data
from vitrail.errors import UserError
from vitrail.models.lora import adapters
from vitrail.train.resolve import model_config, resolve
from vitrail.train.transfer import set_learning
from vitrail.weights import open_card

FAMILIES = list(models.FAMILIES)


@pytest.fixture(scope="module")
def data():
    return open_data("digits")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["small", "augreg", "deit3"])
def test_a_family_may_stand_for_its_small_model(family, recipe, data):
    config = resolve("digits", data, {"model": family, "recipe": recipe, "device": "cpu"})
    assert config.model == (f"{family}_nano" if family != "vit" else "vit_nano2")
    architecture = model_config(config, 10)
    assert models.family(architecture) == family
    assert (architecture.classes, architecture.channels) == (10, 1)
    assert architecture.drop_path == config.arch.drop_path
    if family != "vit":
        assert config.arch.pool is config.arch.registers is None


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_photographs_get_a_published_model(family, data):
    config = resolve("digits", data, {"model": family, "img_size": 128, "device": "cpu"})
    assert config.model in models.CONFIGS
    assert config.model.endswith("_nano") is False


def test_what_only_vits_have_is_refused_for_others(data):
    with pytest.raises(UserError, match=r"A swin has no choice of 'pool', as a ViT has. Leave out --pool"):
        resolve("digits", data, {"model": "swin_nano", "pool": "gap"})


@pytest.mark.parametrize("family", FAMILIES)
def test_an_option_means_the_same_in_every_family(family):
    """What a recipe sets by its name in ArchConfig is read by that name from a family's configuration."""
    known = options(ArchConfig)
    own = options(models.FAMILIES[family][0])
    assert {"drop", "drop_path"} <= own.keys() & known.keys()
    for name in own.keys() & known.keys():
        assert known[name].type in (own[name].type, own[name].type | None), name


@pytest.mark.parametrize("model", ["swin", "coatnet"])
def test_it_trains_and_is_known_afterwards(model, tmp_path):
    run = vitrail.train(
        "digits", model=model, epochs=1, img_size=8, batch_size=128, model_ema=0.9, out=tmp_path, name="run"
    )
    card = open_card(run)
    assert models.family(card.config) == model
    assert vitrail.evaluate(run).top1 == pytest.approx(card.metrics["top1"], abs=1e-5)
    page = vitrail.report(run).read_text(encoding="utf-8")
    assert "what speaks for the likeliest answer" in page
    assert ("Patch filters" if model == "swin" else "Filters of the first convolution") in page
    assert "vitrail explain" in page
    explained = vitrail.explain(run)
    drawn = {file.stem for file in explained.files}
    assert {"relevance", "filters", "bias-stage2", "map", "neighbours", "wrong", "uncertain"} <= drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_frozen_in_every_family(family):
    model = models.build(models.configure("vit_nano8" if family == "vit" else f"{family}_nano", classes=3))
    set_learning(model, TransferConfig(freeze=2))
    learn = [any(p.requires_grad for p in stage.parameters()) for stage in model.stages()]
    assert learn == [False] * 3 + [True] * (len(learn) - 3)
    set_learning(model, TransferConfig(freeze="all"))
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learning
    assert all(name.startswith("head.") for name in learning)
    with pytest.raises(UserError, match=f"The model has {len(learn) - 3} blocks, so --freeze 99 is too many"):
        set_learning(model, TransferConfig(freeze=99))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_for_the_attention_of_vits(family):
    model = models.build(models.configure("vit_nano8" if family == "vit" else f"{family}_nano", classes=3))
    if family in ("vit", "hybrid"):
        set_learning(model, TransferConfig(lora_rank=2, lora_alpha=4.0))
        assert adapters(model)
    else:
        with pytest.raises(UserError, match=f"adapts the attention of a ViT, but the model is a {family}_nano"):
            set_learning(model, TransferConfig(lora_rank=2, lora_alpha=4.0))
