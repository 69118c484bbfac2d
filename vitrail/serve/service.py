"""The life of a request: room in the queue, body, images, pixels, batch, answer; within a time limit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from starlette.requests import Request

from vitrail.data.images import Pixels
from vitrail.progress import log
from vitrail.runs.predictor import answer
from vitrail.serve.batcher import Batcher, Compute, Job
from vitrail.serve.decode import decode
from vitrail.serve.errors import ApiError, busy
from vitrail.serve.metrics import Metrics, Shared
from vitrail.serve.models import Models, Version, is_exported
from vitrail.serve.settings import Settings
from vitrail.serve.uploads import Memory, Upload, parse, read_body
from vitrail.tasks.task import Answer

T = TypeVar("T")

_BODIES = 8  # of the largest size that may be in memory at a time


class Gone(Exception):
    """The client has closed the connection."""


class Service:
    """All that a worker process holds: models, queue, threads, metrics."""

    def __init__(self, settings: Settings, shared: Shared):
        self.settings, self._shared = settings, shared
        self.metrics = Metrics(shared)
        self.models = Models(settings, self.metrics)
        self.batcher = Batcher(settings.max_batch, settings.max_wait_ms / 1000, settings.queue, self.metrics)
        self._memory = Memory(_BODIES * settings.max_bytes)
        self._readers = ThreadPoolExecutor(_cores(), thread_name_prefix="decode")
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads the models, then watches their files."""
        await asyncio.to_thread(self._load)
        self._watch = asyncio.create_task(self._keep_current())

    async def stop(self) -> None:
        """Computes what was accepted, then ends the threads."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self.batcher.close, self.settings.timeout)
        self._readers.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        return bool(self.models.current) and self.batcher.alive and not self.batcher.full

    @asynccontextmanager
    async def accept(self, request: Request) -> AsyncIterator[Accepted]:
        """The images of a request. Raises ApiError, also if it takes longer than the time limit."""
        accepted = Accepted(self, request, time.monotonic() + self.settings.timeout)
        self.batcher.admit()
        try:
            with anyio.fail_after(self.settings.timeout):
                await accepted.read()
                yield accepted
        except TimeoutError:
            if not accepted.uploads:
                raise ApiError(408, "slow_request", "The request was not received in time.") from None
            self.metrics.add("rejected", reason="late")
            raise busy("The service is too busy to answer in time. Try again later.") from None
        finally:
            self.batcher.release(accepted.admitted, accepted.submitted)
            self._memory.give(accepted.size)

    async def body(self, request: Request) -> bytes:
        return await read_body(request, self.settings.max_bytes, self._memory)

    async def read_in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work in the threads that decode images."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *arguments)

    def _load(self) -> None:
        with self._shared.loading():
            if self.settings.workers > 1:
                _share_cores(self.settings.workers, self.settings.sources)
            self.models.load()

    async def _keep_current(self) -> None:
        while True:
            await asyncio.sleep(self.settings.reload or 2.0)
            self.metrics.measure_memory()
            if self.settings.reload:
                try:
                    await asyncio.to_thread(self.models.refresh)
                except Exception:  # the service goes on with what it has
                    log.exception("The models could not be checked for new versions.")


class Accepted:
    """A request with room in the queue."""

    def __init__(self, service: Service, request: Request, deadline: float):
        self._service, self._request, self._deadline = service, request, deadline
        self.uploads: list[Upload] = []
        self.admitted, self.submitted, self.size = 1, 0, 0

    async def read(self) -> None:
        """Receives the body and takes room for its images."""
        body = await self._service.body(self._request)
        self.size = len(body)
        self.uploads = await parse(self._request.headers, body, self._service.settings.max_images)
        if more := len(self.uploads) - 1:
            self._service.batcher.admit(more)
            self.admitted += more

    async def compute(self, version: Version, kind: str) -> list[Any]:
        """The outputs or features of every image, in order."""
        compute = {"outputs": version.outputs, "features": version.features}[kind]
        results = await self._while_connected(
            asyncio.gather(
                *(self._one(version, upload, (version, kind), compute) for upload in self.uploads),
                return_exceptions=True,
            )
        )
        for number, result in enumerate(results, 1):
            if isinstance(result, ApiError) and len(results) > 1:
                raise result.of_image(number)
            if isinstance(result, BaseException):
                raise result
        self._service.metrics.add("images", len(results), model=version.name)
        return list(results)

    async def answers(
        self, version: Version, outputs: Sequence[Any], top: int | None, threshold: float | None
    ) -> list[Answer]:
        """The answers of all images; those with a picture take time, so a thread computes them."""
        task, work = version.predictor.card.task, self._service.read_in_thread
        pairs = zip(self.uploads, outputs, strict=True)
        if not task.annotated:
            return [answer(task, row, top, threshold) for _, row in pairs]
        return [await work(answer, task, row, top, threshold, upload.placement) for upload, row in pairs]

    async def compute_one(self, version: Version, work: Callable[[Pixels], T]) -> T:
        """The result of other work on the only image, computed alone."""
        if len(self.uploads) > 1:
            raise ApiError(422, "one_image", f"Send one image to this address, not {len(self.uploads)}.")
        done = await self._while_connected(
            asyncio.ensure_future(self._one(version, self.uploads[0], object(), lambda items: [work(items[0])]))
        )
        self._service.metrics.add("images", model=version.name)
        return done

    async def _one(self, version: Version, upload: Upload, key: Any, compute: Compute) -> Any:
        service = self._service
        most = service.settings.max_pixels
        pixels, upload.placement = await service.read_in_thread(decode, version.predictor, upload.content, most)
        self.submitted += 1
        return await asyncio.wrap_future(service.batcher.submit(Job(key, pixels, compute, self._deadline)))

    async def _while_connected(self, work: asyncio.Future[T]) -> T:
        """The result of work, which is cancelled if the client closes the connection."""
        leaving = asyncio.ensure_future(_disconnected(self._request.receive))
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Gone
            return work.result()
        finally:
            leaving.cancel()
            work.cancel()
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else asks for it


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share_cores(workers: int, sources: Sequence[tuple[str, str]]) -> None:
    """Gives each worker its share of the cores, unless only exported files are served."""
    if all(is_exported(source) for _, source in sources):
        return
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
