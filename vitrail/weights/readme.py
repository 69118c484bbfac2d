"""The README.md of a model on the Hugging Face hub, which the hub calls its model card, and its upload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vitrail.errors import UserError, shortlist
from vitrail.weights.card import Card

_CLASSES = 100  # named at most


def write_readme(folder: Path, card: Card, name: str, data: str | None = None) -> Path:
    """Writes README.md from what the card knows; `data` is the name of the training data. The licence is left open."""
    path = folder / "README.md"
    path.write_text(readme(card, name, data), encoding="utf-8")
    return path


def readme(card: Card, name: str, data: str | None = None) -> str:
    """The text of README.md: the hub's metadata, metrics, classes, preprocessing and how to use the model."""
    shown = [m for m in card.task.measures if m.name in card.metrics and card.task.telling(m.name)]
    scores = [{"type": m.name, "name": m.title, "value": round(float(card.metrics[m.name]), 6)} for m in shown]
    about: dict[str, Any] = {
        "license": "other",
        "license_name": "to-be-chosen",
        "library_name": "transformers",
        "pipeline_tag": "image-classification",
        "tags": ["vision", "vitrail", card.model],
    }
    if scores and data is not None:
        task = {"type": "image-classification"}
        results = [{"task": task, "dataset": {"type": data, "name": data}, "metrics": scores}]
        about["model-index"] = [{"name": name.rpartition("/")[2], "results": results}]
    h, w = card.preprocess.img_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (card.preprocess.mean, card.preprocess.std))
    images = card.metrics.get("images")
    where = f" on {images:,.0f} validation images" if images else ""
    trained = f", trained on {data}" if data is not None else ""
    parts = [
        f"---\n{yaml.safe_dump(about, sort_keys=False, allow_unicode=True)}---",
        f"# {name.rpartition('/')[2]}",
        f"A {card.model} for {card.task}{trained} with vitrail {card.versions.get('vitrail', '')}.".replace(" .", "."),
        "**Licence:** not chosen yet. Set `license` in the first lines of this file.",
        f"## Metrics{where}\n" + ("\n".join(_rows(card, shown)) if shown else "None were recorded."),
        f"## Classes\n{shortlist(card.classes, _CLASSES)}" if card.classes else "",
        f"## Input\n{card.preprocess.channels} channels of {h}x{w} pixels, mean {mean}, std {std}, "
        f"{card.preprocess.interpolation} resizing, centre crop of {card.preprocess.crop:g}.",
        f'## Use\n```python\nfrom transformers import pipeline\n\nclassify = pipeline("image-classification", '
        f'"{name}")\nclassify("photo.jpg")\n```\n\n```\nvitrail predict hf:{name} photo.jpg\n```',
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _rows(card: Card, shown: list[Any]) -> list[str]:
    rows = [f"| {measure.title} | {measure.text(card.metrics[measure.name], 2)} |" for measure in shown]
    return ["| metric | value |", "|---|---|", *rows]


def push(folder: Path, repository: str) -> str:
    """Uploads a folder to a repository of the hub, which is created if needed; returns its address."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(f"Pushing to {repository} needs `huggingface_hub`: pip install 'vitrail[hub]'") from error
    try:
        client = HfApi()
        address = client.create_repo(repository, exist_ok=True)
        client.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload model of vitrail")
    except Exception as error:  # it has many exception classes, and passes on those of other packages
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"{folder} is written, but could not be pushed to {repository}: {reason}. Log in with `hf auth login`, or "
            "set HF_TOKEN."
        ) from error
    return str(address)
