"""uvicorn: one process, or a supervisor that keeps several alive."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp
from uvicorn.supervisors.multiprocess import Multiprocess

from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.serve.app import create_app
from vitrail.serve.metrics import Shared
from vitrail.serve.protocol import LARGEST, LimitedProtocol
from vitrail.serve.settings import Settings

_BACKLOG = 2048  # connections that wait to be accepted
_KEEP_ALIVE = 75  # seconds; load balancers keep idle connections for 60 and expect the same of a service


def run(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM, then finishes what was accepted."""
    _log_with_time()
    bound = bind(settings.host, settings.port)
    shared = Shared([name for name, _ in settings.sources], settings.workers)
    config = configure(settings, partial(_worker, settings, shared))
    host, port = settings.host, bound.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(name for name, _ in settings.sources)
    log.info(f"Loading {names}, to serve at http://{shown}:{port} (Ctrl-C stops it).")
    if not settings.local and settings.api_key is None:
        log.warning("Anyone on the network can use this service. Protect it with --api-key or VITRAIL_API_KEY.")
    if settings.workers == 1:
        uvicorn.Server(config).run(sockets=[bound])
    else:
        logging.getLogger("uvicorn.error").setLevel(logging.INFO)  # tells of workers that died
        _Workers(config, [bound]).run()


class _Workers(Multiprocess):
    """A supervisor that takes no more connections when it ends, while its workers finish theirs."""

    def terminate_all(self) -> None:
        for bound in self.sockets:
            bound.close()
        super().terminate_all()


def configure(settings: Settings, make_app: Callable[[], ASGIApp]) -> uvicorn.Config:
    """uvicorn's settings for an application, which is made in every worker."""
    return uvicorn.Config(
        make_app,
        factory=True,
        http=LimitedProtocol,
        h11_max_incomplete_event_size=LARGEST,
        workers=settings.workers,
        log_config=None,
        access_log=False,  # ours is in `guard`
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.timeout) + 1,
        timeout_worker_healthcheck=60,  # a worker that loads a large model does not answer for a while
    )


def _worker(settings: Settings, shared: Shared) -> ASGIApp:
    """The application of a worker, which may be a new process."""
    _log_with_time()
    return create_app(settings, shared)


def bind(host: str, port: int) -> socket.socket:
    """A socket that workers share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"Cannot serve at {host}:{port}: {reason}. Choose another --port or --host.") from error
    bound.set_inheritable(True)
    return bound


def _log_with_time() -> None:
    """Log lines to stderr, with the time; those of uvicorn too. Of `multipart` none: they quote requests."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for logger in (log, logging.getLogger("uvicorn.error")):
        logger.handlers[:], logger.propagate = [handler], False
    log.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
