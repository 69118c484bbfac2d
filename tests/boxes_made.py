"""Small data sets with boxes, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = (48, 64)  # height, width
OBJECTS = [("disc", (4, 6, 20, 22)), ("square", (30, 10, 60, 40))]


def image(path: Path, size: tuple[int, int] = SIZE, seed: int = 0, rotation: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    exif = Image.Exif()
    if rotation is not None:
        exif[0x0112] = rotation
    Image.fromarray(pixels).save(path, exif=exif)
    return path


def voc_xml(objects: Any = OBJECTS, size: tuple[int, int] | None = SIZE, name: str = "0.png", extra: str = "") -> str:
    boxes = "".join(
        f"<object><name>{label}</name>{extra}<bndbox>"
        + "".join(
            f"<{side}>{value}</{side}>" for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        )
        + "</bndbox></object>"
        for label, box in objects
    )
    stated = "" if size is None else f"<size><height>{size[0]}</height><width>{size[1]}</width></size>"
    return f"<annotation><filename>{name}</filename>{stated}{boxes}</annotation>"


def voc(root: Path, count: int = 6) -> Path:
    for i in range(count):
        image(root / "JPEGImages" / f"{i}.png", seed=i)
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "Annotations" / f"{i}.xml").write_text(voc_xml(name=f"{i}.png"))
    return root


def coco_json(count: int = 6) -> dict[str, Any]:
    boxes = [
        {"id": 2 * i + k, "image_id": 100 + i, "category_id": 7 + 4 * k, "bbox": [x0, y0, x1 - x0, y1 - y0]}
        for i in range(count)
        for k, (_, (x0, y0, x1, y1)) in enumerate(OBJECTS)
    ]
    images = [{"id": 100 + i, "file_name": f"{i}.png", "height": SIZE[0], "width": SIZE[1]} for i in range(count)]
    return {
        "images": images,
        "annotations": boxes,
        "categories": [{"id": 7, "name": "disc"}, {"id": 11, "name": "square"}],
    }


def coco(root: Path, document: Any = None) -> Path:
    for i in range(6):
        image(root / "images" / f"{i}.png", seed=i)
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / "instances_train.json").write_text(
        json.dumps(coco_json() if document is None else document)
    )
    return root


def yolo_line(kind: object, box: tuple[float, float, float, float]) -> str:
    (x0, y0, x1, y1), (h, w) = box, SIZE
    return f"{kind} {(x0 + x1) / 2 / w} {(y0 + y1) / 2 / h} {(x1 - x0) / w} {(y1 - y0) / h}"


def yolo(root: Path, text: str = "names: [disc, square]\ntrain: images/train\nval: images/val\n") -> Path:
    for split, numbers in (("train", range(4)), ("val", range(4, 6))):
        for i in numbers:
            image(root / "images" / split / f"{i}.png", seed=i)
            label = root / "labels" / split / f"{i}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text("\n".join(yolo_line(k, box) for k, (_, box) in enumerate(OBJECTS)) + "\n")
    (root / "data.yaml").write_text(text)
    return root


def table(root: Path, header: str = "image,label,xmin,ymin,xmax,ymax", rows: list[str] | None = None) -> Path:
    lines = []
    for i in range(6):
        image(root / f"{i}.png", seed=i)
        lines += [f"{i}.png,{label},{','.join(map(str, box))}" for label, box in OBJECTS]
    (root / "boxes.csv").write_text("\n".join([header, *(lines if rows is None else rows)]) + "\n")
    return root / "boxes.csv"
