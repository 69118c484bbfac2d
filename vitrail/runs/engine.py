"""Engines: the programs that compute a model's outputs or feature vectors.

| engine | program |
|---|---|
| `torch` | the model as it is |
| `packed` | PyTorch with packed linear layers (`models/packed.py`); CPU only |
| `bf16` | the same in mixed precision; CPU only, considered where the CPU has bf16 instructions |
| `openvino` | OpenVINO in float32, if installed; CPU only |

`auto` begins with `torch` and changes to the fastest safe engine once a job proves long enough (`runs/fastest.py`).
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from vitrail.device import has_bf16, keep_freed_memory
from vitrail.errors import UserError, nearest
from vitrail.models import Model
from vitrail.models.packed import pack
from vitrail.runs import EngineName
from vitrail.runs.openvino import compiled, import_openvino
from vitrail.world import world

if TYPE_CHECKING:
    from vitrail.tasks import Task

Compute = Callable[[Tensor], Tensor]  # normalised images (B, C, H, W) to outputs or features, (B, M) float32


@dataclass(frozen=True)
class Program:
    """An engine: how to make it for a model and its images, and how far its outputs may be from PyTorch's."""

    title: str
    make: Callable[[nn.Module, Tensor], Compute]
    tolerance: float  # relative to the largest output
    available: Callable[[], bool]  # whether `auto` considers it on this machine
    package: str | None = None  # that must be installed


class Features(nn.Module):
    """A model whose output is its feature vectors."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.embed(images)


class Engine:
    """Computes the outputs of a model in evaluation mode, or its features, batch by batch."""

    def __init__(
        self,
        model: Model,
        task: Task | None,
        device: str,
        wanted: EngineName = "auto",
        compute: Literal["outputs", "features"] = "outputs",
    ):
        """`task` judges whether the answers of two engines agree; features have none."""
        check_engine(wanted, device)
        if wanted == "auto" and world().size > 1:
            wanted = "torch"  # processes would choose different engines
        if device == "cpu":
            keep_freed_memory()
        self.name: EngineName = "torch" if wanted == "auto" else wanted
        self._module: nn.Module = model if compute == "outputs" else Features(model)
        self._about = f"{compute} of {model.config!r}"
        self._task = task if compute == "outputs" else None
        self._compute: Compute | None = self._module if wanted == "torch" or device != "cpu" else None
        self._auto = wanted == "auto"
        self._spent, self._patience = 0.0, -1.0  # seconds; the patience is not yet known

    def __call__(self, images: Tensor) -> Tensor:
        """The outputs or features, (B, M), of normalised images, (B, C, H, W)."""
        if self._compute is None and not self._auto:
            self._compute = PROGRAMS[self.name].make(self._module, images)
        if self._compute is not None:
            return self._compute(images).float()
        return self._try(images)

    def settle(self, images: Tensor) -> None:
        """Chooses the engine now, by a batch of normalised images, for a job that must not pause for a speed test."""
        from vitrail.runs import fastest

        if self._compute is None and self._auto:
            self.name, self._compute = fastest.choose(self._module, self._about, images, self._task)

    def _try(self, images: Tensor) -> Tensor:
        """Computes with PyTorch until the job has taken as long as the change to another engine may take.

        The number of images is often unknown in advance. By this rule a short job loses nothing, and a long one little.
        """
        from vitrail.runs import fastest

        if self._patience < 0:
            self._patience = fastest.patience(self._about, images)
        begun = time.perf_counter()
        outputs: Tensor = self._module(images).float()
        self._spent += time.perf_counter() - begun
        if self._spent > self._patience:
            self.name, self._compute = fastest.choose(self._module, self._about, images, self._task)
        return outputs


def check_engine(wanted: str, device: str) -> None:
    """Raises UserError if an engine cannot be used on this machine and device."""
    names = get_args(EngineName)
    if wanted not in names:
        raise UserError(f"There is no engine '{wanted}'.{nearest(wanted, names)} Engines: {', '.join(names)}.")
    if wanted in PROGRAMS:
        program = PROGRAMS[wanted]
        if device != "cpu":
            raise UserError(f"The engine {wanted} runs on the CPU only, but the device is {device}. Use --device cpu.")
        if program.package is not None and not is_installed(program.package):
            raise UserError(f"The engine {wanted} needs {program.title}: pip install 'vitrail[{wanted}]'")
        if wanted != "openvino" and not has_onednn():
            raise UserError(f"The engine {wanted} needs oneDNN, which this PyTorch was built without. Use torch.")
        if wanted == "bf16" and not computes_bf16():
            raise UserError("The engine bf16 needs a CPU with AVX-512, which this one does not have. Use packed.")


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def computes_bf16() -> bool:
    """Whether oneDNN computes in bf16 on this CPU, even if slowly."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed(module: nn.Module, images: Tensor) -> Compute:  # noqa: ARG001
    return pack(module)


def _bf16(module: nn.Module, images: Tensor) -> Compute:  # noqa: ARG001
    """The residual stream stays in float32; linear layers, attention and convolutions run in bf16."""
    packed = pack(module, torch.bfloat16)

    def compute(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return packed(images).float()

    return compute


def _openvino(module: nn.Module, images: Tensor) -> Compute:
    # Tracing does not accept the tensors of inference mode.
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing: the model checks the shape of the images, which is constant
        graph = import_openvino().convert_model(module, example_input=images[:2].clone())
    program = compiled(graph)
    return lambda images: torch.from_numpy(program([images.numpy()])[0])


PROGRAMS: dict[EngineName, Program] = {
    "packed": Program("packed PyTorch", _packed, 1e-3, has_onednn),
    "bf16": Program("PyTorch in bf16", _bf16, 3e-2, lambda: has_onednn() and has_bf16()),
    "openvino": Program("OpenVINO", _openvino, 1e-3, lambda: is_installed("openvino"), "openvino"),
}
