"""What `benchmarks/peers.py` times: a training step or inference of one library, in a process of its own.

Every library has the same architecture, the same inputs and the same work to do. A training step is the forward pass,
cross-entropy, the backward pass, clipping to norm 1, AdamW and clearing the gradients. Inference starts with uint8
pixels, as they come from an image, and ends with logits as an array.

Libraries are imported inside functions, so that each process imports only its own.
"""

from __future__ import annotations

import importlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from step_profile import profile

if TYPE_CHECKING:
    from torch import Tensor, nn

TESTS = Path(__file__).parent.parent / "tests"
VITRAIL, LIMIT = "vitrail", "matrix products"
PEERS = ("timm", "transformers", "vit-pytorch")
RATE, DECAY = 1e-3, 0.05

Precision = Literal["fp32", "bf16"]
Step = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A ViT that every library has: learned positions, a class token, a linear head."""

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int
    img_size: tuple[int, int]
    classes: int

    @property
    def tokens(self) -> int:
        return 1 + (self.img_size[0] // self.patch) * (self.img_size[1] // self.patch)


MODELS = {
    "Ti/16, 224 px": Shape(192, 12, 3, 768, 16, (224, 224), 1000),
    "192 × 9, patch 4, 32 px": Shape(192, 9, 3, 768, 4, (32, 32), 10),
    "B/16, 224 px": Shape(768, 12, 12, 3072, 16, (224, 224), 1000),
}


@dataclass(frozen=True)
class Row:
    """One comparison: a model, a batch size, training or inference."""

    what: Literal["training", "inference"]
    model: str
    batch: int
    weight: float  # share of the time of all rows
    quick: bool = False

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch}"


@dataclass(frozen=True)
class Variant:
    """One way to compute a row."""

    library: str
    precision: Precision = "fp32"
    how: str = ""  # the optimiser of a peer: AdamW or fused AdamW; the function of a matrix product
    compiled: bool = False

    @property
    def name(self) -> str:
        how = "" if self.how == "AdamW" else self.how
        precision = "" if self.precision == "fp32" else self.precision
        return ", ".join(filter(None, [self.library, how, precision, "compiled" * self.compiled]))


def default_precision() -> Precision:
    """The precision in which `vitrail train` trains on this CPU."""
    from vitrail.device import choose_precision

    return "bf16" if choose_precision("cpu") == "bf16" else "fp32"


# A process


def serve(pipe: Connection, row: Row, library: str, compiled: bool) -> None:
    """Computes turns of a library's variants on request: (variant, seconds) in, seconds per step out.

    A turn of 0 seconds is one step. The request None ends the process, the request "profile" is answered by
    `profile`.
    """
    sys.path.insert(0, str(TESTS))
    import_library(library)
    before = peak()
    prepare = limit if library == LIMIT else training if row.what == "training" else inference
    step_of = prepare(row, library, compiled)
    pipe.send("ready")
    first: Step | None = None
    while (request := pipe.recv()) is not None:
        if request == "profile":
            assert first is not None
            pipe.send(profile(first))
            continue
        variant, seconds = request
        step = step_of(variant)
        first = first or step
        pipe.send((turn(step, seconds), peak() - before))


def turn(step: Step, seconds: float) -> float:
    """The median time of the steps that fit into some seconds; at least one."""
    times = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def peak() -> float:
    """The peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# The libraries


def import_library(library: str) -> Any:
    """Imports all that a library needs, so that its memory is known apart from that of its model.

    The peers import torchvision, and tests/peers.py knows what to do where that fails.
    """
    import torch

    torch.ones(8, 8) @ torch.ones(8, 8)  # loads the kernels of matrix products
    if library == LIMIT:
        return torch
    if library == VITRAIL:
        for name in ("runs.predictor", "train.loop", "weights.loading"):
            importlib.import_module(f"vitrail.{name}")
        return importlib.import_module("vitrail")
    from peers import timm as import_with_torchvision  # tests/peers.py, not the program of the same name here

    modules = {
        "timm": "timm.models.vision_transformer",
        "transformers": "transformers.models.vit.modeling_vit",
        "vit-pytorch": "vit_pytorch.vit",
    }
    return import_with_torchvision(modules[library])


def build(library: str, shape: Shape) -> nn.Module:
    """A library's model, with its own initial weights."""
    module = import_library(library)
    if library == VITRAIL:
        from vitrail.models import build as build_vitrail
        from vitrail.models.vit import ViTConfig

        return build_vitrail(ViTConfig(**asdict(shape)))
    if library == "timm":
        return module.VisionTransformer(
            img_size=shape.img_size,
            patch_size=shape.patch,
            embed_dim=shape.width,
            depth=shape.depth,
            num_heads=shape.heads,
            mlp_ratio=shape.mlp / shape.width,
            num_classes=shape.classes,
        )
    if library == "transformers":
        config = module.ViTConfig(
            image_size=shape.img_size[0],
            patch_size=shape.patch,
            hidden_size=shape.width,
            num_hidden_layers=shape.depth,
            num_attention_heads=shape.heads,
            intermediate_size=shape.mlp,
            num_labels=shape.classes,
            attn_implementation="sdpa",
        )
        return module.ViTForImageClassification(config)
    return module.ViT(
        image_size=shape.img_size,
        patch_size=shape.patch,
        dim=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        dim_head=shape.width // shape.heads,
        mlp_dim=shape.mlp,
        num_classes=shape.classes,
    )


def logits(answer: Any) -> Tensor:
    """The logits of a model's answer; transformers wraps them."""
    import torch

    return answer if isinstance(answer, torch.Tensor) else answer.logits


def optimizers(library: str, model: Any) -> dict[str, list[Any]]:
    """The optimisers of a training step by name: vitrail's own, or AdamW as a peer's user has it, plain and fused.

    Everywhere weight decay applies to weight matrices only.
    """
    from torch.optim import AdamW

    if library == VITRAIL:
        from vitrail.config import OptimConfig
        from vitrail.train.optim import build_optimizers

        config = OptimConfig(
            epochs=1, batch_size=1, opt="adamw", lr=RATE, weight_decay=DECAY, sched="cosine", warmup_epochs=0
        )
        return {"": build_optimizers(model, config, pretrained=False)}
    decayed, others = [], []
    for name, p in model.named_parameters():
        (decayed if p.ndim >= 2 and name.endswith("weight") else others).append(p)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    plain, fused = AdamW(groups, lr=RATE), AdamW(groups, lr=RATE, fused=True)
    fused.state = plain.state  # so that the process has the memory of one optimiser
    return {"AdamW": [plain], "fused AdamW": [fused]}


def autocast(precision: Precision) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


# The work


def training(row: Row, library: str, compiled: bool) -> Callable[[Variant], Step]:
    """Training steps by variant; all of them train the same model."""
    import torch

    if library == VITRAIL:
        from vitrail.device import keep_freed_memory

        keep_freed_memory()
    torch.manual_seed(0)
    model = build(library, row.shape).train()
    return training_steps(library, model, row.shape, row.batch, compiled)


def training_steps(
    library: str, model: nn.Module, shape: Shape, batch: int, compiled: bool = False
) -> Callable[[Variant], Step]:
    import torch
    import torch.nn.functional as F
    from torch.nn.utils import clip_grad_norm_
    from torch.profiler import record_function

    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, *shape.img_size, generator=generator)
    labels = torch.randint(shape.classes, (batch,), generator=generator)
    run: Any = torch.compile(model) if compiled else model
    known = optimizers(library, model)

    def step(variant: Variant) -> float:
        with autocast(variant.precision):
            loss = F.cross_entropy(logits(run(images)), labels)
        loss.backward()
        with record_function("clip"):
            clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in known[variant.how]:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return lambda variant: lambda: step(variant)


def inference(row: Row, library: str, compiled: bool) -> Callable[[Variant], Step]:
    """Inference by variant, from uint8 pixels to logits: vitrail as its Predictor computes it."""
    import torch

    shape = row.shape
    pixels = pixels_of(shape, row.batch)
    model: Any = build(library, shape).eval().requires_grad_(False)
    if library == VITRAIL:
        predictor = predictor_of(model, shape, pixels)
        return lambda _: lambda: predictor.outputs(pixels)
    run: Any = torch.compile(model) if compiled else model
    mean, std = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.5)

    def step(variant: Variant) -> Any:
        with torch.inference_mode(), autocast(variant.precision):
            images = torch.from_numpy(pixels).float().div_(255).sub_(mean).div_(std)
            return logits(run(images)).float().numpy()

    return lambda variant: lambda: step(variant)


def pixels_of(shape: Shape, batch: int) -> Any:
    """Random images, (B, C, H, W) uint8."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, (batch, 3, *shape.img_size), np.uint8)


def predictor_of(model: Any, shape: Shape, pixels: Any = None) -> Any:
    """A predictor on PyTorch, or with `pixels` on the engine that a long job chooses for them on this machine."""
    import torch

    from vitrail import Predictor
    from vitrail.data.preprocess import Preprocess
    from vitrail.runs.fastest import choose
    from vitrail.tasks import Multiclass
    from vitrail.weights import Card

    task = Multiclass(tuple(map(str, range(shape.classes))))
    card = Card(model="vit", config=model.config, task=task, preprocess=Preprocess(shape.img_size, 3))
    if pixels is None:
        return Predictor.of(model, card)
    with torch.inference_mode():
        images = card.preprocess.normalise(torch.from_numpy(pixels))
        engine, _ = choose(model, f"outputs of {model.config!r}", images, task)
    return Predictor.of(model, card, engine=engine)


def limit(row: Row, _library: str, _compiled: bool) -> Callable[[Variant], Step]:
    """The four matrix products of one block, through PyTorch's linear layer or through oneDNN directly."""
    import torch
    import torch.nn.functional as F

    shape, products = row.shape, {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        products[precision] = [
            (torch.randn(row.batch * shape.tokens, inside).to(dtype), torch.randn(outside, inside).to(dtype))
            for inside, outside in block_products(shape)
        ]

    def step(variant: Variant) -> None:
        with torch.inference_mode():
            for x, weight in products[variant.precision]:
                if variant.how == "oneDNN":
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
                else:
                    F.linear(x, weight)

    return lambda variant: lambda: step(variant)


def block_products(shape: Shape) -> list[tuple[int, int]]:
    """The input and output widths of a block's linear layers: qkv, projection, and the two of the MLP."""
    w, m = shape.width, shape.mlp
    return [(w, 3 * w), (w, w), (w, m), (m, w)]


def environment(library: str, compiled: bool) -> dict[str, str]:
    """Environment variables of a library's process."""
    quiet = {"KINETO_LOG_LEVEL": "99", "PYTHONWARNINGS": "ignore"}
    if compiled:  # the time of compiling is that of the first use
        quiet["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    return quiet | ({"GOMP_SPINCOUNT": "10000"} if library == VITRAIL else {})  # as in vitrail/cli.py
