"""Masks and boxes of images with an EXIF orientation: they are taken as drawn on the image as displayed.

If tools ignore the orientation, annotations lie on the stored pixels. Their size shows it where the image is rotated by
90° and not square; otherwise nothing does, and the user is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from vitrail.data.dataset import Problem
from vitrail.data.images import ImageFacts
from vitrail.data.orientation import SIDEWAYS, UPRIGHT
from vitrail.progress import log


def as_displayed(images: Iterable[tuple[object, ImageFacts, bool]], what: str, source: object) -> tuple[Problem, ...]:
    """The images whose annotations may lie on the stored pixels; logs how many they are.

    Each image has its file, its facts, and whether its annotation states a size that is right.
    """
    found = tuple(
        Problem("turned", f"EXIF orientation {fact.turn}", str(file))
        for file, fact, sized in images
        if fact.turn != UPRIGHT and not (sized and fact.turn in SIDEWAYS and fact.h != fact.w)
    )
    if found:
        one = len(found) == 1
        log.warning(
            "%s: %s an EXIF orientation, such as %s, and nothing shows whether %s %s lie on the stored pixels or on "
            "the image as displayed. They are taken as displayed. If that is right, save the images upright; if not, "
            "remove the EXIF orientation.",
            source,
            "1 image has" if one else f"{len(found):,} images have",
            found[0].file,
            "its" if one else "their",
            what,
        )
    return found
