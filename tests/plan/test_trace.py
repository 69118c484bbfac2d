"""The traced step against real ones: saved tensors, gradients, optimiser state."""

from __future__ import annotations

import pytest
import torch

from vitrail import models
from vitrail.config import TrainConfig
from vitrail.data import Data
from vitrail.data.blank import blank
from vitrail.models import build, macs
from vitrail.models.bit import BiTConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.swin import SwinConfig
from vitrail.models.vit import ViTConfig
from vitrail.plan.machines import Machine
from vitrail.plan.settings import planned
from vitrail.plan.trace import Trace, Tracer
from vitrail.tasks.objective import Batch
from vitrail.train.optim import build_optimizers
from vitrail.train.prepare import model_config
from vitrail.train.recompute import recompute_activations
from vitrail.train.setup import autocast
from vitrail.train.transfer import set_learning, set_mode

HERE = Machine("here", 1e9, {})
BATCH = 6  # not one of the sizes that are traced

# The smallest models that have every part, and three sizes of each family: image side.
TINY = {
    "vit": ViTConfig(32, 1, 2, 64, 4),
    "windows": ViTConfig(32, 2, 2, 64, 4, attention="window:3,shift"),
    "neighbourhood": ViTConfig(32, 1, 2, 64, 4, attention="neighbourhood:3"),
    "swin": SwinConfig((16, 32), (2, 1), (2, 4), window=4, patch=2),
    "bit": BiTConfig((32, 64), (1, 1), shrink=False, groups=4),
    "mixer": MixerConfig(32, 1, 16, 64, 4),
}
SIZES = [(name, side) for name in ("vit", "swin", "bit", "mixer") for side in (16, 32, 64)]
SIZES += [("windows", 32), ("neighbourhood", 32)]


@pytest.fixture(autouse=True)
def _tiny_models(monkeypatch):
    for name, config in TINY.items():
        monkeypatch.setitem(models.CONFIGS, f"{name}_test", config)


def resolved(model: str, side: int = 32, **settings: object) -> tuple[TrainConfig, Data]:
    asked = {"model": model, "img_size": side, "recipe": "small", "device": "cpu", "amp": "off", **settings}
    return planned(5000, 10, None, HERE, asked)


def trace(config: TrainConfig, data: Data) -> Trace:
    return Tracer(data)(config)


def really_saved(config: TrainConfig, data: Data) -> tuple[int, int, int]:
    """Bytes of saved activations, of gradients and of optimiser state, of a real step."""
    torch.manual_seed(0)
    model = build(model_config(config, data.task))
    if config.transfer.lora_rank or config.transfer.freeze is not None:
        set_learning(model, config.transfer)
    objective = data.task.objective(model, config, data.splits["train"].targets)
    if config.run.grad_checkpointing:
        recompute_activations(model)
    set_mode(model)
    optimizers = build_optimizers(model, config.optim, pretrained=False)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    images = torch.randn(BATCH, config.input.channels, *config.input.img_size)
    targets = torch.nn.functional.one_hot(torch.arange(BATCH), len(data.classes)).float()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(config)():
        loss = objective(Batch(images, targets, torch.arange(BATCH)))["loss"]
    activations = sum(storage.nbytes() for storage in found.values())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return activations, gradients, sum(v.nbytes for state in states for v in state.values() if torch.is_tensor(v))


@pytest.mark.parametrize(("model", "side"), SIZES)
def test_activations_gradients_and_optimiser_state_are_those_of_a_real_step(model, side):
    config, data = resolved(f"{model}_test", side, opt="adamw")
    activations, gradients, state = really_saved(config, data)
    traced = trace(config, data)
    assert traced.activations(BATCH) == pytest.approx(activations, rel=0.15)
    assert traced.gradients == gradients
    assert traced.optimizer == state


@pytest.mark.parametrize(
    "settings",
    [{"amp": "bf16"}, {"opt": "muon"}, {"opt": "lamb"}, {"opt": "sgd"}, {"lora_rank": 4}, {"class_weights": True}],
    ids=str,
)
def test_every_option_that_changes_memory_is_traced(settings):
    config, data = resolved("vit_test", 16, **settings)
    activations, gradients, state = really_saved(config, data)
    traced = trace(config, data)
    assert traced.activations(BATCH) == pytest.approx(activations, rel=0.15)
    assert traced.gradients == gradients
    assert traced.optimizer == state


def test_checkpointing_keeps_the_inputs_of_the_stages_and_the_activations_of_one():
    config, data = resolved("vit_test", 16, grad_checkpointing=True)
    inputs, _, _ = really_saved(config, data)
    traced, plain = trace(config, data), trace(*resolved("vit_test", 16))
    assert traced.kept(BATCH) == pytest.approx(inputs, rel=0.05)
    assert traced.activations(BATCH) == traced.kept(BATCH) + max(stage(BATCH) for stage in plain.stages)
    assert traced.operations > 1.3 * plain.operations  # a second forward pass


@pytest.mark.parametrize("name", ["vit_test", "swin_test", "bit_test", "mixer_test", "coatnet_nano", "pvt_v2_b0"])
def test_a_step_takes_six_operations_for_each_multiply_accumulate(name):
    pool = {"pool": "gap"} if name == "vit_test" else {}  # with a class token, the last block computes less
    config, data = resolved(name, 64, drop_path=0.0, **pool)
    # The images need no gradient, so the first layer takes less.
    assert trace(config, data).operations == pytest.approx(6 * macs(model_config(config, data.task)), rel=0.1)


def test_self_supervision_and_moving_averages_have_their_own_memory():
    plain = trace(*resolved("vit_test", 16))
    averaged = trace(*resolved("vit_test", 16, model_ema=0.99))
    assert (plain.averages, averaged.averages) == (0, plain.weights)
    taught = trace(*planned(5000, 10, "dino", HERE, {"model": "vit_test", "img_size": 16, "device": "cpu"}))
    assert taught.averages > plain.weights  # the teacher, and its head
    assert taught.activations(4) > 2 * plain.activations(4)  # two large crops and more


def test_a_blank_data_set_takes_no_memory():
    data = blank(300_000_000, 18_291)
    assert len(data.splits["train"]) == 300_000_000
    assert data.splits["train"].pixels.base is not None
