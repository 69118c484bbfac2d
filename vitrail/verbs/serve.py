"""`vitrail serve`: an HTTP service with a web page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import UserError
from vitrail.runs import EngineName


def serve(
    models: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    api_key: str | None = None,
    max_batch: int = 16,
    max_wait_ms: float = 5.0,
    queue: int = 256,
    timeout: float = 30.0,
    max_mb: float = 32.0,
    max_megapixels: float = 50.0,
    max_images: int = 32,
    reload: float = 2.0,
    device: str | None = None,
    engine: EngineName = "auto",
) -> None:
    """Serve models over HTTP, with a web page to try them.

    Requests are computed together in batches. The page is at /, the API is documented at /docs. Ctrl-C finishes what
    was accepted, then stops. If the files of a model change, the new version is loaded and swapped in.

    Args:
        models (NAME=RUN): run folders, weights files or exported files, each with a name if it needs one
        host: address to listen at; 0.0.0.0 opens the service to the network
        port: port to listen at; 0 chooses a free one
        workers: processes, which share the cores; one that dies is replaced
        api_key: key that requests must carry (default: VITRAIL_API_KEY, or none)
        max_batch: most images computed together
        max_wait_ms: longest wait for more images while others are being decoded, in milliseconds
        queue: most images accepted per process; beyond, requests get 503
        timeout: seconds after which a request is given up
        max_mb: largest body of a request, in MiB
        max_megapixels: largest image
        max_images: most images per request
        reload: seconds between two looks for a new version of the files; 0 never looks
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
        engine: program that computes PyTorch models on a CPU; auto tests at the start which is the fastest
    """
    from vitrail.serve.settings import Settings, key_from_environment, named_sources

    settings = Settings(
        sources=named_sources([models] if isinstance(models, str | Path) else models),
        host=host,
        port=port,
        workers=workers,
        api_key=key_from_environment(api_key),
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        queue=queue,
        timeout=timeout,
        max_mb=max_mb,
        max_megapixels=max_megapixels,
        max_images=max_images,
        reload=reload,
        device=device,
        engine=engine,
    )
    try:
        from vitrail.serve.server import run
    except ImportError as error:
        raise UserError("Serving needs FastAPI and uvicorn: pip install 'vitrail[serve]'") from error
    from vitrail.runs.predictor import source_card

    for _, source in settings.sources:
        source_card(source)  # before a process starts
    run(settings)


def show(_: None) -> int:
    """Nothing is left to print."""
    return 0
