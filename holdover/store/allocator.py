"""Freed memory is kept for what comes next.

Segments come and go by the megabyte. glibc gives such memory back to the system at once and gets it anew page by page,
zeroed, which takes three times as long as filling it.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # as in malloc.h
NEVER_BELOW = 1 << 30


def keep_freed_memory() -> bool:
    """Ask the C library for it, before any thread is started. False where it can't be asked (not glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wishes = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, NEVER_BELOW), (M_TRIM_THRESHOLD, NEVER_BELOW))
    return all(mallopt(option, value) for option, value in wishes)
