"""Writes the HTML report of one run or several."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import UserError
from vitrail.files import atomic_write, open_regular, reading
from vitrail.report.compare import comparison_page
from vitrail.report.facts import load_facts
from vitrail.report.page import run_page
from vitrail.runs.run import Run

_SUBJECT = re.compile(r'<meta name="vitrail-report" content="([^"]*)">')


def write_report(
    folders: Sequence[Path], out: str | Path | None, batch_size: int, workers: int, device: str | None
) -> Path:
    """Writes the page and returns its path. Only an older report of the same runs is replaced."""
    path = _place(folders, out)
    subject = ", ".join(folder.resolve().name for folder in folders)
    own = out is None and len(folders) == 1
    _check(path, None if own else subject)
    if len(folders) == 1 and (folds := _folds(folders[0])):
        folders = folds
    facts = [load_facts(folder, batch_size, workers, device) for folder in folders]
    text = run_page(facts[0], workers) if len(facts) == 1 else comparison_page(facts, subject)
    _make_folder(path.parent)
    with atomic_write(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))  # file names may be undecodable
    return path


def _place(folders: Sequence[Path], out: str | Path | None) -> Path:
    """The path of the page."""
    if out is None:
        return Run(folders[0] if len(folders) == 1 else Path()).report_file
    return Path(out) if str(out).lower().endswith((".html", ".htm")) else Run(out).report_file


def _make_folder(folder: Path) -> None:
    """Creates the folder of the page, once there is something to write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be created: {error.strerror}. Choose another --out.") from error


def _check(path: Path, subject: str | None) -> None:
    """Raises a UserError if the file exists and is not a report of the same runs."""
    if not path.exists():
        return
    with reading(path, "a vitrail report"), open_regular(path) as stream:
        match = _SUBJECT.search(stream.read(2**16).decode(errors="replace"))
    if match is None:
        raise UserError(f"{path} exists and is not a vitrail report. Choose another --out.")
    if subject is not None and html.unescape(match[1]) != subject:
        raise UserError(
            f"{path} is the report of other runs: {html.unescape(match[1])}. Choose another --out, or delete it."
        )


def _folds(run: Path) -> list[Path]:
    """The folds of a cross-validation, in order; empty for an ordinary run."""
    if not Run(run).has_folds:
        return []
    begun = [fold.path for fold in Run(run).folds]
    if not begun:
        raise UserError(f"There is nothing to report: no fold of {run} has started yet.")
    return begun
