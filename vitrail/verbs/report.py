"""`vitrail report`: writes an HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from vitrail.errors import UserError


def report(
    runs: Sequence[str | PathLike[str]] | str | PathLike[str],
    *,
    out: str | Path | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
) -> Path:
    """Write a self-contained HTML report of a run, or a comparison of several.

    The report of a cross-validation compares its folds. An older report of the same runs is replaced; any other file is
    left alone. Returns the path of the page.

    Args:
        runs (RUN): run folder, or several to compare
        out (FILE): .html file, or folder for report.html (default: in the run; comparisons: the current folder)
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
    """
    from vitrail.progress import log_to_console
    from vitrail.report.write import write_report

    log_to_console()
    folders = [Path(runs)] if isinstance(runs, str | PathLike) else [Path(run) for run in runs]
    if not folders:
        raise UserError("No run was given. Give one, or several to compare.")
    return write_report(folders, out, batch_size, workers, device)


def show(page: Path) -> int:
    """Print the path of the page."""
    print(f"The report is {page}")
    return 0
