"""Keeps the C allocator from handing large buffers back to the kernel after every step."""

from __future__ import annotations

import ctypes
import sys

_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # glibc's malloc.h; mallopt(3)


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory; does nothing elsewhere.

    On a CPU XLA takes a step's temporaries from malloc. glibc maps blocks that large anew each time, so that every step
    faults in all their pages: a quarter of the time of the next-token model's step. Call it before JAX starts threads.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            mallopt(parameter, value)
