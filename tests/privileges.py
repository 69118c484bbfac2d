"""Tests as root without its privileges, so that permissions bind it as they bind everyone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_VERSION = 0x20080522  # of the call: two sets of 32 capabilities


def drop() -> None:
    """Takes all capabilities from this thread, and from the threads and processes that it starts, for good."""
    if os.geteuid() == 0:
        failed = ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)())
        assert not failed


def unprivileged(function: Callable[..., T], *given: object) -> T:
    """Calls a function in a thread without privileges."""
    with ThreadPoolExecutor(1, initializer=drop) as pool:
        return pool.submit(function, *given).result()
