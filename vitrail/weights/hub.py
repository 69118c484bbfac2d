"""Weights from the Hugging Face hub: `timm:NAME` and `hf:REPO`, with its cache and offline mode.

`hf:REPO@REVISION` selects a branch, tag or commit.
"""

from __future__ import annotations

from pathlib import Path

from vitrail.config.habits import timm_tag
from vitrail.data.download import answers
from vitrail.errors import UserError, shortlist
from vitrail.weights.sharded import INDEXES, is_index, shard_files

PREFIXES = ("timm:", "hf:")

_WEIGHTS = ("model.safetensors", INDEXES[0], "pytorch_model.bin", INDEXES[1])
_SIDECARS = ("config.json", "preprocessor_config.json")


def is_hub(source: str) -> bool:
    """Whether a source is a name of the hub: with a prefix, or timm's own name of a model where no such file exists."""
    bare = timm_tag(source.partition(".")[0]) is not None and not Path(source).exists()
    return source.startswith(PREFIXES) or bare


def full_name(source: str) -> str:
    """A name of the hub in full: `vit_tiny_patch16_224` is `timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k`."""
    kind, _, name = source.rpartition(":") if source.startswith(PREFIXES) else ("timm", "", source)
    if kind != "timm" or not name:
        return source
    plain, at, revision = name.partition("@")
    tag = None if "." in plain else timm_tag(plain)
    return f"timm:{plain}{f'.{tag}' if tag else ''}{at}{revision}"


def fetch(source: str) -> Path:
    """The cached weights file of a repository, with its sidecar files; downloads what is missing."""
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f"{source}: the hub needs `huggingface_hub`: pip install 'vitrail[hub]'") from error
    kind, _, name = full_name(source).partition(":")
    name, _, revision = name.partition("@")
    if not name or source.endswith("@"):
        raise UserError(f"'{source}' has no name. Write hf:OWNER/NAME, or timm:NAME for weights of timm.")
    repository = f"timm/{name}" if kind == "timm" else name
    online: bool | None = None  # asked once, when a file is not in the cache

    def get(file: str) -> Path | None:
        nonlocal online
        try:
            cached = huggingface_hub.try_to_load_from_cache(repository, file, revision=revision or None)
            if cached is not None:  # a path, or a marker that the repository has no such file
                return Path(cached) if isinstance(cached, str) else None
            if online is None:
                online = not constants.HF_HUB_OFFLINE and answers(constants.ENDPOINT)
            if not online:
                return None
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision or None))
        except LocalEntryNotFoundError:  # the connection broke
            online = False
        except EntryNotFoundError:
            pass
        except Exception as error:  # it has many exception classes, and passes on those of other packages
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UserError(f"{source} cannot be downloaded from the hub: {reason}.") from error
        return None

    weights = next((path for path in map(get, _WEIGHTS) if path), None)
    shards = sorted(set(shard_files(weights).values())) if weights and is_index(weights) else []
    missing = [shard for shard in shards if get(shard) is None]
    if (weights is None or missing) and online is False:
        what = f"{len(missing)} of {len(shards)} shards of {source} are" if missing else f"{source} is"
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise UserError(
            f"{what} not in the cache of `huggingface_hub`, and {why}. Load it once while online, or give the path of "
            "a file."
        )
    if weights is None:
        raise UserError(f"{source} has no weights: it must have {' or '.join(_WEIGHTS)}.")
    if missing:
        raise UserError(f"{source} is incomplete: its {weights.name} lists {shortlist(missing, 4)}.")
    for file in _SIDECARS:
        get(file)
    return weights
