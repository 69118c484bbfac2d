"""Lists all images of a data set for the audit, readable or not, without holding any out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.audit.findings import Finding, Item
from vitrail.data.builtin import BUILT_IN
from vitrail.data.dataset import Found
from vitrail.data.folder import files_below, is_image, split_folders, subfolders
from vitrail.data.images import image_format
from vitrail.data.sources import Source, folder_kind, is_object, open_annotated, open_source, with_captions
from vitrail.errors import UserError
from vitrail.tasks import task_type


def scan(
    source: Source,
    data_dir: str | None,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    task: str | None,
    image_dir: str | None = None,
    mask_values: Sequence[str] | None = None,
) -> tuple[str, str, list[Item], list[Finding], bool]:
    """The data's name, the prefix of its file names, its images, findings on the layout, if images have one class."""
    path = Path() if is_object(source) else Path(source).expanduser()
    columns = image_column is not None or label_column is not None
    built_in = isinstance(source, str) and source in BUILT_IN
    kind = None if task is None else task_type(task)
    if not is_object(source) and path.is_dir() and not columns:
        try:
            annotated = open_annotated(source, kind, mask_values)
        except UserError as error:
            return path.resolve().name, f"{path}/", [], [Finding("annotation", "error", str(error))], False
        if annotated is not None:
            return annotated.name, f"{path}/", *_listed(annotated), False
    if not is_object(source) and path.is_dir() and not columns and not built_in and folder_kind(path) == "classes":
        return path.resolve().name, f"{path}/", *_walk(path), True
    found = open_source(
        source, data_dir, image_column, label_column, kind, verify=False, image_dir=image_dir, mask_values=mask_values
    )
    found = with_captions(found, kind)
    items, findings = _listed(found)
    return found.name, f"{path.parent}/" if path.is_file() else "", items, findings, found.task.single


def _listed(found: Found) -> tuple[list[Item], list[Finding]]:
    """The images of a data set, and what is wrong with its annotations."""
    items = []
    for title, (stored, targets) in found.parts.items():
        split = found.make(title, stored, targets)
        for i, (label, labels) in enumerate(found.task.describe(split.targets)):
            items.append(Item(split.name(i), title, label, labels, split.source(i)))
    findings = [Finding("unreadable", "error", reason, (name,)) for name, reason in found.unreadable]
    findings += [Finding(problem.kind, "note", problem.detail, (problem.file,)) for problem in found.problems]
    everything = np.concatenate([targets for _, targets in found.parts.values()])
    names = [item.name for item in items]
    for problem, severity, detail, numbers in found.task.audit(everything):
        findings.append(Finding(problem, severity, detail, tuple(names[i] for i in numbers)))
    return items, findings


def _walk(root: Path) -> tuple[list[Item], list[Finding]]:
    items: list[Item] = []
    findings: list[Finding] = []

    def unlisted(error: OSError) -> None:
        findings.append(Finding("unreadable", "error", error.strerror or "", (str(error.filename),)))

    try:
        folders = split_folders(root)
    except UserError as error:
        return [], [Finding("layout", "error", str(error))]
    for split, folder in folders.items():
        loose = tuple(sorted(str(child) for child in folder.iterdir() if child.is_file() and is_image(child)))
        classes = subfolders(folder)
        if loose and classes:
            findings.append(Finding("loose", "note", f"{len(loose)} in {folder}", loose))
        elif loose:
            findings.append(Finding("layout", "error", f"{folder} has images but no class folders", loose))
        elif not classes and len(folders) > 1:
            findings.append(Finding("layout", "error", f"the {split} split has no images", (str(folder),)))
        for child in classes:
            files = sorted(files_below(child, unlisted), key=Path.as_posix)
            images = [path for path in files if is_image(path)]
            items += [Item(str(path), split, child.name, (child.name,), path) for path in images]
            if not images:
                findings.append(Finding("layout", "error", "the class folder has no images", (str(child),)))
            for path in files:
                if not is_image(path) and (kind := image_format(path)):
                    detail = f"{kind}, but files with the extension '{path.suffix}' are skipped"
                    findings.append(Finding("extension", "note", detail, (str(path),)))
    return items, findings
