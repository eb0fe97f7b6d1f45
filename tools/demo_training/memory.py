"""Keeps freed memory in the process."""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Stops glibc from giving memory back to the system between training steps.

    XLA:CPU allocates its scratch memory, here 2 GB, anew for every call. Page faults on it took 30%
    of all processor time.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return  # another C library
    for option, value in (
        (_ARENA_MAX, 1),
        (_MMAP_MAX, 0),
        (_TRIM_THRESHOLD, -1),
        (_TOP_PAD, 256 << 20),
    ):
        mallopt(option, value)
