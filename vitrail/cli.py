"""The command line: one verb, one function of the same name and defaults. Nothing else happens here.

Heavy imports stay inside the verbs, so that `vitrail --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from vitrail.config import Duration, Floats, Freeze, InputConfig, Names, Size, Task, TrainConfig, coerce, options
from vitrail.errors import UserError
from vitrail.mistakes import explain as explain_mistake
from vitrail.version import VERSION

Run = Annotated[str, arg(metavar="RUN", help_behavior_hint="")]


def models(
    pattern: Positional[Annotated[str, arg(metavar="[PATTERN]", help_behavior_hint="")]] = "",
    *,
    json_: Annotated[bool, arg(name="json")] = False,
) -> int:
    """List every model with its parameters, multiply-accumulates, tokens and native size.

    Args:
        pattern: only names that contain this
        json_: print JSON
    """
    from vitrail.models import rows

    found = rows(pattern)
    if json_:
        print(json.dumps([dataclasses.asdict(row) for row in found], indent=2))
        return 0
    print(f"{'model':<16}{'parameters':>15}{'GMACs':>9}{'tokens':>8}   size")
    for row in found:
        h, w = row.img_size
        print(f"{row.name:<16}{row.params:>15,}{row.macs / 1e9:>9.2f}{row.tokens:>8}   {h}x{w}", flush=True)
    return 0


def check(
    data: Positional[Annotated[str, arg(metavar="DATA", help_behavior_hint="")]],
    *,
    run: Annotated[str | None, arg(metavar="RUN")] = None,
    out: str | None = None,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    task: Task | None = None,
    workers: int = 2,
    device: str | None = None,
    json_: Annotated[bool, arg(name="json")] = False,
) -> int:
    """Find what is wrong with a data set. Exits 1 if something would hurt a training run.

    Args:
        data: folder, .npz or .npy file, table, tar shards, hf:NAME or built-in data set
        run: trained run: labels that its model contradicts are found too
        out: folder for the sheet of pictures, check.png (default: check-<data>)
        data_dir: where built-in data sets lie
        image_column: column of a table that holds the paths of the images (default: found)
        label_column: column of a table that holds the labels, or several: x,y (default: found)
        task: multiclass, multilabel or regression (default: seen from the data)
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the best there is)
        json_: print JSON
    """
    from vitrail.evaluate.check import check

    audit = check(
        data,
        run=run,
        out=out,
        data_dir=data_dir,
        image_column=image_column,
        label_column=label_column,
        task=task,
        workers=workers,
        device=device,
    )
    print(json.dumps(audit.to_json(), indent=2) if json_ else audit.table())
    return 1 if audit.errors else 0


def evaluate(
    run: Positional[Run],
    data: Positional[Annotated[str | None, arg(metavar="[DATA]", help_behavior_hint="")]] = None,
    *,
    method: Literal["head", "knn", "linear", "fewshot"] = "head",
    split: str | None = None,
    k: int | None = None,
    shots: tuple[int, ...] | None = None,
    draws: int | None = None,
    seed: int | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    out: str | None = None,
    json_: Annotated[bool, arg(name="json")] = False,
) -> int:
    """Measure a run: accuracy, confusion and calibration, or mAP and F1, or MAE, RMSE and R², by its task.

    Args:
        run: run folder or .safetensors file
        data: data set to measure on (default: the run's own); any classes will do unless the method is head
        method: head for the model's own answers; knn, linear or fewshot for what its features are worth
        split: train, val or test (default: val; of other data val, test or everything)
        k: neighbours that vote, with knn (default: 20)
        shots: training images per class, with fewshot (default: 1 5 10)
        draws: how often they are drawn, with fewshot (default: 5)
        seed: of what fewshot draws and linear holds out (default: 0)
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the best there is)
        data_dir: where built-in data sets lie
        image_column: column of a table that holds the paths of the images (default: the run's own, or found)
        label_column: column of a table that holds the labels, or several: x,y (default: the run's own, or found)
        out: folder for metrics and figures (default: in the run)
        json_: print JSON
    """
    from vitrail.evaluate.verbs import evaluate

    result = evaluate(
        run,
        data,
        method=method,
        split=split,
        k=k,
        shots=shots,
        draws=draws,
        seed=seed,
        batch_size=batch_size,
        workers=workers,
        device=device,
        data_dir=data_dir,
        image_column=image_column,
        label_column=label_column,
        out=out,
    )
    print(json.dumps(result.to_json(), indent=2) if json_ else result.table())
    return 0


def predict(
    run: Positional[Run],
    images: Positional[Annotated[tuple[str, ...], arg(metavar="IMAGES…", help_behavior_hint="")]],
    *,
    top: int | None = None,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    format: Literal["table", "csv", "json"] = "table",
) -> int:
    """Label or measure images: files, folders or globs. Exits 1 if any could not be read.

    Args:
        run: run folder or .safetensors file
        images: files, folders, globs
        top: labels per image (default: 5, or all above their thresholds if a model gives several)
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the best there is)
        format: table, CSV, or one JSON object a line
    """
    from vitrail.evaluate.predict import predict, write

    predictions = predict(run, images, top=top, batch_size=batch_size, workers=workers, device=device)
    return 1 if write(predictions, format, sys.stdout) else 0


def embed(
    run: Positional[Run],
    images: Positional[Annotated[tuple[str, ...], arg(metavar="IMAGES…", help_behavior_hint="")]],
    *,
    out: Annotated[str, arg(metavar="FILE")],
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
) -> int:
    """Write the feature vectors of images to a file. Exits 1 if any image could not be read.

    Args:
        run: run folder or .safetensors file
        images: files, folders, globs
        out: file to write, .npz or .parquet
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the best there is)
    """
    from vitrail.evaluate.embed import embed, write

    written = write(embed(run, images, batch_size=batch_size, workers=workers, device=device), out)
    for file, error in written.unreadable:
        print(f"{file}  — unreadable: {error}")
    print(f"{written.images:,} vectors of {written.width:,} numbers are in {out}")
    return 1 if written.unreadable else 0


def explain(
    run: Positional[Run],
    images: Positional[Annotated[tuple[str, ...], arg(metavar="[IMAGES…]", help_behavior_hint="")]] = (),
    *,
    data: str | None = None,
    out: str | None = None,
    patch: Annotated[str | None, arg(metavar="ROW,COL")] = None,
    target: Annotated[str | None, arg(metavar="CLASS")] = None,
    instead: Annotated[str | None, arg(metavar="CLASS")] = None,
    format: Literal["png", "svg", "pdf"] = "png",
    save_data: bool = False,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    seed: int = 0,
    img_size: Annotated[str | None, arg(metavar="H[xW]")] = None,
) -> int:
    """Draw what a model sees: attention over pictures, what speaks for a class, positions, filters, its mistakes.

    Args:
        run: run folder or .safetensors file
        images: files, folders, globs (default: some validation images of the run's own data)
        data: data set to map, with galleries and neighbours (default: the run's own, unless images are given)
        out: folder for the figures (default: in the run)
        patch: row and column of a patch, from 0, whose attention is shown too
        target: class that is explained (default: what the model says)
        instead: class that it is set against (default: none, and the runner-up is shown beside it)
        format: of the figures
        save_data: write the arrays that figures show beside them, as .npz
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the best there is)
        seed: of the images that are drawn from the run's own data
        img_size: size that images are read at (default: that of the model, whose positions are else resampled)
    """
    from vitrail.explain.verbs import explain, parse_patch

    result = explain(
        run,
        images,
        data=data,
        out=out,
        patch=None if patch is None else parse_patch(patch),
        target=target,
        instead=instead,
        format=format,
        save_data=save_data,
        batch_size=batch_size,
        workers=workers,
        device=device,
        seed=seed,
        img_size=None if img_size is None else coerce(InputConfig, "img_size", img_size),
    )
    for file, error in result.unreadable:
        print(f"{file}  — unreadable: {error}")
    print(*result.files, *result.notes, sep="\n")
    return 1 if result.unreadable else 0


def _flags(group: str, *without: str) -> type[Any]:
    """A dataclass for the parser with the settings of one group of `TrainConfig`, each None unless it is given."""
    fields: list[Any] = []
    for option in options(TrainConfig).values():
        if option.group != group or option.name in ("data", *without):
            continue
        default = "by recipe" if option.default is dataclasses.MISSING else f"default: {option.default}"
        text = option.help if option.default in (None, False) else f"{option.help} ({default})"
        names = [option.alias] if option.alias else None
        about = arg(help=text, help_behavior_hint="", aliases=names, metavar=_metavar(option.type))
        kind: Any = str if option.type in (Size, Duration | None, Names | None, Freeze | None) else option.type
        none: Any = (bool, False) if kind is bool else (kind | None, None)
        fields.append((option.name, Annotated[none[0], about], none[1]))
    return dataclasses.make_dataclass(group or "what", fields)


def _metavar(kind: Any) -> str | None:
    """What stands behind a flag in the help: the choices, or the kind of value."""
    if kind == Freeze | None:
        return "N|all"
    kind = get_args(kind)[0] if type(None) in get_args(kind) else kind
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "INT", float: "FLOAT", Size: "H[xW]", Duration: "TIME", Floats: "FLOAT…", bool: None}.get(kind, "TEXT")


def train(
    data: Positional[Annotated[str | None, arg(metavar="[DATA]", help_behavior_hint="")]] = None,
    *,
    resume: Annotated[str | None, arg(metavar="RUN", help_behavior_hint="")] = None,
    overwrite: Annotated[bool, arg(help_behavior_hint="")] = False,
    find_lr: Annotated[bool, arg(help_behavior_hint="")] = False,
    # mypy takes no type that is made when the module is loaded: hence all that it is told to ignore here.
    what: OmitArgPrefixes[_flags("")],  # type: ignore[valid-type]
    source: OmitArgPrefixes[_flags("source")],  # type: ignore[valid-type]
    input: OmitArgPrefixes[_flags("input")],  # type: ignore[valid-type]
    arch: OmitArgPrefixes[_flags("arch")],  # type: ignore[valid-type]
    transfer: OmitArgPrefixes[_flags("transfer")],  # type: ignore[valid-type]
    distillation: OmitArgPrefixes[_flags("distillation")],  # type: ignore[valid-type]
    optim: OmitArgPrefixes[_flags("optim")],  # type: ignore[valid-type]
    augment: OmitArgPrefixes[_flags("augment")],  # type: ignore[valid-type]
    run: OmitArgPrefixes[_flags("run")],  # type: ignore[valid-type]
) -> int:
    """Train a model on a data set, evaluate it and report on it. What is not given, the recipe chooses from the data.

    Args:
        data: folder, .npz, .npy, CSV/TSV/Parquet table, tar shards, hf:NAME, or a built-in name
        resume: run folder to go on with, exactly
        overwrite: replace an older run of the same name
        find_lr: find a good learning rate by a short run of growing ones, draw its curve, and stop
    """
    from vitrail.train import train

    given = _given(what, source, input, arch, transfer, distillation, optim, augment, run)
    folder = train(data, resume=resume, overwrite=overwrite, find_lr=find_lr, **given)
    if not find_lr:
        _report_on(folder)
    return 0


def _report_on(run: Path) -> None:
    """Makes the report of a run that was just trained; if that fails, the run is whole all the same."""
    from vitrail.progress import log
    from vitrail.report import report

    try:
        log.info(f"The report is {report(run)}")
    except Exception as error:
        why = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}."
        log.warning(f"The run is whole, but its report was not made: {why} Try again: vitrail report {run} --debug")


def report(
    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN…", help_behavior_hint="")]],
    *,
    out: Annotated[str | None, arg(metavar="FILE")] = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
) -> int:
    """Put a run on one HTML page that needs nothing else to be looked at, or compare several runs on one.

    Args:
        runs: run folder, or several to compare
        out: .html file, or folder for report.html (default: in the run; for a comparison the current folder)
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the best there is)
    """
    from vitrail.report import report

    print(f"The report is {report(runs, out=out, batch_size=batch_size, workers=workers, device=device)}")
    return 0


def export(
    run: Positional[Run],
    *,
    out: Annotated[str | None, arg(metavar="FILE")] = None,
    data: str | None = None,
    overwrite: bool = False,
    workers: int = 2,
) -> int:
    """Write a model to an ONNX file that needs neither PyTorch nor vitrail, and prove that it gives the same answers.

    Args:
        run: run folder or .safetensors file
        out: .onnx file to write (default: model.onnx in the run)
        data: data set whose images it is checked on (default: the run's own)
        overwrite: replace what is there
        workers: threads that read images
    """
    from vitrail.export import export

    print(export(run, out=out, data=data, overwrite=overwrite, workers=workers).table())
    return 0


def recipes(
    name: Positional[Annotated[str | None, arg(metavar="[NAME]", help_behavior_hint="")]] = None,
    data: Positional[Annotated[str | None, arg(metavar="[DATA]", help_behavior_hint="")]] = None,
    *,
    json_: Annotated[bool, arg(name="json")] = False,
    # Ignored as those of `train` are.
    what: OmitArgPrefixes[_flags("", "recipe")],  # type: ignore[valid-type]
    source: OmitArgPrefixes[_flags("source")],  # type: ignore[valid-type]
    input: OmitArgPrefixes[_flags("input")],  # type: ignore[valid-type]
    arch: OmitArgPrefixes[_flags("arch")],  # type: ignore[valid-type]
    transfer: OmitArgPrefixes[_flags("transfer")],  # type: ignore[valid-type]
    distillation: OmitArgPrefixes[_flags("distillation")],  # type: ignore[valid-type]
    optim: OmitArgPrefixes[_flags("optim")],  # type: ignore[valid-type]
    augment: OmitArgPrefixes[_flags("augment")],  # type: ignore[valid-type]
    run: OmitArgPrefixes[_flags("run")],  # type: ignore[valid-type]
) -> int:
    """List the training recipes, or print every value that one of them chooses, as the config.yaml of a run.

    Args:
        name: recipe to resolve (default: list them all)
        data: data set to resolve it for (default: a stand-in of the size of ImageNet-1k)
        json_: print JSON
    """
    from vitrail.config import to_plain, to_yaml
    from vitrail.train.verbs import recipes

    lines = recipes()
    if name is None:
        print(json.dumps(lines, indent=2) if json_ else "\n".join(f"{name:<16}{line}" for name, line in lines.items()))
        return 0
    config = recipes(name, data, **_given(what, source, input, arch, transfer, distillation, optim, augment, run))
    if json_:
        print(json.dumps(to_plain(config), indent=2))
    else:
        stand_in = "" if data else ": no data was given, so these are the values for data of its size"
        print(f"# {lines[config.recipe]}\n# For {config.data}{stand_in}.\n{to_yaml(config)}", end="")
    return 0


def convert(
    source: Positional[Annotated[str, arg(metavar="SRC", help_behavior_hint="")]],
    out: Positional[Annotated[str, arg(metavar="DST", help_behavior_hint="")]],
    *,
    to: Literal["vitrail", "timm", "hf", "npz", "torchvision"] = "vitrail",
    model: str | None = None,
    classes: int | None = None,
    partial: bool = False,
    overwrite: bool = False,
) -> int:
    """Write weights of any format in another one, so that a model goes where it is needed.

    Args:
        source: run, weights file of vitrail, timm, Hugging Face, torchvision or JAX, timm:NAME or hf:REPO
        out: .safetensors or .npz file to write; for hf a folder
        to: format to write
        model: name of the model, where the tensors do not show all of it
        classes: number of classes of a new head, for weights without one
        partial: take what fits, and let what is missing begin fresh
        overwrite: replace what is there
    """
    from vitrail.weights.convert import convert

    print(convert(source, out, to=to, model=model, classes=classes, partial=partial, overwrite=overwrite))
    return 0


def _given(*groups: Any) -> dict[str, Any]:
    """The settings that were given, of all groups of flags."""
    settings = {name: value for group in groups for name, value in vars(group).items()}
    return {name: value for name, value in settings.items() if value is not None and value is not False}


VERBS: dict[str, Callable[..., int]] = {
    "models": models,
    "check": check,
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "embed": embed,
    "explain": explain,
    "report": report,
    "export": export,
    "recipes": recipes,
    "convert": convert,
}


def _parse(words: Sequence[str]) -> Callable[[], int]:
    """The verb that is asked for, ready to be called; prints the help if that is."""

    def later(verb: Callable[..., int]) -> Callable[..., Callable[[], int]]:
        return wraps(verb)(lambda *args, **settings: partial(verb, *args, **settings))

    try:
        with redirect_stderr(io.StringIO()):  # what the parser says of a mistake fills a box
            return tyro.extras.subcommand_cli_from_dict(
                {name: later(verb) for name, verb in VERBS.items()},
                prog="vitrail",
                description="The Vision Transformer as real software. --debug shows where an error comes from.",
                config=(FlagCreatePairsOff,),
                args=words,
            )
    except SystemExit as error:
        if error.code:
            raise UserError(explain_mistake(words, VERBS)) from None
        raise
    finally:
        sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a verb. Exits 0, 1 if something in it failed, 2 for what the user can change, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(VERSION)
        return
    # Threads that wait for each other give way soon: spinning for long, as is libgomp's default, can make torch many
    # times slower beside other busy programs. It is read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may be no text
    try:
        call = _parse(words)
        try:
            code = call()
        finally:
            sys.stdout.flush()  # here, where a closed pipe is expected
        sys.exit(code)
    except UserError as error:
        if debug:
            raise
        print(f"vitrail: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
