"""Several processes as one `World`: gloo between CPUs, NCCL between GPUs, DDP and FSDP2 of PyTorch.

Processes have equal shares of each batch, so a mean over a batch is the mean of their means, and DDP's average of
gradients is the gradient of the whole batch. What is not a mean over images asks for `total`, `average`, `count` or
`gathered`.
"""

from __future__ import annotations

import atexit
import copy
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vitrail.errors import UserError, explained
from vitrail.world import M, Shard, World, alone
from vitrail.world.heartbeat import Heartbeat
from vitrail.world.shards import write
from vitrail.world.tensors import mapped

T = TypeVar("T")

TIMEOUT = 600.0  # seconds after which a process that does not answer is given up; $VITRAIL_TIMEOUT
_RESTART = "With --max-restarts, torchrun starts all of them again, and training goes on from the last checkpoint."
_LOST = ("gloo", "NCCL", "Connection", "Timed out", "Broken pipe")  # in the errors of torch.distributed
_PATIENT = timedelta(days=7)  # for a process that downloads or decodes for all, as long as it has a heartbeat


class Elsewhere(UserError):
    """An error of another process, which has reported it."""


class _Silent(Exception):
    """The rank of a process without a heartbeat."""


class Processes(World):
    """The processes that torchrun has started. Every one of them calls each method, in the same order."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._place = int(os.environ.get("LOCAL_RANK", self.rank))  # among the processes of this machine
        self._views = 1
        self._plain: Any = None  # the objective before it was sharded, without its weights
        self._timeout = float(os.environ.get("VITRAIL_TIMEOUT", TIMEOUT))
        timeout = timedelta(seconds=self._timeout)
        gpus = torch.cuda.device_count()
        if gpus:
            if self._place >= gpus:
                raise UserError(
                    f"Each process needs a GPU of its own, but this machine has {gpus} for at least {self._place + 1} "
                    f"processes. Use torchrun --nproc-per-node {gpus}."
                )
            torch.cuda.set_device(self._place)  # what "cuda" means from here on
        self._store = self._meet()
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout)
        self._waiting = dist.new_group(backend="gloo", timeout=_PATIENT)
        self._control = dist.new_group(backend="gloo", timeout=timeout)  # does not wait for a GPU
        self._saving = dist.new_group(backend="gloo", timeout=_PATIENT)  # of the thread that writes checkpoints
        atexit.register(dist.destroy_process_group)  # NCCL asks for it
        Heartbeat(self._store, self.rank, self.size, self._timeout, self._give_up)
        # A machine that replaces another one has not been started before.
        (self.restarted,) = self.agree(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)

    def first(self) -> bool:
        return self.rank == 0

    def _meet(self) -> Any:
        """A store for this start of the processes, once all of them are there.

        torchrun keeps its store when it starts them again, with the addresses of those before. So each process asks
        under a new name, and the first one answers with a name for this start.
        """
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT)))
        store.set_timeout(timedelta(seconds=TIMEOUT))
        name = uuid.uuid4().hex
        if self.rank:
            store.set(f"vitrail/asks/{self.rank}", name)
            name = store.get(f"vitrail/answer/{name}").decode()
            store.set(f"vitrail/{name}/{self.rank}", "here")
            store.wait([f"vitrail/{name}/all"])
            return PrefixStore(name, store)
        late, given_up = {*range(1, self.size)}, time.monotonic() + TIMEOUT
        while late and time.monotonic() < given_up:
            for rank in [rank for rank in late if store.check([f"vitrail/asks/{rank}"])]:
                store.set(f"vitrail/answer/{store.get(f'vitrail/asks/{rank}').decode()}", name)
            late = {rank for rank in late if not store.check([f"vitrail/{name}/{rank}"])}
            time.sleep(0.02)
        if late:
            raise UserError(f"Process {min(late)} has not started after {TIMEOUT:.0f} seconds. Look at its machine.")
        store.set(f"vitrail/{name}/all", "here")
        return PrefixStore(name, store)

    def _give_up(self, rank: int) -> None:
        """Ends this process, which may wait for the other one in a function of C++; torchrun then ends all of them."""
        os._exit(self.report(_Silent(rank)))

    def speaks(self) -> bool:
        try:
            return bool(self._store.add("vitrail/errors", 1) == 1)
        except RuntimeError:  # torchrun has ended
            return False

    def explained(self, error: BaseException) -> tuple[str, int]:
        if isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST):
            return f"Another process of this command has ended or does not answer. {_RESTART}", 1
        if isinstance(error, _Silent):
            return f"Process {error} of this command has not answered for {self._timeout:g} seconds. {_RESTART}", 1
        return explained(error)

    # Batches

    def share(self, rows: Any) -> Any:
        return rows[self.rank * len(rows) // self.size : (self.rank + 1) * len(rows) // self.size]

    def part(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank * len(items) // self.size : (self.rank + 1) * len(items) // self.size]

    def drawn(self, draw: Callable[[int], Tensor], rows: int, dim: int = 0) -> Tensor:
        drawn = draw(self.size * rows)
        dim %= drawn.ndim
        each: Tensor = drawn.unflatten(dim, (self._views, self.size, -1))  # type: ignore[no-untyped-call]
        return each.select(dim + 1, self.rank).flatten(dim, dim + 1)

    @contextmanager
    def views(self, count: int) -> Iterator[None]:
        before, self._views = self._views, count
        try:
            yield
        finally:
            self._views = before

    def fetch(self, rows: Tensor, order: Tensor) -> Tensor:
        each = order.cpu().view(self.size, -1)  # the rows that every process wants
        owners, count = each // len(rows), len(rows)
        mine = [each[other][owners[other] == self.rank] - self.rank * count for other in range(self.size)]
        places = owners[self.rank].argsort(stable=True)  # rows arrive by owner
        sizes = owners[self.rank].bincount(minlength=self.size).tolist()
        arrived = torch.empty_like(rows)
        sent = rows.index_select(0, torch.cat(mine).to(rows.device)).contiguous()
        dist.all_to_all_single(arrived, sent, sizes, [len(part) for part in mine])
        return arrived.index_select(0, places.argsort().to(rows.device))

    # Statistics

    def gathered(self, rows: Tensor) -> Tensor:
        before, after = self.rank * len(rows), (self.size - self.rank - 1) * len(rows)
        padding = [rows.new_zeros(count, *rows.shape[1:]) for count in (before, after)]
        return self.total(torch.cat([padding[0], rows, padding[1]]))

    def total(self, value: Tensor) -> Tensor:
        summed: Tensor = _Sum.apply(value)  # type: ignore[no-untyped-call]
        return summed

    def average(self, value: Tensor) -> Tensor:
        return self.total(value) / self.size

    def count(self, number: Tensor) -> Tensor:
        return self.average(number.float()).clamp(min=1 / self.size)

    # Decisions and results

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        numbers = torch.tensor([*values.values()], dtype=torch.float64)
        dist.all_reduce(numbers, group=self._control)
        return dict(zip(values, (numbers / self.size).tolist(), strict=True))

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        votes = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._control)
        return tuple(bool(vote) for vote in votes)

    def every(self, thing: T, group: Any = None) -> list[T]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=group or self._control)
        return things

    def merge(self, meter: T) -> T:
        counted = {name: value for name, value in vars(meter).items() if not callable(value)}  # functions are the same
        meters: list[Any] = []
        for values in self.every(counted):
            meters.append(copy.copy(meter))
            vars(meters[-1]).update(values)
        for other in meters[1:]:
            meters[0].merge(other)
        merged: T = meters[0]
        return merged

    def once(self, act: Callable[[], T]) -> T:
        def act_alone() -> T:
            with alone():
                return act()

        return self.every(self._settled(act_alone, self.rank == 0), self._waiting)[0]  # type: ignore[return-value]

    def in_turn(self, act: Callable[[], T]) -> T:
        early = self._settled(act, self._place == 0)
        return act() if early is None else early

    def _settled(self, act: Callable[[], T], leads: bool) -> T | None:
        """The result of a process that leads; an error of one of them is an error of all."""
        result = own = None
        if leads:
            try:
                result = act()
            except Exception as error:
                own = error
        messages = self.every(None if own is None else explained(own)[0], self._waiting)
        if own is not None:
            raise own
        for message in messages:
            if message is not None:
                raise Elsewhere(message)
        return result

    # Training

    def wrap(self, objective: M) -> M:
        if self._plain is not None:
            return objective
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers` has a new name in torch 2.13
            wrapped: Any = DistributedDataParallel(
                objective,
                broadcast_buffers=False,  # statistics are shared where they are made
                find_unused_parameters=True,  # such as the last layer of DINO's head in the first steps
                gradient_as_bucket_view=True,
            )
        return wrapped

    def accumulating(self, wrapped: Any, last: bool) -> AbstractContextManager[None]:
        if self._plain is None:
            return nullcontext() if last else wrapped.no_sync()
        wrapped.set_requires_gradient_sync(last)
        return nullcontext()

    def shard(self, objective: Any, how: Shard, precision: torch.dtype | None) -> Any:
        self._plain = None
        if how == "off":
            return objective
        self._plain = _without_weights(copy.deepcopy(objective))
        mesh = self._sharded_over(how, next(objective.parameters()).device.type)
        half = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        modules = {*objective.modules()}
        stages = [stage for stage in objective.model.stages() if stage in modules] if objective.stagewise else []
        for stage in stages:  # the last one is called more than once for auxiliary losses, and needed first again
            fully_shard(stage, mesh=mesh, mp_policy=half, reshard_after_forward=stage is not stages[-1])
        # What is in no stage that is a module, such as embeddings, norms and heads, stays gathered during a step.
        fully_shard(objective, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        average = objective.parts()["kept"]
        if average is not objective.model:
            fully_shard(average, mesh=mesh, reshard_after_forward=True)
            register_fsdp_forward_method(average, "embed")  # of a momentum teacher
        return objective

    def _sharded_over(self, how: Shard, device: str) -> Any:
        """The processes that share the weights: all of them, or those of a machine."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if how == "full" or local == self.size:
            return init_device_mesh(device, (self.size,))
        return init_device_mesh(device, (self.size // local, local), mesh_dim_names=("replicate", "shard"))

    def unsharded(self, objective: Any) -> Any:
        if self._plain is None:
            return objective
        plain = copy.deepcopy(self._plain)
        filled: set[int] = set()
        for part, sharded in zip(plain.parts().values(), objective.parts().values(), strict=True):
            if part is sharded or id(part) in filled:
                continue
            filled.add(id(part))
            state = mapped(lambda _, tensor: _full(tensor), sharded.state_dict())
            if isinstance(part, nn.Module):
                part.load_state_dict(state, assign=True)
            else:
                part.load_state_dict(state)
        return plain

    def whole(self, tensor: Tensor) -> Tensor:
        return _full(tensor)

    def saved(self, state: Any) -> Any:
        def valued(_: str, tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return tensor.cpu()

        return mapped(valued, state)

    def save_shards(self, state: Any, folder: Path) -> Future[Any] | None:
        shards: dict[str, Tensor] = {}
        mapped(lambda name, tensor: shards.update({name: tensor} if isinstance(tensor, DTensor) else {}), state)
        return write(shards, folder, self._saving) if shards else None

    def layout(self, parts: Mapping[str, Any]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                tensors |= {f"{name}/{key}": value for key, value in part.state_dict().items()}
            elif isinstance(part, Optimizer):
                parameters = [p for group in part.param_groups for p in group["params"]]
                tensors |= {f"{name}/state/{i}": parameter for i, parameter in enumerate(parameters)}
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def like(self, tensor: Tensor, other: Tensor) -> Tensor:
        return _sharded(tensor, other)

    def load(self, part: Any, state: Any) -> None:
        if isinstance(part, nn.Module):
            now = part.state_dict()
            state = {name: _sharded(value, now[name]) if name in now else value for name, value in state.items()}
        part.load_state_dict(state)
        if isinstance(part, Optimizer):
            for parameter, values in part.state.items():
                alike = {name: value for name, value in values.items() if _shape(value) == parameter.shape}
                values |= {name: _sharded(value, parameter) for name, value in alike.items()}


class _Sum(torch.autograd.Function):
    """The sum over all processes. Its gradient is the sum of theirs, because every process has a part in it."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        summed = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed


def _without_weights(objective: Any) -> Any:
    """An objective whose parameters have a shape but no values."""
    for part in objective.parts().values():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            for name, parameter in module.named_parameters(recurse=False):
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                setattr(module, name, empty)
    return objective


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    mesh = like.device_mesh
    whole = DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)


def _shape(value: object) -> object:
    return value.shape if isinstance(value, Tensor) else None
