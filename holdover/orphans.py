"""No orphans: a process that is still starting ends with its parent, however the parent ends (Linux)."""

import ctypes
import signal
import sys

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Be killed when the parent ends. Called between fork and exec; it holds across the exec."""
    if _libc is not None:
        _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def outlive_parent() -> None:
    """From now on the process watches its standard input instead, and ends in its own way."""
    if _libc is not None:
        _libc.prctl(_PARENT_DEATH_SIGNAL, 0)
