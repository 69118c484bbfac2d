"""Pictures that are nearly the same: re-encoded, resized or brightened copies.

A picture is recognised again by its signature: the low frequencies of a small grey copy, as in a perceptual hash, but
kept as numbers. The cosine of two signatures says how alike two pictures are, and a matrix product compares all with
all.

Legend: N images, S side of a thumbnail, F frequencies kept in each direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vitrail.data.images import THUMBNAIL, Pixels
from vitrail.progress import track

Signatures = npt.NDArray[np.float32]

NEAR = 0.97  # cosine of two signatures from which on they are one picture
TOLD_APART = 32  # pixels of the shorter side, under which two different pictures of like things can be as near
_FREQUENCIES = 8


def signatures(thumbnails: Pixels) -> Signatures:
    """Unit vectors (N, F·F - 1) of grey thumbnails (N, S, S): their low frequencies, without the mean.

    In photographs the strength of a frequency falls with its height. Multiplied by the height, all count alike, and
    two photographs of a bright sky above dark ground are not the same.
    """
    k, n = np.arange(_FREQUENCIES)[:, None], np.arange(THUMBNAIL)[None, :]
    basis = np.cos(np.pi / THUMBNAIL * (n + 0.5) * k).astype(np.float32)  # F S
    height = np.hypot(k, k.T).astype(np.float32)
    out = np.empty((len(thumbnails), _FREQUENCIES**2 - 1), np.float32)
    for at in range(0, len(out), 4096):
        spectrum = height * (basis @ thumbnails[at : at + 4096].astype(np.float32) @ basis.T)  # N F F
        vectors = spectrum.reshape(len(spectrum), -1)[:, 1:]
        out[at : at + 4096] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return out


def closest(vectors: Signatures, splits: Sequence[str]) -> Iterator[tuple[int, int, float]]:
    """For every picture the closest one before it, in its own split and in each earlier one, if it is near enough.

    `splits` come one after the other. One pair per picture and split is all, so that a thousand pictures that are all
    alike give a thousand findings and not a million.
    """
    starts = [i for i in range(len(splits)) if i == 0 or splits[i] != splits[i - 1]]
    ranges = list(zip(starts, [*starts, len(splits)][1:], strict=True))
    tiles = [
        (at, min(at + 512, end), number) for number, (begin, end) in enumerate(ranges) for at in range(begin, end, 512)
    ]
    for top, bottom, number in track(tiles, "comparing", unit="block"):
        for begin, end in ranges[: number + 1]:
            best, where = np.full(bottom - top, NEAR, np.float32), np.full(bottom - top, -1)
            for left in range(begin, min(end, bottom), 4096):
                right = min(left + 4096, end, bottom)
                alike = vectors[top:bottom] @ vectors[left:right].T
                if right > top:  # a picture is compared with those before it
                    alike[np.arange(left, right)[None, :] >= np.arange(top, bottom)[:, None]] = 0
                better = np.flatnonzero(alike.max(axis=1) > best)
                where[better] = left + alike[better].argmax(axis=1)
                best[better] = alike[better].max(axis=1)
            for row in np.flatnonzero(where >= 0).tolist():
                yield int(where[row]), top + row, min(float(best[row]), 1.0)
