"""`vitrail evaluate`: measures a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.config import InputConfig, Size, coerce
from vitrail.config.options import coerce_names
from vitrail.errors import UserError
from vitrail.files import check_writable
from vitrail.runs import EngineName
from vitrail.world import World, world

if TYPE_CHECKING:
    from torch import nn

    from vitrail.data import Source
    from vitrail.data.preprocess import Preprocess
    from vitrail.evaluate.probes import FewShotMetrics, ProbeMetrics
    from vitrail.evaluate.real import RealScores
    from vitrail.tasks.scores import Scores
    from vitrail.weights import Card

Method = Literal["head", "knn", "linear", "fewshot", "zeroshot"]

_CHOICES: dict[Method, tuple[str, ...]] = {  # the options of each method
    "head": (),
    "knn": ("k",),
    "linear": ("seed",),
    "fewshot": ("shots", "draws", "seed"),
    "zeroshot": ("templates",),
}


def evaluate(
    run: str | PathLike[str] | nn.Module,
    data: str | Path | Source | None = None,
    *,
    method: Method = "head",
    split: str | None = None,
    k: int | None = None,
    shots: Sequence[int] | None = None,
    draws: int | None = None,
    seed: int | None = None,
    templates: Sequence[str] | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
    data_dir: str | None = None,
    image_dir: str | Path | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    mask_values: str | Sequence[str] | None = None,
    img_size: str | int | Size | None = None,
    real: str | Path | None = None,
    out: str | Path | None = None,
    preprocess: Preprocess | None = None,
) -> Scores | ProbeMetrics | FewShotMetrics | RealScores:
    """Measure a run's predictions by the metrics of its task, or its features by a probe.

    Metrics, tables and figures are written to a folder. The method head measures the model's own predictions, on data
    with its classes. knn, linear and fewshot fit a classifier to the features of the train split; the data may have any
    classes. zeroshot classifies by the names of the classes, with a model trained on captions. With --real, ImageNet's
    validation images are measured by ImageNet-ReaL: any of several labels is right. In Python, the data may also be
    objects, and the model a module, with its `preprocess`; then nothing is written, unless `out` is given.

    Args:
        run: run folder or weights file
        data: data set to evaluate on (default: the run's own)
        method: what to measure: predictions (head), features by a probe, or classification by words (zeroshot)
        split (NAME): train, val or test (default: val; of other data val, else test, else all)
        k: neighbours of knn (default: 20)
        shots: training images per class of fewshot (default: 1 5 10)
        draws: random draws of fewshot (default: 5)
        seed: random seed of few-shot draws and linear's hold-out (default: 0)
        templates: texts to put the class names into, averaged, of zeroshot (default: "a photo of a {}.")
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
        engine: program that computes the model on a CPU; auto tests in a long job which is the fastest
        data_dir (FOLDER): folder of the built-in data sets
        image_dir (FOLDER): folder of a table's images (default: as trained, or that of the table)
        image_column (NAME): table column with the image paths (default: as trained, or detected)
        label_column (NAME[,…]): table column with the labels, or several: x,y (default: as trained, or detected)
        mask_values (VALUE=CLASS[,…]): class of each value of the masks (default: as trained)
        img_size (H[xW]): resize images to this; position embeddings are resampled (default: the model's size)
        real (FILE): real.json of ImageNet-ReaL, the right labels of each of ImageNet's validation images
        out (FOLDER): folder for metrics and figures (default: RUN/evaluation/<data>-<split>[-<method>])
    """
    from vitrail.data import open_data
    from vitrail.evaluate.measure import classify_on, evaluate_on, probe_on, run_data
    from vitrail.runs.predictor import source_card
    from vitrail.runs.run import Run

    World.join()
    if not isinstance(run, str | PathLike):
        if method != "head":
            raise UserError(f"--method {method} needs a run or a weights file, but got a {type(run).__name__}.")
        if any(value is not None for value in (image_dir, mask_values, img_size, real)) or engine != "auto":
            raise UserError(
                "'image_dir', 'mask_values', 'img_size', 'engine' and 'real' need a run or weights file, not a module."
            )
        from vitrail.evaluate.module import evaluate_module

        columns = {"data_dir": data_dir, "image_column": image_column, "label_column": label_column}
        measured = {"batch_size": batch_size, "workers": workers}
        return evaluate_module(run, data, split, columns, preprocess, **measured, device=device, out=out)
    run = run if isinstance(run, str) else Path(run)
    if preprocess is not None:
        raise UserError(f"'preprocess' is for model objects; {run} has its own.")
    check_writable(Run.of(run).path if out is None else Path(out))
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "device": device, "engine": engine, "out": out}
    if real is not None:
        from vitrail.evaluate.real import evaluate_real

        probes = (k, shots, draws, seed, templates)
        opening = (split, img_size, data_dir, image_dir, image_column, label_column, mask_values)
        if method != "head" or any(value is not None for value in (*probes, *opening)):
            raise UserError("--real measures predictions on ImageNet's validation images. Remove the other options.")
        return evaluate_real(run, data, real, **how)
    card, home = source_card(run) if method == "head" else _card(run, method), Run.of(run).path
    where: dict[str, Any] = {"data_dir": data_dir, "image_column": image_column, "label_column": label_column}
    where |= {"image_dir": None if image_dir is None else str(image_dir)}
    where |= {"mask_values": None if mask_values is None else coerce_names("mask_values", mask_values)}
    chosen = _chosen(method, {"k": k, "shots": shots, "draws": draws, "seed": seed, "templates": templates})
    how["img_size"] = None if img_size is None else coerce(InputConfig, "img_size", img_size)
    if method == "head":
        opened = world().in_turn(lambda: run_data(home, data, where, card, {"model": card.task}))
        return evaluate_on(run, opened, split, **how)
    if method == "zeroshot":
        if data is None:
            raise UserError(f"--method zeroshot needs labelled data: vitrail evaluate {run} LABELLED --method zeroshot")
        opened = world().in_turn(lambda: open_data(data, **where))
        return classify_on(run, opened, split, **how, **chosen)
    if data is None and not card.task.labelled:
        raise UserError(
            f"{run} was pre-trained without labels, so its own data has none to measure with. Give labelled data: "
            f"vitrail evaluate {run} LABELLED --method {method}"
        )
    # Not by the seed: the same images are always held out, so results are comparable and cached features stay valid.
    opened = world().in_turn(lambda: run_data(home, data, where, card, {}))
    return probe_on(run, opened, method, split, **how, **chosen)


def _card(run: str | Path, method: str) -> Card:
    """The card of a model with features."""
    from vitrail.runs.exported import is_exported
    from vitrail.weights import open_card

    if is_exported(run):
        raise UserError(
            f"{run} is an exported file, which has no feature vectors. Use the run it was exported from, or leave out "
            f"--method {method}."
        )
    return open_card(run)


def show(metrics: Scores | ProbeMetrics | FewShotMetrics | RealScores, *, json: bool = False) -> int:
    """Print the metrics.

    Args:
        json: print JSON
    """
    if not world().first():
        return 0
    if json and metrics.folder is not None:
        print((metrics.folder / "metrics.json").read_text(encoding="utf-8"), end="")
    else:
        print(metrics.table())
    return 0


def _chosen(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method; an option of another method raises UserError."""
    if method not in _CHOICES:
        raise UserError(f"'method' must be one of {', '.join(_CHOICES)}, but it is '{method}'.")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in _CHOICES[method]:
            methods = [other for other, names in _CHOICES.items() if name in names]
            raise UserError(f"'{name}' applies to --method {' or '.join(methods)}, but the method is {method}.")
    return dict(given)
