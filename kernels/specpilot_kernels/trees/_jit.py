"""Native compilation of the tree loops with numba, and plain Python where numba is absent.

Every compiled function here is ordinary Python over numpy arrays, so the same source runs (slowly)
without numba and gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

try:
    from numba import njit
except ImportError:  # the pure-Python path is the specification; numba only makes it fast
    HAVE_NUMBA = False
else:
    HAVE_NUMBA = True

F = TypeVar("F", bound=Callable[..., Any])


def native(function: F) -> F:
    """Compile `function` at its first call, caching machine code on disk where that is possible.

    Compiled code runs without the interpreter's lock and keeps no state, so threads build trees
    side by side.
    """
    if not HAVE_NUMBA:
        return function
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba finds no writable place for its cache: compile per process instead
        return cast(F, njit(nogil=True)(function))
