"""Weights of the Hugging Face hub by name: `timm:NAME` and `hf:REPO`, through its cache and offline mode.

A branch, a tag or a commit may follow: `hf:REPO@REVISION`.
"""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import UserError, some
from vitrail.weights.sharded import INDEXES, files_of, is_index

PREFIXES = ("timm:", "hf:")

_WEIGHTS = ("model.safetensors", INDEXES[0], "pytorch_model.bin", INDEXES[1])
_SETTINGS = ("config.json", "preprocessor_config.json")


def is_hub(source: str) -> bool:
    return source.startswith(PREFIXES)


def fetch(source: str) -> Path:
    """The weights file of a repository, in the cache, with its settings beside it; what is not there is downloaded."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f"{source}: weights of the hub need 'huggingface_hub': pip install 'vitrail[hub]'") from error
    kind, _, name = source.partition(":")
    name, _, revision = name.partition("@")
    if not name or source.endswith("@"):
        raise UserError(f"'{source}' names no weights: write hf:OWNER/NAME, or timm:NAME for one of timm's.")
    repository = f"timm/{name}" if kind == "timm" else name
    away = False  # found out once: every attempt is repeated for half a minute

    def get(file: str) -> Path | None:
        nonlocal away
        try:
            cached = huggingface_hub.try_to_load_from_cache(repository, file, revision=revision or None)
            if cached is not None:  # a path, or a mark that the repository has no such file
                return Path(cached) if isinstance(cached, str) else None
            if away:
                return None
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision or None))
        except LocalEntryNotFoundError:
            away = True
        except EntryNotFoundError:
            pass
        except Exception as error:  # it has a class of its own for nearly every mistake, and passes others' on
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UserError(f"{source} cannot be had from the hub: {reason}.") from error
        return None

    weights = next((path for path in map(get, _WEIGHTS) if path), None)
    parts = sorted(set(files_of(weights).values())) if weights and is_index(weights) else []
    missing = [part for part in parts if get(part) is None]
    if (weights is None or missing) and away:
        what = f"{len(missing)} of its {len(parts)} parts are" if missing else "it is"
        why = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise UserError(
            f"{source} cannot be had: {what} not in the cache of 'huggingface_hub', and {why}. "
            "Load it once where there is a network, or give the path of a file."
        )
    if weights is None:
        raise UserError(f"{source} has neither {' nor '.join(_WEIGHTS)}: it holds no weights that can be read.")
    if missing:
        raise UserError(f"{source} lacks {some(missing, 4)}, of which its {weights.name} speaks.")
    for file in _SETTINGS:
        get(file)
    return weights
