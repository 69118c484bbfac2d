"""A training step traced without computing it: the bytes that it holds, and its operations.

The step runs on fake tensors, which have shapes and storages but no values. What autograd saves for the backward pass
is therefore counted, not modelled, for every architecture, task and option.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

from vitrail.config import TrainConfig, override
from vitrail.data import Data
from vitrail.models import Model, build
from vitrail.tasks.objective import Batch, Objective
from vitrail.train.batch import crops
from vitrail.train.optim import build_optimizers
from vitrail.train.prepare import model_config
from vitrail.train.recompute import recompute_activations
from vitrail.train.transfer import set_learning, set_mode

_WHOLE: dict[str, object] = {"grad_checkpointing": False}
_UNTUNED: dict[str, object] = {"freeze": None, "lora_rank": 0, "lora_alpha": 0.0}
_BATCHES = (2, 4)  # sizes traced; saved bytes are a linear function of the batch size


@dataclass(frozen=True)
class Linear:
    """A number of bytes as a function of the batch size."""

    fixed: float
    each: float  # per image

    def __call__(self, images: float) -> float:
        return self.fixed + self.each * images


@dataclass(frozen=True)
class Trace:
    """A training step of a configuration, in bytes and operations."""

    parameters: int
    trainable: int
    weights: int  # of the model and of what learns with it, such as a decoder
    averages: int  # moving average of the weights, or a momentum teacher
    gradients: int
    optimizer: int
    kept: Linear  # saved for the backward pass; with checkpointing, the inputs of the stages
    stages: tuple[Linear, ...]  # each stage's own, if it learns: what checkpointing recomputes, one at a time
    largest: int  # bytes of the weights of the largest stage, which FSDP gathers
    learning: int  # bytes of the gradients of the stage that has most
    operations: float  # of a training step, forward and backward, per image; a multiply-accumulate is two
    checkpointed: bool

    def activations(self, images: float) -> float:
        """Bytes of activations at a batch size."""
        working = max(stage(images) for stage in self.stages)
        return self.kept(images) + working if self.checkpointed else max(self.kept(images), working)


class Tracer:
    """Traces runs on the same data. Steps that several runs share are traced once.

    For a GPU, attention is in half precision; on a CPU it stays in fp32.
    """

    def __init__(self, data: Data, *, gpu: bool = False):
        self._data, self._gpu = data, gpu
        self._known: dict[tuple[TrainConfig, int], _Step] = {}

    def __call__(self, config: TrainConfig) -> Trace:
        """Traces a training step."""
        few, many = self._steps(override(config, _WHOLE))
        kept, operations = _line(few.saved.total, many.saved.total), few.operations
        if config.run.grad_checkpointing:
            kept = _line(*(step.saved.total for step in self._steps(config)))
            operations += few.forward
        # A frozen stage saves nothing, but it computes.
        parts = self._steps(override(config, _WHOLE | _UNTUNED)) if _tuned(config) else [few, many]
        return Trace(
            **few.sizes,
            optimizer=few.optimizer,
            kept=kept,
            stages=tuple(map(_line, *(step.saved.stages for step in parts))),
            operations=operations / _BATCHES[0],
            checkpointed=config.run.grad_checkpointing,
        )

    def _steps(self, config: TrainConfig) -> list[_Step]:
        """A step of each of the batch sizes."""
        for size in _BATCHES:
            if (config, size) not in self._known:
                self._known[config, size] = _Step(config, self._data, self._gpu, size)
        return [self._known[config, size] for size in _BATCHES]


def _tuned(config: TrainConfig) -> bool:
    """Whether only a part of the model is trained."""
    return config.transfer.freeze is not None or config.transfer.lora_rank > 0


def _line(few: float, many: float) -> Linear:
    each = (many - few) / (_BATCHES[1] - _BATCHES[0])
    return Linear(few - each * _BATCHES[0], each)


class _Step:
    """A training step with a batch of `images`: the forward pass, and on demand the rest."""

    def __init__(self, config: TrainConfig, data: Data, gpu: bool, images: int):
        with torch.device("meta"):
            model = build(model_config(config, data.task))
            if _tuned(config):
                set_learning(model, config.transfer)
            targets = data.splits["train"].targets
            objective = data.task.fitted(targets[: 1 + len(data.classes)]).objective(model, config, targets)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            modules = _modules(objective)
            _fake(modules)
            if config.run.grad_checkpointing:
                recompute_activations(model)
            set_mode(model)
            added = list(objective.added().values())
            pretrained = config.weights is not None
            self._optimizers = build_optimizers(model, config.optim, pretrained, added)
            self.sizes = _sizes(model, added, modules)
            self.saved = _Saved({tensor.untyped_storage()._cdata for tensor in _tensors(modules)})
            for stage in model.stages():
                stage.register_forward_pre_hook(lambda *_: self.saved.enter())
                stage.register_forward_hook(lambda *_: self.saved.leave())
            with _counter() as counter, self.saved.hooks(), _precision(config, gpu):
                self._loss = objective(_batch(config, data, images))["loss"]
        self.forward = counter.get_total_flops()

    @cached_property
    def operations(self) -> float:
        """Of the whole step."""
        with self._mode, _counter() as counter:
            torch.autograd.backward(self._loss)
        return self.forward + counter.get_total_flops()

    @cached_property
    def optimizer(self) -> int:
        """The bytes of the optimisers' state after a step."""
        with self._mode:
            return _state_bytes(self._optimizers)


def _counter() -> FlopCounterMode:
    """Counts operations. PyTorch's own formulas lack attention on a CPU, and groups in the backward of convolutions."""
    return FlopCounterMode(
        display=False,
        custom_mapping={
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
            torch.ops.aten.convolution_backward: _convolution_backward,
        },
    )


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Twice those of the forward pass: what a kernel computes again is not counted."""
    return 2 * int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _convolution_backward(gradient: Any, inputs: Any, weights: Any, *rest: Any, **_: Any) -> int:
    """Those of the forward pass for the gradient of the inputs, and as many for that of the weights."""
    transposed, wanted = rest[4], rest[7]
    return sum(wanted[:2]) * conv_flop_count(inputs, weights, gradient, transposed)


def _sizes(model: Model, added: list[nn.Module], modules: list[nn.Module]) -> dict[str, int]:
    learnt = [p for module in (model, *added) for p in module.parameters()]
    trainable = [p for p in learnt if p.requires_grad]
    weights = sum(map(_bytes, [*learnt, *model.buffers()]))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in trainable),
        "weights": weights,
        "averages": sum(map(_bytes, _tensors(modules))) - weights,
        "gradients": sum(map(_bytes, trainable)),
        "largest": max(sum(map(_bytes, stage.parameters())) for stage in model.stages()),
        "learning": max(sum(_bytes(p) for p in stage.parameters() if p.requires_grad) for stage in model.stages()),
    }


class _Saved:
    """Counts the storages that autograd saves, each once, in all and within each stage."""

    def __init__(self, own: set[int]):
        self._seen = set(own)  # weights are not activations
        self._alive: list[Any] = []  # keeps storages from being freed and their addresses reused
        self.total = 0.0
        self.stages: list[float] = []
        self._before = 0.0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def enter(self) -> None:
        self._before = self.total

    def leave(self) -> None:
        self.stages.append(self.total - self._before)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(storage)
            self.total += storage.nbytes()
        return tensor


class _HalfAttention(TorchFunctionMode):
    """Computes attention in half precision, as on a GPU."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            args = tuple(arg.to(self.dtype) for arg in args)
            kwargs = {k: self._half(v) for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _half(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def _precision(config: TrainConfig, gpu: bool) -> Iterator[None]:
    amp = config.run.amp
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    half = _HalfAttention(dtype) if gpu and amp != "off" else nullcontext()
    with torch.autocast("cpu", dtype, enabled=amp != "off"), half:
        yield


def _batch(config: TrainConfig, data: Data, images: int) -> Batch:
    """An empty batch of the right shape."""
    channels, views = config.input.channels, crops(config)
    shapes = [(view.count * images, channels, *view.size) for view in views]
    shapes = shapes or [(images, channels, *config.input.img_size)]
    pictures = [torch.empty(shape) for shape in shapes]
    if data.task.annotated:
        targets = torch.from_numpy(data.task.blank(images, config.input.img_size))
    else:
        targets = torch.empty(images, data.task.outputs if data.task.labelled else 0)
    return Batch(pictures[0], targets, torch.arange(images), pictures[1] if len(pictures) > 1 else None)


def _modules(objective: Objective) -> list[nn.Module]:
    """Every module that an objective holds, also those that are hidden from its own list, such as a moving average."""
    roots = [objective, *objective.parts().values(), *objective.followers().values()]
    found = {id(module): module for root in roots if isinstance(root, nn.Module) for module in root.modules()}
    return list(found.values())


def _tensors(modules: list[nn.Module]) -> list[Tensor]:
    """The parameters and buffers of modules, each once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            found[id(tensor)] = tensor
    return list(found.values())


def _fake(modules: list[nn.Module]) -> None:
    """Replaces all tensors by fake ones on the CPU, whose kernels save what a GPU's would; shared ones stay shared."""
    fakes: dict[int, tuple[Tensor, Any]] = {}  # with the originals, so that no address is reused

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in fakes:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return fakes[id(tensor)][1]

    for module in modules:
        for own in (module._parameters, module._buffers, vars(module)):  # the last: class weights
            own.update({name: fake(tensor) for name, tensor in own.items() if isinstance(tensor, Tensor)})


def _state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    """The bytes of the optimisers' state after a step."""
    total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["fused"] = False  # the fused kernel has no fake one; its state is the same
            group["foreach"] = False
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.empty_like(p)
        optimizer.step()
        for state in optimizer.state.values():
            total += sum(_bytes(value) for value in state.values() if isinstance(value, Tensor))
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
