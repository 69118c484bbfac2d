"""What learns beside a model in self-supervision, such as a decoder: written, found in a source, and loaded.

A run has it in a file of its own, `decoder.safetensors`; other libraries keep it with the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from vitrail.files import atomic_write
from vitrail.models.decoder import MaeDecoder
from vitrail.models.position import sincos2d
from vitrail.tasks.objective import Objective
from vitrail.weights.card import DECODER_FILE, read_card
from vitrail.weights.formats import decoders
from vitrail.weights.key_tables import count_blocks
from vitrail.weights.recognise import recognise
from vitrail.weights.sharded import is_index
from vitrail.weights.sidecar import read_json
from vitrail.weights.sources import Source, locate, open_source
from vitrail.weights.tensors import as_float, open_tensors

# The options of `vitrail pretrain` that set the first dimension of a tensor.
_SIZES = {
    "decoder.embed.weight": "decoder_width",
    "head.mlp.0.weight": "head_width",
    "head.last_layer.parametrizations.weight.original1": "prototypes",
    "projector.0.weight": "head_width",
    "projector.6.weight": "projection",
}
_PREDICTED = ("decoder.pred.bias", "decoder.0.bias")  # as long as a patch has values, sorted before the weights
_ROUNDING = 0.01  # of positions stored in 16 bits


@dataclass(frozen=True)
class Added:
    """Modules that learnt beside an encoder."""

    method: str  # the title of its task
    state: Mapping[str, Tensor]  # by the names of `Objective.added`: "decoder.embed.weight"
    teacher: Mapping[str, Tensor]  # those of a momentum teacher
    positions: Tensor | None = None  # fixed ones of the decoder, which ours computes
    heads: int | None = None  # of the decoder's attention, where they are known
    caveat: str = ""

    @property
    def what(self) -> str:
        """In a word: decoder, head or projector."""
        return min(self.state).partition(".")[0]


def save_added(path: Path, modules: Mapping[str, nn.Module]) -> None:
    """Writes modules by name; nothing if there are none."""
    if modules:
        with atomic_write(path) as temporary:
            temporary.write_bytes(to_bytes({name: value.contiguous() for name, value in _state(modules).items()}))


def load_added(source: Source, objective: Objective, method: str) -> str:
    """Loads what learnt beside the encoder in a source into a method's objective, if it fits; returns a note."""
    modules, found = objective.added(), find_added(source)
    what = next(iter(modules))
    if found is None:
        return f"it has no {what} of {method}, so the {what} is new"
    if why := _misfit(found, method, modules):
        return f"its {found.what} was not loaded: {why}"
    for name, module in modules.items():
        module.load_state_dict(_part(found.state, name))
    for name, module in objective.followers().items():
        module.load_state_dict(_part(found.teacher, name))
    return f"{what} loaded{found.caveat}"


def left_out(source: Source) -> list[str]:
    """A note if a run has a file for pre-training only, from which nothing is loaded."""
    found = None if isinstance(source, Mapping) else _own(locate(source))
    return [] if found is None else [f"left out the {found.what}, which is in {DECODER_FILE}"]


def find_added(source: Source) -> Added | None:
    """What learnt beside the encoder in a source: a run, a file of the authors or Hugging Face, or a state dict."""
    where, path, tensors = open_source(source)
    if path is not None and _has_card(path):
        return _own(path)
    method, teacher = decoders.read(recognise(tensors, where).tensors)
    if not teacher:
        return None
    state = teacher
    if "student" in tensors.wrapped[1:]:
        _, state = decoders.read(recognise(open_source(source, "student")[2], where).tensors)
    document = {} if path is None else read_json(path.parent / "config.json")
    heads = document.get("decoder_num_attention_heads")
    raw = document.get("norm_pix_loss") is False
    return Added(
        method,
        _checked(state, where),
        _checked(teacher, where),
        positions=teacher.get(decoders.POSITIONS),
        heads=heads if isinstance(heads, int) else None,
        caveat="; it was trained to predict pixels that are not normalised by patch" if raw else "",
    )


def _checked(state: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors in float32, without positions; a UserError for values that are not finite."""
    values = {name: value for name, value in state.items() if name != decoders.POSITIONS}
    return {name: as_float(name, v, where) if v.is_floating_point() else v for name, v in values.items()}


def _own(path: Path) -> Added | None:
    """What learnt beside the model of a run, whose weights file this is."""
    file = path.with_name(DECODER_FILE)
    if not file.exists() or not _has_card(path):
        return None
    state = open_tensors(file)
    return Added(read_card(path.with_suffix(".json")).task.title, state, state)


def _has_card(path: Path) -> bool:
    return not is_index(path) and path.with_suffix(".json").exists()


def _misfit(found: Added, method: str, modules: Mapping[str, nn.Module]) -> str:
    """Why what was found does not fit these modules; empty if it does."""
    if found.method != method:
        return f"it is for {found.method}, not for {method}"
    given, wanted = dict(found.state), _state(modules)
    theirs, ours = _sizes(given), _sizes(wanted)
    others = [name for name in theirs if name in ours and theirs[name] != ours[name]]
    if others:
        flags = [f"--{name.replace('_', '-')} {theirs[name]}, not {ours[name]}" for name in others]
        return f"it needs {' and '.join(flags)}"
    for name in sorted(given.keys() | wanted.keys()):
        if name not in given or name not in wanted:
            return f"{name} is {'unexpected' if name in given else 'missing'}"
        if given[name].shape != wanted[name].shape:
            if name in _PREDICTED:
                return (
                    f"it predicts {len(given[name])} values for each patch, not {len(wanted[name])}: give the "
                    "--channels and the patch size that it was trained with"
                )
            return f"{name} is {tuple(given[name].shape)}, not {tuple(wanted[name].shape)}"
    decoder = modules.get("decoder")
    if isinstance(decoder, MaeDecoder):
        if found.heads not in (None, decoder.heads):
            return f"it has {found.heads} heads, not {decoder.heads}"
        if found.positions is not None and not _is_fixed(found.positions):
            return "its positions are not MAE's"
    return ""


def _is_fixed(positions: Tensor) -> bool:
    """Whether the positions of a decoder, with a row for the class token, are MAE's."""
    count = positions.shape[1] - 1
    side = math.isqrt(count)
    if side**2 != count:
        return False
    rows = sincos2d((side, side), positions.shape[2], endpoint=False)
    return bool((positions[0, 1:].float() - rows).abs().max() < _ROUNDING)


def _sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The options of `vitrail pretrain` that tensors were made with."""
    depth = count_blocks(state, r"decoder\.blocks\.(\d+)\.")
    sizes = {option: len(state[name]) for name, option in _SIZES.items() if name in state}
    return sizes | ({"decoder_depth": depth} if depth else {})


def _state(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}


def _part(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The state dict of a module in the state of several."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
