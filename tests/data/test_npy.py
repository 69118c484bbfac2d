"""`.npy` files, as `numpy.load` reads them, but from many threads."""

from __future__ import annotations

import gc
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from vitrail.data.npy import read_array

ARRAYS = [
    np.arange(24, dtype=">i2").reshape(2, 3, 4),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(5.0),
    np.zeros((0, 3)),
    np.array(["", ""]),
    np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
]


def stored(array: np.ndarray) -> io.BytesIO:
    stream = io.BytesIO()
    np.save(stream, array)
    stream.seek(0)
    return stream


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_are_read_as_numpy_reads_them(array):
    found = read_array(stored(array))
    assert found.dtype == array.dtype
    assert found.flags.writeable
    np.testing.assert_array_equal(found, array)


def test_a_file_that_ends_early_is_an_error():
    stream = stored(np.zeros(100))
    with pytest.raises(ValueError, match="claims 100 values, more than it stores"):
        read_array(io.BytesIO(stream.getvalue()[:-1]))
    with pytest.raises(ValueError, match="different structures"):
        read_array(io.BytesIO(stream.getvalue()[:-1]), size=10**6)  # it became shorter


def test_many_threads_read_at_the_same_time():
    def collected(*_: object) -> None:
        sum(range(30))  # other threads run while the garbage collector interrupts one that parses a header

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    content = stored(np.ones((4, 4), np.uint8)).getvalue()
    gc.callbacks.append(collected)
    try:
        sys.setswitchinterval(1e-5)
        gc.set_threshold(3)
        with ThreadPoolExecutor(8) as pool:
            sums = list(pool.map(lambda _: read_array(io.BytesIO(content)).sum(), range(5000)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert sums == [16] * 5000
