"""Mutations of files: damaged bytes, hostile values in text, and things that are no files."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

DEEP = "[" * 20_000
_HEADERS = 2**16  # bytes at the start of a file, in which numbers are found
HOSTILE: list[Any] = [
    *(None, True, "", "x", "a" * 3000, "\ud800", "../../etc/passwd", -1, 0, 0.5, 2**31, 2**63, 10**30, 10**400),
    *(1e-300, 1e308, float("nan"), float("inf"), [], {}, [[]], [1] * 1000, {"x": 1}, [[[[[[[[1]]]]]]]]),
]
# Text as it would stand in YAML, CSV or JSON, valid there or not.
WORDS = [
    *("-1", "0", "1e999", "nan", ".inf", "9" * 400, "9" * 5000, "1000000", "2020-99-99", "!!int abc", "null", "~", ""),
    *("&a [*a]", "&a x", "*a", "{a: &b [1,2], c: *b}", DEEP, "{" * 5000, "'", '"', "\x00", "\t", "\ufeff", "ü"),
    *('<!DOCTYPE a [<!ENTITY b "' + "c" * 5000 + '"><!ENTITY d "' + "&b;" * 5000 + '">]>&d;', "&lt;", "<b/>"),
    *("!!python/object/apply:os.system ['false']", "x" * 100_000, "1, 2", "a|b", "\ud7ff", "1_0", "0x" + "f" * 5000),
]


def mutate(file: Path, rng: random.Random) -> None:
    """Damages a file in one of many ways."""
    content = file.read_bytes()
    is_text = file.suffix in (".json", ".yaml", ".csv", ".tsv", ".txt", ".xml")
    way = rng.random()
    if way < 0.03:
        _replace(file, rng)
    elif is_text and way < 0.75:
        text = content.decode("utf-8", "replace")
        if file.suffix == ".json" and rng.random() < 0.7:
            file.write_text(_json(text, rng), encoding="utf-8", errors="surrogatepass")
        else:
            file.write_text(_text(text, rng), encoding="utf-8", errors="surrogatepass")
    else:
        file.write_bytes(_bytes(content, rng))


def _replace(file: Path, rng: random.Random) -> None:
    """Puts something else in the place of a file: nothing, a FIFO, a folder, a link to itself, an endless device."""
    file.unlink()
    match rng.randrange(6):
        case 0:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2:
            file.symlink_to(file.name)
        case 3:
            file.symlink_to("/dev/zero")
        case 4:
            file.touch()
        case _:
            pass


def _bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 256) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(7):
            case 0:
                data[at : at + size] = rng.randbytes(size)
            case 1:
                data[at : at + size] = rng.choice((b"\x00", b"\xff", b"\x7f")) * size
            case 2:
                del data[at:]
            case 3:
                del data[at : at + size]
            case 4:
                data[at:at] = rng.randbytes(size)
            case 5:
                data[at:at] = data[at : at + 256]
            case _:
                if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:  # numbers in text headers, such as those of .npy files and tar members
        numbers = list(re.finditer(rb"\d+", bytes(data[:_HEADERS])))
        if numbers:
            found = rng.choice(numbers)
            value = rng.choice((b"0", b"-1", b"9" * len(found[0]), b"7" * len(found[0]), b"1" + b"0" * 12))
            data[found.start() : found.end()] = value
    return bytes(data)


def _text(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    for _ in range(rng.choice((1, 1, 2, 3))):
        number = rng.randrange(len(lines))
        line = lines[number]
        values = list(re.finditer(r"[^\s,:;\[\]{}]+", line))
        match rng.randrange(5):
            case 0:
                lines[number] = ""
            case 1:
                lines.insert(number, rng.choice(lines))
            case 2:
                lines[number] = rng.choice(WORDS) + line
            case _:
                if values:
                    found = rng.choice(values)
                    lines[number] = line[: found.start()] + rng.choice(WORDS) + line[found.end() :]
    return "".join(lines)


def _json(text: str, rng: random.Random) -> str:
    try:
        document = json.loads(text)
    except ValueError:
        return _text(text, rng)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(document)
    if not places or rng.random() < 0.05:
        return rng.choice(["[]", "1", "null", DEEP, '{"a": ' * 5000, '"x"'])
    for _ in range(rng.choice((1, 1, 2))):
        node, key = rng.choice(places)
        if rng.random() < 0.2 and isinstance(node, dict):
            node.pop(key, None)
        elif isinstance(node, list) or key in node:
            node[key] = rng.choice(HOSTILE)
    return json.dumps(document)


def copy(source: Path, target: Path) -> None:
    """A copy of a file or folder that may be damaged."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
