"""Self-supervised checkpoints of others: their encoders, and their decoders and heads with equal losses."""

from __future__ import annotations

from dataclasses import replace

import peers
import pytest
import torch
from methods import objective
from peers import TOLERANCE, distance, hf_vit, identical, images, randomise, timm_vit
from safetensors.torch import load_file, save_file
from self_supervised import authors_dino, authors_mae, fixed_positions

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build, canonical
from vitrail.models.position import sincos2d
from vitrail.models.vit import ViTConfig
from vitrail.tasks import task_type
from vitrail.tasks.masking import count_masked, lowest
from vitrail.weights import Card, load, open_card, recognise, save
from vitrail.weights.added import find_added, load_added, save_added
from vitrail.weights.tensors import from_state_dict

pytestmark = pytest.mark.usefixtures("plain_runs")
CONFIG = ViTConfig(width=32, depth=2, heads=4, mlp=128, patch=4, img_size=(24, 24), classes=0)
DECODER = {"decoder_width": 64, "decoder_depth": 2}
HEAD = {"head_width": 40, "prototypes": 48}
NOISE = torch.rand(2, 36, generator=torch.Generator().manual_seed(3))
ORDER = torch.arange(36.0).expand(2, -1)  # noise that keeps the patches in order

# Released checkpoints of Hugging Face have 1e-12 as the epsilon of LayerNorm, which a state dict is assumed to have.
FORMS = pytest.mark.parametrize(
    ("form", "eps"),
    [("transformers 4", 1e-6), ("transformers 4", 1e-12), ("transformers 5", 1e-12), ("modules", 1e-12)],
)


def hf_config(kind, config, eps, **options):
    return getattr(peers.transformers(), kind)(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        image_size=config.img_size[0],
        patch_size=config.patch,
        num_channels=config.channels,
        layer_norm_eps=eps,
        **options,
    )


def hf_mae(config=CONFIG, eps=1e-6, **options):
    """`ViTMAEForPreTraining` with random weights and MAE's fixed positions, as released; new ones have zeros."""
    decoder = {"decoder_hidden_size": 64, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
    decoder |= {"decoder_intermediate_size": 256, "norm_pix_loss": True}
    about = hf_config("ViTMAEConfig", config, eps, **(decoder | options))
    model = randomise(peers.transformers().ViTMAEForPreTraining(about))
    model.vit.embeddings.position_embeddings.data = fixed_positions(config.width, config.grid[0])
    model.decoder.decoder_pos_embed.data = fixed_positions(64, config.grid[0])
    return model


def hf_simmim(config=CONFIG, eps=1e-6):
    about = hf_config("ViTConfig", config, eps, encoder_stride=config.patch)
    return randomise(peers.transformers().ViTForMaskedImageModeling(about))


def stored(theirs, folder, form):
    """A model as a file of one version of transformers, or as a state dict; and what `load` must be told about it."""
    if form == "modules":
        return theirs.state_dict(), CONFIG
    theirs.save_pretrained(folder)
    if form == "transformers 4":
        file = folder / "model.safetensors"
        state = load_file(file)
        save_file({n.replace("decoder_encoder.layer.", "decoder_layers."): v for n, v in state.items()}, file)
    return folder, None


def left_out(caplog):
    return [record.message.split(": ", 1)[1] for record in caplog.records if "left out" in record.message]


# Encoders


@torch.no_grad()
@FORMS
@pytest.mark.parametrize("whole", [True, False], ids=["with decoder", "encoder"])
def test_the_encoder_of_hugging_faces_mae(tmp_path, caplog, whole, form, eps):
    theirs = hf_mae(eps=eps, mask_ratio=0.0)
    source, told = stored(theirs if whole else theirs.vit, tmp_path, form)
    with caplog.at_level("INFO", "vitrail"):
        model = load(source, told)
    assert peers.shown(model.config) == CONFIG
    expected = theirs.vit(images(CONFIG), noise=ORDER).last_hidden_state
    assert distance(model.encode(model.tokens(images(CONFIG))), expected) < TOLERANCE
    assert distance(model(images(CONFIG)), expected[:, 0]) < TOLERANCE
    assert left_out(caplog) == (["left out the decoder, which only pre-training needs."] if whole else [])
    assert ("mean 0.485" in caplog.text) == whole
    assert model.config.eps == eps


@torch.no_grad()
@FORMS
def test_the_encoder_of_hugging_faces_simmim(tmp_path, caplog, form, eps):
    theirs = hf_simmim(eps=eps)
    source, told = stored(theirs, tmp_path, form)
    with caplog.at_level("INFO", "vitrail"):
        model = load(source, told)
    expected = theirs.vit(images(CONFIG)).last_hidden_state
    assert distance(model.encode(model.tokens(images(CONFIG))), expected) < TOLERANCE
    assert left_out(caplog) == ["left out the decoder and the mask token, which only pre-training needs."]


@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False], ids=["with decoder", "encoder"])
def test_the_encoder_of_maes_authors(tmp_path, caplog, whole):
    """`mae_pretrain_vit_base.pth` has the encoder only."""
    state = authors_mae(CONFIG).state_dict()
    encoder = {name: value for name, value in state.items() if "decoder" not in name and name != "mask_token"}
    torch.save({"model": state if whole else encoder}, tmp_path / "mae.pth")
    with caplog.at_level("INFO", "vitrail"):
        model = load(tmp_path / "mae.pth", CONFIG)
    theirs = timm_vit(CONFIG)
    theirs.load_state_dict(encoder)
    assert distance(model(images(CONFIG)), theirs(images(CONFIG))) < TOLERANCE
    expected = ["left out the decoder and the mask token, which only pre-training needs."] if whole else []
    assert left_out(caplog) == expected
    assert open_card(tmp_path / "mae.pth", "vit_nano4").preprocess.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("name", ["vit_base_patch16_224.mae", "vit_small_patch16_224.dino", "vit_base_patch8_224.dino"])
def test_timms_models_are_listed_ones_without_a_head(name):
    with torch.device("meta"):
        theirs = peers.timm().create_model(name)
    weights = recognise.recognise(from_state_dict(theirs.state_dict(), "it"), "it")
    config = recognise.architecture(weights, recognise.Sidecar(), None)
    assert config == replace(canonical(name)[1], classes=0)


@torch.no_grad()
@pytest.mark.parametrize("form", ["run", "teacher", "student", "backbone"])
def test_the_encoder_of_dinos_authors(tmp_path, caplog, form):
    """`dino_deitsmall16_pretrain.pth` has the backbone only."""
    student, teacher, checkpoint = authors_dino(CONFIG)
    part = {form: checkpoint[form]} if form in checkpoint else checkpoint
    torch.save(teacher.backbone.state_dict() if form == "backbone" else part, tmp_path / "dino.pth")
    with caplog.at_level("INFO", "vitrail"):
        model = load(tmp_path / "dino.pth", CONFIG)
    expected = (student if form == "student" else teacher).backbone(images(CONFIG))
    assert distance(model(images(CONFIG)), expected) < TOLERANCE
    note = ["left out the projection head, which only pre-training needs."]
    assert left_out(caplog) == ([] if form == "backbone" else note)
    assert ("loaded 'teacher', not 'student'." in caplog.text) == (form == "run")
    assert open_card(tmp_path / "dino.pth", "vit_nano4").preprocess.mean == (0.485, 0.456, 0.406)


@torch.no_grad()
def test_hugging_faces_dino_is_a_plain_vit(tmp_path, caplog):
    """`facebook/dino-vits16` is a `ViTModel`, with a pooler that was never trained."""
    theirs = hf_vit("ViTModel", CONFIG)
    theirs.save_pretrained(tmp_path)
    with caplog.at_level("INFO", "vitrail"):
        model = load(tmp_path)
    assert distance(model(images(CONFIG)), theirs(images(CONFIG)).last_hidden_state[:, 0]) < TOLERANCE
    assert left_out(caplog) == ["left out the hidden layer before the head."]


@torch.no_grad()
def test_the_encoder_alone_is_converted(tmp_path):
    theirs = hf_mae(mask_ratio=0.0)
    theirs.save_pretrained(tmp_path / "mae")
    out = vitrail.convert(tmp_path / "mae", tmp_path / "mae.safetensors")
    expected = theirs.vit(images(CONFIG), noise=ORDER).last_hidden_state
    assert distance(load(out)(images(CONFIG)), expected[:, 0]) < TOLERANCE
    assert find_added(tmp_path / "mae").method == "MAE"
    assert find_added(out) is None


# Decoders and heads


@pytest.mark.parametrize("side", [3, 14])
def test_the_fixed_positions_of_mae(side):
    assert distance(sincos2d((side, side), 64, endpoint=False), fixed_positions(64, side)[0, 1:]) < TOLERANCE


def check_mae(learner, loss, predicted, mask, most):
    ours, hidden = learner.predict(learner.model, images(CONFIG), NOISE)
    assert torch.equal(hidden, mask.bool())
    assert distance(ours, predicted) < most
    assert distance(learner.losses(learner.model, images(CONFIG), NOISE).mean(), loss) < most


@torch.no_grad()
@FORMS
def test_the_loss_of_hugging_faces_mae(tmp_path, form, eps):
    theirs = hf_mae(eps=eps)
    source, told = stored(theirs, tmp_path, form)
    learner = objective("mae", load(source, told), **DECODER)
    assert load_added(source, learner, "MAE") == "decoder loaded"
    answer = theirs(images(CONFIG), noise=NOISE)
    check_mae(learner, answer.loss, answer.logits, answer.mask, TOLERANCE)


@torch.no_grad()
def test_the_loss_of_maes_authors(tmp_path):
    theirs = authors_mae(CONFIG)
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "mae.pth")
    learner = objective("mae", load(tmp_path / "mae.pth", CONFIG), **DECODER)
    assert load_added(tmp_path / "mae.pth", learner, "MAE") == "decoder loaded"
    check_mae(learner, *theirs(images(CONFIG), NOISE, 0.75), TOLERANCE)


@torch.no_grad()
@FORMS
def test_the_loss_of_hugging_faces_simmim(tmp_path, form, eps):
    """They add 1e-5 to the number of masked pixels, which is 704 here."""
    theirs = hf_simmim(eps=eps)
    source, told = stored(theirs, tmp_path, form)
    learner = objective("simmim", load(source, told), mask_size=4, mask_ratio=0.6)
    assert load_added(source, learner, "SimMIM") == "decoder loaded"
    x, chosen = images(CONFIG), lowest(NOISE, count_masked(36, 0.6))
    answer = theirs(x, bool_masked_pos=chosen)
    predicted, mask = learner.predict(learner.model, x, NOISE)
    assert mask.sum() == 704 == 16 * chosen.sum()
    assert distance(predicted, answer.reconstruction) < TOLERANCE
    assert distance(learner.losses(learner.model, x, NOISE).mean(), answer.loss) < TOLERANCE


@torch.no_grad()
def test_a_decoder_in_shards(tmp_path):
    theirs = hf_mae()
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    learner = objective("mae", load(tmp_path), **DECODER)
    assert load_added(tmp_path, learner, "MAE") == "decoder loaded"
    answer = theirs(images(CONFIG), noise=NOISE)
    check_mae(learner, answer.loss, answer.logits, answer.mask, TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("form", ["run", "teacher"])
def test_the_heads_of_dinos_authors(tmp_path, form):
    student, teacher, checkpoint = authors_dino(CONFIG)
    torch.save({form: checkpoint[form]} if form in checkpoint else checkpoint, tmp_path / "dino.pth")
    learner = objective("dino", load(tmp_path / "dino.pth", CONFIG), **HEAD)
    assert load_added(tmp_path / "dino.pth", learner, "DINO") == "head loaded"
    features = learner.kept().embed(images(CONFIG))
    first = student if form == "run" else teacher
    assert distance(learner.head(features), first.head(features)) < TOLERANCE
    assert distance(learner.teacher_head(features), teacher.head(teacher.backbone(images(CONFIG)))) < TOLERANCE
    assert not learner.head.last_layer.parametrizations.weight.original0.requires_grad


@torch.no_grad()
def test_a_decoder_moves_to_another_image_size():
    state = authors_mae(CONFIG).state_dict()
    learner = objective("mae", load(state, CONFIG, img_size=32), **DECODER)
    assert load_added(state, learner, "MAE") == "decoder loaded"
    assert distance(learner.decoder.pos, fixed_positions(64, 8)) < TOLERANCE


def test_a_decoder_of_other_pixels_is_loaded_with_a_note(tmp_path):
    hf_mae(norm_pix_loss=False).save_pretrained(tmp_path)
    note = "decoder loaded; it was trained to predict pixels that are not normalised by patch"
    assert load_added(tmp_path, objective("mae", build(CONFIG), **DECODER), "MAE") == note


@pytest.mark.parametrize("method", ["masked", "mae", "simmim", "dino", "lejepa"])
def test_what_a_run_saved_is_loaded_again(tmp_path, method):
    task, model = task_type(method)(), build(CONFIG)
    first, second = objective(method, model), objective(method, model)
    randomise(torch.nn.ModuleList(first.added().values()))
    card = Card(model="it", config=CONFIG, task=task, preprocess=Preprocess((24, 24), 3))
    save(tmp_path / "model.safetensors", model, card)
    save_added(tmp_path / "decoder.safetensors", first.added())
    assert load_added(tmp_path, second, task.title) == f"{next(iter(first.added()))} loaded"
    old = {name: module.state_dict() for name, module in first.added().items()}
    for name, module in (*second.added().items(), *second.followers().items()):
        assert all(torch.equal(value, old[name][key]) for key, value in module.state_dict().items())


# What does not fit


@pytest.mark.parametrize(
    ("source", "method", "given", "note"),
    [
        ("mae", "mae", {"decoder_width": 32, "decoder_depth": 2}, "it needs --decoder-width 64, not 32"),
        (
            "mae",
            "mae",
            {"decoder_width": 96, "decoder_depth": 1},
            "it needs --decoder-width 64, not 96 and --decoder-depth 2, not 1",
        ),
        ("mae", "simmim", {}, "it is for MAE, not for SimMIM"),
        ("mae", "masked", {}, "it is for MAE, not for masked patch prediction"),
        ("simmim", "mae", DECODER, "it is for SimMIM, not for MAE"),
        ("dino", "mae", DECODER, "it is for DINO, not for MAE"),
        ("dino", "dino", HEAD | {"prototypes": 32}, "it needs --prototypes 48, not 32"),
        ("dino", "dino", HEAD | {"head_width": 80}, "it needs --head-width 40, not 80"),
    ],
)
def test_what_does_not_fit_is_not_loaded(source, method, given, note):
    make = {
        "mae": lambda: authors_mae(CONFIG).state_dict(),
        "simmim": lambda: hf_simmim().state_dict(),
        "dino": lambda: authors_dino(CONFIG)[2],
    }
    learner = objective(method, build(CONFIG), **given)
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    what = "head" if source == "dino" else "decoder"
    title = task_type(method).title
    assert load_added(make[source](), learner, title) == f"its {what} was not loaded: {note}"
    assert identical(learner.state_dict(), before)


def test_other_decoders_of_mae_are_not_loaded(tmp_path):
    state = authors_mae(CONFIG).state_dict()
    learner = objective("mae", build(replace(CONFIG, channels=1)), **DECODER)
    assert "predicts 48 values for each patch, not 16: give the --channels" in load_added(state, learner, "MAE")
    learner = objective("mae", build(CONFIG), **DECODER)
    zeros = {"decoder_pos_embed": torch.zeros(1, 37, 64)}
    assert load_added(state | zeros, learner, "MAE").endswith("its positions are not MAE's")
    without = {name: value for name, value in state.items() if name != "decoder_norm.bias"}
    assert load_added(without, learner, "MAE").endswith("decoder.norm.bias is missing")
    hf_mae(decoder_num_attention_heads=4).save_pretrained(tmp_path)
    assert load_added(tmp_path, learner, "MAE").endswith("it has 4 heads, not 2")
    with pytest.raises(UserError, match=r"decoder\.norm\.bias has NaN"):
        load_added(state | {"decoder_norm.bias": torch.full((64,), torch.nan)}, learner, "MAE")


def test_a_head_with_batchnorm_is_not_loaded():
    more = {"head.mlp.1.running_mean": torch.zeros(40), "head.mlp.1.num_batches_tracked": torch.tensor(3)}
    state = authors_dino(CONFIG)[2]["teacher"] | more
    note = load_added({"teacher": state}, objective("dino", build(CONFIG), **HEAD), "DINO")
    assert note == "its head was not loaded: head.mlp.1.num_batches_tracked is unexpected"


@pytest.mark.parametrize(("method", "what"), [("mae", "decoder"), ("dino", "head"), ("lejepa", "projector")])
def test_weights_without_a_decoder_leave_it_new(method, what):
    state = timm_vit(CONFIG).state_dict()
    note = load_added(state, objective(method, build(CONFIG)), task_type(method).title)
    assert note == f"it has no {what} of {task_type(method).title}, so the {what} is new"


# Runs

HOW = {"epochs": 1, "batch_size": 512, "workers": 1, "device": "cpu"}
STILL = HOW | {"lr": 1e-12, "weight_decay": 0.0}  # learns nothing
SMALL = ViTConfig(width=32, depth=1, heads=2, mlp=64, patch=2, img_size=(8, 8), channels=1, classes=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Hugging Face's MAE, for digits."""
    folder = tmp_path_factory.mktemp("mae")
    hf_mae(SMALL).save_pretrained(folder)
    return folder


def log_of(run):
    return (run / "train.log").read_text(encoding="utf-8")


def same(first, second):
    first, second = find_added(first).state, find_added(second).state
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first) < 1e-6


def test_pretraining_continues_from_a_checkpoint_of_others(tmp_path, folder):
    run = vitrail.pretrain("digits", method="mae", weights=folder, out=tmp_path, name="same", **DECODER, **STILL)
    assert f"From {folder}: decoder loaded." in log_of(run)
    assert "left out" not in log_of(run)
    assert same(run, folder)
    run = vitrail.pretrain("digits", method="simmim", weights=folder, out=tmp_path, name="other", **STILL)
    assert f"From {folder}: its decoder was not loaded: it is for MAE, not for SimMIM." in log_of(run)


def test_a_run_continues_with_its_decoder_and_is_fine_tuned_without(tmp_path):
    first = vitrail.pretrain("digits", method="mae", model="vit_nano2", out=tmp_path, name="first", **HOW)
    again = vitrail.pretrain("digits", method="mae", weights=first, out=tmp_path, name="again", **STILL)
    assert f"From {first}: decoder loaded." in log_of(again)
    assert "left out" not in log_of(again)
    assert same(first, again)
    tuned = vitrail.train("digits", weights=first, out=tmp_path, name="tuned", **HOW)
    assert "new head for 10 classes." in log_of(tuned)
    assert log_of(tuned).count("left out the decoder, which is in decoder.safetensors.") == 1


def test_training_takes_the_encoder_of_a_checkpoint_of_others(tmp_path, folder):
    run = vitrail.train("digits", weights=folder, out=tmp_path, name="run", **HOW)
    assert log_of(run).count("left out the decoder, which only pre-training needs.") == 1
    assert peers.shown(open_card(run).config) == replace(SMALL, classes=10)
