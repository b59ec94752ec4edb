"""Memory for direct disk access: it begins on a page, and is made of huge pages where it can be.

A disk request holds a limited number of memory segments, and every small page is one. Of huge
pages a request holds megabytes: the disk gets few large ones, the processor has less to do.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

PAGE: Final = 4096
_HUGE: Final = 2 << 20

Bytes = npt.NDArray[np.uint8]


def page_memory(nbytes: int) -> Bytes:
    """Return uint8 [nbytes], all zero, beginning on a page; on a huge page if one would be full."""
    # The excess is address space, not memory: nothing touches it. Shared memory, which is what
    # mmap gives without these flags, has no huge pages on most systems.
    area = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(area, np.uint8)
    skip = -memory.ctypes.data % _HUGE
    # What does not fill a huge page stays on small ones: it would take the room of a whole one.
    with contextlib.suppress(AttributeError, OSError):
        if nbytes >= _HUGE:
            area.madvise(mmap.MADV_HUGEPAGE, skip, nbytes - nbytes % _HUGE)
    return memory[skip : skip + nbytes]
