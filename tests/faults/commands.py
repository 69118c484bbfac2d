"""Random command lines, built from the real flags of every verb."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from vitrail.cli import Argument, arguments
from vitrail.verbs import VERBS

# `serve` and `pretrain` run for long, and so do training and studies: these are only planned.
_LEFT_OUT = ("serve", "pretrain")
_PLANNED = {"train": "--plan", "study": "--dry"}
_TEXTS = ["", "x", "nowhere", "-", "--", "a/b", "../x", "x" * 300, "ü", "1", "-1", "9" * 30, "nan", "inf", "1e400", "0"]
_NUMBERS = ["0", "1", "2", "8", "-1", "1000000000", "9" * 30, "0.5", "nan", "x", "", "1e-300", "inf"]
_PATHS = [
    *("images", "trained", "plain.npz", "arrays", "shards", "images/table.csv", "picture.png", "picture.jpg", "onnx"),
    *("trained/model.safetensors", "weights-npz/model.npz", "weights-hf", "onnx/model.onnx", "openvino/model.xml"),
    *("masks", "coco-masks", "labelme", "coco", "voc", "yolo", "captions", "captions/captions.json", "run-masks"),
    *("run-boxes", "run-pairs", "run-pretrained", "digits", "nowhere", "", "."),
]
_OFFLINE = ("push", "log")  # would ask the network
_SLOW = ("workers",)


def command_lines(seed: int, home: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields numbered command lines without end; `home` is where they run."""
    assert (home / "trained").is_dir()
    verbs = [verb for verb in VERBS if verb not in _LEFT_OUT]
    while True:
        rng = random.Random(seed)
        verb = rng.choice(verbs)
        yield seed, [verb, *_words(verb, rng)]
        seed += 1


def _words(verb: str, rng: random.Random) -> list[str]:
    known = [argument for argument in arguments(verb) if argument.name not in (*_OFFLINE, *_SLOW)]
    words: list[str] = []
    for argument in (argument for argument in known if argument.positional):
        count = rng.choice((1, 1, 2)) if argument.many else 1
        if argument.required or rng.random() < 0.7:
            words += [_path(rng) for _ in range(count)]
    options = [argument for argument in known if not argument.positional]
    for argument in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2, 3)))):
        words += _option(argument, rng)
    for argument in (argument for argument in options if argument.required and argument.flag not in words):
        words += [argument.flag, f"new-{rng.randrange(100)}{rng.choice(['.npz', '.parquet', '', '.onnx'])}"]
    if verb in _PLANNED:
        words.append(_PLANNED[verb])
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words) + 1), rng.choice(["--nonsense", "-x", "--help", "==", "--=1", *_TEXTS]))
    return [word.replace("\x00", "") for word in words]


def _option(argument: Argument, rng: random.Random) -> list[str]:
    if argument.kind is bool and not argument.values:
        return [argument.flag]
    values = [_value(argument, rng) for _ in range(rng.choice((1, 2)) if argument.many else 1)]
    return [f"{argument.flag}={values[0]}"] if rng.random() < 0.2 else [argument.flag, *values]


def _value(argument: Argument, rng: random.Random) -> str:
    if argument.name == "out":
        return f"new-{rng.randrange(100)}{rng.choice(['', '.npz', '.html', '.onnx', '.csv', '.json'])}"
    choices: list[Any] = [*get_args(argument.kind)] if get_origin(argument.kind) is not None else []
    if choices and rng.random() < 0.8:
        return str(rng.choice(choices))
    if argument.kind in (int, float):
        return rng.choice(_NUMBERS)
    if argument.values and rng.random() < 0.8:
        return rng.choice(argument.values)
    return _path(rng) if rng.random() < 0.4 else rng.choice(_TEXTS)


def _path(rng: random.Random) -> str:
    return rng.choice(_PATHS) if rng.random() < 0.9 else rng.choice(_TEXTS)
