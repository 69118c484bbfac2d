"""Dynamic batching: a bounded queue, and one thread that computes what is in it.

Images of many requests are computed together, at most `max_batch` at a time. The thread takes the oldest image with
all that can be computed with it. It waits for more, up to `max_wait` seconds, only while accepted images are still
being decoded: at low load nothing waits, and at high load batches fill while the previous one is computed.

One thread for all models, because a batch uses every core that the process may use. An image keeps the version of
the model that it was accepted for, so a swap loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vitrail.progress import log
from vitrail.serve.errors import busy
from vitrail.serve.metrics import Metrics

Compute = Callable[[list[Any]], Any]  # the items of a batch to a sequence of their results


@dataclass(eq=False)
class Job:
    """An item to compute, alone or together with others of the same key."""

    key: Hashable
    item: Any
    compute: Compute
    deadline: float  # by time.monotonic
    future: Future[Any] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


class Batcher:
    """The queue and its thread. `admit` and `submit` are called by the event loop."""

    def __init__(self, max_batch: int, max_wait: float, capacity: int, metrics: Metrics):
        self._max_batch, self._max_wait, self._capacity, self._metrics = max_batch, max_wait, capacity, metrics
        self._queues: dict[Hashable, deque[Job]] = {}
        self._taken = 0  # images accepted and not yet answered
        self._coming = 0  # of those, being received or decoded
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread computes."""
        return self._thread.is_alive()

    @property
    def full(self) -> bool:
        return self._taken >= self._capacity

    def admit(self, images: int = 1) -> None:
        """Takes room for images; raises a 503 if there is none."""
        with self._changed:
            if self._closed or self._taken + images > self._capacity:
                self._metrics.add("rejected", reason="full")
                raise busy("The queue is full. Try again in a second.")
            self._taken += images
            self._coming += images
            self._metrics.set("queue", self._taken)

    def release(self, images: int, submitted: int) -> None:
        """Gives back the room of images, of which so many were submitted."""
        with self._changed:
            self._taken -= images
            self._coming -= images - submitted
            self._metrics.set("queue", self._taken)
            self._changed.notify()

    def submit(self, job: Job) -> Future[Any]:
        """Queues an admitted item."""
        with self._changed:
            self._coming -= 1
            self._queues.setdefault(job.key, deque()).append(job)
            self._changed.notify()
        return job.future

    def close(self, timeout: float) -> None:
        """Computes what is in the queue, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            jobs = [job for job in batch if self._wanted(job)]
            if not jobs:
                continue
            begun = time.monotonic()
            try:
                results = jobs[0].compute([job.item for job in jobs])
            except Exception as error:  # the batch fails, the service goes on
                if isinstance(error, MemoryError):
                    log.error("A batch does not fit in memory. Use a smaller --max-batch.")
                for job in jobs:
                    job.future.set_exception(error)
            else:
                for job, result in zip(jobs, results, strict=True):
                    job.future.set_result(result)
            self._metrics.observe("batch", len(jobs))
            self._metrics.observe("compute", time.monotonic() - begun)

    def _next(self) -> list[Job] | None:
        """The jobs to compute together; None at the end."""
        with self._changed:
            while not self._queues:
                if self._closed:
                    return None
                self._changed.wait()
            key, queue = min(self._queues.items(), key=lambda pair: pair[1][0].arrived)
            until = queue[0].arrived + self._max_wait
            while len(queue) < self._max_batch and self._coming > 0 and not self._closed:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            batch = [queue.popleft() for _ in range(min(self._max_batch, len(queue)))]
            if not queue:
                del self._queues[key]
            return batch

    def _wanted(self, job: Job) -> bool:
        """Whether anyone still waits for a job; fails those that are too late."""
        if not job.future.set_running_or_notify_cancel():
            return False
        if time.monotonic() > job.deadline:
            self._metrics.add("rejected", reason="late")
            job.future.set_exception(busy("The service is too busy to answer in time. Try again later."))
            return False
        return True
