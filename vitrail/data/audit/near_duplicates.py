"""Near-duplicates: re-encoded, resized or brightened copies of an image.

An image's signature is the low DCT frequencies of a grayscale thumbnail, as in a perceptual hash, but as floats. The
similarity of two images is the cosine of their signatures, so one matrix product compares all pairs.

Legend: N images, S thumbnail side, F frequencies per direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vitrail.data.images import THUMBNAIL, Pixels
from vitrail.progress import track

Signatures = npt.NDArray[np.float32]

NEAR = 0.97  # cosine similarity above which two images are near-duplicates
MIN_SIDE = 32  # shorter side in pixels; below it, different images of similar objects can be as close
_FREQUENCIES = 8


def signatures(thumbnails: Pixels) -> Signatures:
    """Unit vectors (N, F·F - 1) of grayscale thumbnails (N, S, S): their low frequencies without the mean.

    In photographs the amplitude falls with the frequency. Multiplying by the frequency weighs all of them equally, so
    that two photographs of a bright sky above dark ground do not match.
    """
    k, n = np.arange(_FREQUENCIES)[:, None], np.arange(THUMBNAIL)[None, :]
    basis = np.cos(np.pi / THUMBNAIL * (n + 0.5) * k).astype(np.float32)  # F S
    frequency = np.hypot(k, k.T).astype(np.float32)
    out = np.empty((len(thumbnails), _FREQUENCIES**2 - 1), np.float32)
    for at in range(0, len(out), 4096):
        spectrum = frequency * (basis @ thumbnails[at : at + 4096].astype(np.float32) @ basis.T)  # N F F
        vectors = spectrum.reshape(len(spectrum), -1)[:, 1:]
        out[at : at + 4096] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return out


def near_pairs(vectors: Signatures, splits: Sequence[str]) -> Iterator[tuple[int, int, float]]:
    """For every image the most similar earlier one, in its own and in each earlier split, if above NEAR.

    Yields (earlier, later, similarity). `splits` must be sorted into contiguous runs. At most one pair per image and
    split, so that a thousand equal images give a thousand findings, not a million.
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
                similarity = vectors[top:bottom] @ vectors[left:right].T
                if right > top:  # compare with earlier images only
                    similarity[np.arange(left, right)[None, :] >= np.arange(top, bottom)[:, None]] = 0
                better = np.flatnonzero(similarity.max(axis=1) > best)
                where[better] = left + similarity[better].argmax(axis=1)
                best[better] = similarity[better].max(axis=1)
            for row in np.flatnonzero(where >= 0).tolist():
                yield int(where[row]), top + row, min(float(best[row]), 1.0)
