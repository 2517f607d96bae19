"""How this process asks the kernel for memory.

Blocks of megabytes are made and freed with every epoch. By default the C library gives each back to the kernel and
takes it anew, and the pages are zeroed every time: that costs a log's writer about a fifth of its speed.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGEST_BLOCK = 64 << 20
MOST_KEPT = 128 << 20


def keep_freed_memory() -> bool:
    """Use freed memory again, up to :data:`MOST_KEPT` bytes at the end of the heap; whether the C library can.

    For a process that writes logs; it concerns all of it, so the program decides and not the library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, MOST_KEPT))
