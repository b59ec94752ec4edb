"""Whether a server is still the one that a measurement began with.

A server that was started anew between two questions answers the second from other compiled kernels
and an empty cache, and perhaps from another model: the two answers belong to no one measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What SGLang and the reference engine report differently at each start (the random seed is drawn
# then), or that no server changes while it runs. Counters of other servers are left alone, and so
# is what is not said: SGLang fills in its startup times late.
_FIXED_KEYS = ("startup_time", "random_seed", "pid", "model_path", "version")


def relaunched(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Keys by which two descriptions of a server show that it was started anew in between."""
    return [
        key
        for key in _FIXED_KEYS
        if None not in (before.get(key), after.get(key)) and before[key] != after[key]
    ]
