"""Makes the figures of docs/explain.md that show what a Swin and a PVT attend to.

vitrail train digits --model swin --img-size 32 --epochs 3
vitrail train digits --model pvt --img-size 32 --epochs 3
python docs/explain_relatives.py runs/digits-swin_nano runs/digits-pvt_nano
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vitrail.evaluate.figures import save
from vitrail.explain import drawings
from vitrail.explain.subject import Drawing, Subject, open_subject

IMAGES = Path(__file__).parent / "images"


def main(swin: str, pvt: str) -> None:
    for family, figures in (("swin", of_swin(open_subject(swin))), ("pvt", of_pvt(open_subject(pvt)))):
        for drawing in figures:
            save(drawing.figure, IMAGES / f"explain-{family}-{drawing.name.split('-')[0]}.png")


def of_swin(subject: Subject) -> Iterator[Drawing]:
    few = replace(subject, pictures=subject.pictures[4:10:2])  # of three classes
    yield from drawings.windows(few)
    yield from drawings.distance(subject)


def of_pvt(subject: Subject) -> Iterator[Drawing]:
    yield from drawings.heads(replace(subject, pictures=subject.pictures[6:7]))


if __name__ == "__main__":
    main(*sys.argv[1:])
