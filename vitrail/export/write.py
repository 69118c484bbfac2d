"""Writes an exported file with the proof that it matches PyTorch, or nothing."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from vitrail.errors import UserError, shortlist
from vitrail.export import onnx, openvino, text
from vitrail.export.attention import split_qkv
from vitrail.export.int8 import measure_damage, measure_ranges
from vitrail.export.proof import Proof, prove
from vitrail.export.sample import Sample
from vitrail.files import folder_beside, move_together
from vitrail.models import Model
from vitrail.progress import log
from vitrail.runs.engine import is_installed
from vitrail.runs.exported import ExportedModel, parts
from vitrail.runs.speed import measured
from vitrail.weights import Card

FORMATS: dict[str, ModuleType] = {"onnx": onnx, "openvino": openvino}

_WORST = 5  # layers that an error names


@dataclass(frozen=True, eq=False)
class Order:
    """What to write."""

    format: Literal["onnx", "openvino"] = "onnx"
    preprocess: bool = True
    int8: bool | Literal["auto"] = False
    max_drop: float | None = None  # points
    calibration: Sample | None = None  # of int8

    @property
    def bound(self) -> float:
        """The points of accuracy that may be lost."""
        return self.max_drop if self.max_drop is not None else 0.5 if self.int8 else 0.0


def write_proven(path: Path, model: Model, card: Card, sample: Sample, order: Order, run: str | Path) -> Proof:
    """Writes a model to `path` and its proof next to it, or nothing if it loses more than it may."""
    try:
        # In a temporary folder but under the final name, which external weights refer to.
        with folder_beside(path) as folder:
            unfinished = folder / path.name
            if model.reads_text:
                text.write(unfinished, model, card)
            proof = (_int8 if order.int8 else _float32)(unfinished, model, card, sample, order)
            speeds = {"PyTorch": measured(run), FORMATS[order.format].TITLE.split()[0]: measured(unfinished)}
            proof = replace(proof, file=path, speeds={name: speed for name, speed in speeds.items() if speed})
            document = json.dumps(proof.to_json(), indent=2, ensure_ascii=False) + "\n"
            unfinished.with_name(f"{path.name}.json").write_text(document, encoding="utf-8")
            left = [file for file in parts(path) if file.name not in proof.parts]
            move_together(list(folder.iterdir()), path)
            for file in left:
                file.unlink()  # external weights of an older, larger model
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}. Choose another --out.") from error
    return proof


def _float32(path: Path, model: Model, card: Card, sample: Sample, order: Order) -> Proof:
    format = FORMATS[order.format]
    format.write(path, model, card, order.preprocess)
    proof = prove(path, model, card, sample, format.TITLE)
    if sample.targets is not None and proof.drop > order.bound + 1e-9:
        raise UserError(
            f"The exported file loses {proof.drop:.2f} points on {sample.source}, and may lose {order.bound:g} "
            "(--max-drop). No file was written."
        )
    return proof


def _int8(path: Path, model: Model, card: Card, sample: Sample, order: Order) -> Proof:
    """Quantises all layers; `auto` then leaves 1, 2, 4, … of the most damaged in float32 until the loss is allowed."""
    assert order.calibration is not None
    format, calibration = FORMATS[order.format], order.calibration
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source = Path(folder) / f"float32{format.SUFFIX}"
        format.write(source, model, card, order.preprocess)
        prove(source, model, card, sample, format.TITLE)  # so that what is measured below is the quantisation
        images = card.preprocess.normalise(torch.from_numpy(calibration.pixels))
        layers = split_qkv(model)  # those of the graph
        ranges = measure_ranges(layers, images, format.QUANTISED)
        quantise = format.quantiser(source, ExportedModel(source).input(calibration.pixels), ranges)
        kept: list[str] = []
        damage: dict[str, float] = {}
        while True:
            quantise(path, kept)
            proof = prove(path, model, card, sample, format.TITLE, int8=True)
            proof = replace(proof, kept=kept, calibrated=calibration.source)
            if proof.drop <= order.bound + 1e-9:
                return proof
            damage = damage or measure_damage(layers, images, ranges)
            more = max(2 * len(kept), 1)
            if order.int8 != "auto" or more >= len(damage):  # nothing would be left to quantise
                raise UserError(_too_much(proof, order, damage))
            kept = list(damage)[:more]
            log.info(f"int8 loses {proof.drop:.2f} points; leaving {len(kept)} of {len(damage)} layers in float32.")


def _too_much(proof: Proof, order: Order, damage: dict[str, float]) -> str:
    lost = f"{proof.drop:.2f} points" if proof.scores is not None else f"{proof.drop:.2f} % of the answers"
    worst = shortlist([f"{name} ({value:.1%})" for name, value in damage.items()], _WORST)
    way = "Raise --max-drop" if order.int8 == "auto" else "Leave them in float32 with --int8 auto, or raise --max-drop"
    return (
        f"int8 loses {lost} on {proof.source}, and may lose {order.bound:g} (--max-drop). No file was written. The "
        f"layers that hurt most, by the error of the outputs: {worst}. {way}."
    )


def need_packages(format: str, int8: bool) -> None:
    """Raises a UserError if a package needed for an export is not installed."""
    module = FORMATS[format]
    needed = (*module.MODULES, *(module.INT8_MODULES if int8 else ()))
    if missing := [name for name in needed if not is_installed(name)]:
        extra = {"openvino": "openvino", "nncf": "int8"}.get(missing[0], "export")
        raise UserError(f"Export needs {missing[0]}, which is not installed: pip install 'vitrail[{extra}]'")
