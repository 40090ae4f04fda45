"""Keep the memory that a step frees, so that the next step can reuse it.

Otherwise the C allocator would return large buffers to the operating system.
"""

from __future__ import annotations

import ctypes
import sys

_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # glibc's malloc.h; mallopt(3)


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory. Without glibc this does nothing.

    On a CPU, XLA allocates a step's temporaries with malloc. glibc maps new memory for each large block, so each
    step waits for page faults. Call this function before JAX starts threads.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            mallopt(parameter, value)
