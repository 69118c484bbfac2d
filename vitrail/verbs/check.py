"""`vitrail check`: audits a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data import Source
    from vitrail.data.audit.findings import Audit


def check(
    data: str | Path | Source,
    *,
    run: str | Path | None = None,
    out: str | Path | None = None,
    data_dir: str | None = None,
    image_dir: str | Path | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: str | None = None,
    mask_values: str | Sequence[str] | None = None,
    max_pixels: int | None = None,
    workers: int = 2,
    device: str | None = None,
) -> Audit:
    """Audit a data set: unreadable files, duplicates, leaks between splits, wrong labels and more.

    The command exits with 1 if something would harm training. Images worth inspecting are drawn to check.png.

    Args:
        data: folder, .npz or .npy file, table, tar shards, hf:NAME or built-in data set
        run (RUN): multi-class run whose model looks for suspicious labels
        out (FOLDER): folder for check.png (default: check-<data>)
        data_dir (FOLDER): folder of the built-in data sets
        image_dir (FOLDER): folder of a table's images (default: that of the table)
        image_column (NAME): table column with the image paths (default: detected)
        label_column (NAME[,…]): table column with the labels, or several: x,y (default: detected)
        task: multiclass, multilabel, regression, masks, boxes or pairs (default: detected)
        mask_values (VALUE=CLASS[,…]): class of each value of the masks, as in 0=ground,255=nucleus
        max_pixels: pixels of the largest image to read (default: 178956970)
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
    """
    from vitrail.charts.style import save
    from vitrail.config.options import coerce_names
    from vitrail.data.audit import audit
    from vitrail.data.audit.contact_sheet import contact_sheet, sections
    from vitrail.data.audit.findings import worst_first
    from vitrail.data.images import allow_pixels
    from vitrail.device import choose_device
    from vitrail.evaluate.suspicious_labels import suspicious_labels
    from vitrail.files import atomic_write
    from vitrail.weights import open_run

    if workers < 1:
        raise UserError(f"'workers' must be at least 1, but it is {workers}.")
    device = choose_device(device)
    opened = None if run is None else open_run(run, device)  # before the images are read, which takes longer
    if max_pixels is not None:
        allow_pixels(max_pixels)
    folder = None if image_dir is None else str(image_dir)
    values = None if mask_values is None else coerce_names("mask_values", mask_values)
    result = audit(data, data_dir, workers, image_column, label_column, task, folder, values)
    if opened is not None:
        mixed = {name for finding in result.findings if finding.kind == "mixed" for name in finding.files}
        doubts = suspicious_labels(*opened, [item for item in result.items if item.name not in mixed], workers, device)
        result = replace(result, findings=worst_first([*result.findings, *doubts]))
    if not sections(result):
        return result
    place = Path(out) if out is not None else Path(f"check-{result.name}")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {place} cannot be created: {error.strerror}. Choose another --out.") from error
    with atomic_write(place / "check.png") as path:
        save(contact_sheet(result), path)
    return replace(result, sheet=place / "check.png")


def show(audit: Audit, *, json: bool = False) -> int:
    """Print the findings.

    Args:
        json: print JSON
    """
    print(dumps(audit.to_json(), indent=2) if json else audit.table())
    return 1 if audit.errors else 0
