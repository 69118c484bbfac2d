"""Weights of the Hugging Face hub by name: `timm:NAME` and `hf:REPO`, through its cache and offline mode."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import UserError

PREFIXES = ("timm:", "hf:")

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SETTINGS = ("config.json", "preprocessor_config.json")


def is_hub(source: str) -> bool:
    return source.startswith(PREFIXES)


def fetch(source: str) -> Path:
    """The weights file of a repository, in the cache, with its settings beside it."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f"{source}: weights of the hub need 'huggingface_hub': pip install 'vitrail[hub]'") from error
    kind, _, name = source.partition(":")
    if not name:
        raise UserError(f"'{source}' names no weights: write hf:OWNER/NAME, or timm:NAME for one of timm's.")
    repository = f"timm/{name}" if kind == "timm" else name
    found: dict[str, Path] = {}
    away = False
    for file in (*_WEIGHTS, *_SETTINGS):
        if file == _WEIGHTS[1] and _WEIGHTS[0] in found:
            continue
        try:
            found[file] = Path(huggingface_hub.hf_hub_download(repository, file))
        except LocalEntryNotFoundError:
            away = True
        except EntryNotFoundError:
            pass
        except Exception as error:  # it has a class of its own for nearly every mistake, and passes others' on
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UserError(f"{source} cannot be had from the hub: {reason}.") from error
    weights = [found[file] for file in _WEIGHTS if file in found]
    if not weights and away:
        raise UserError(
            f"{source} cannot be had: it is not in the cache of 'huggingface_hub', and the hub cannot be reached. "
            "Load it once where there is a network, or give the path of a file."
        )
    if not weights:
        raise UserError(f"{source} has neither {' nor '.join(_WEIGHTS)}: it holds no weights in one file.")
    return weights[0]
