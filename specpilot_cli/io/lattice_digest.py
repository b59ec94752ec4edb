"""One sha256 per request of a lattice file: what was recorded is what is replayed.

A flipped bit in a score is still a score. So every request's stored bytes are hashed when a file is
written, and compared when it is read, request by request, however few are held at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

#: Tensors with one entry per prompt token, per output token, per kept row; others go by step.
_RAGGED = {
    "prompt_ids": "prompt_offsets",
    "output_ids": "output_offsets",
    "edge_rows": "edge_offsets",
}
_NOT_HASHED = ("prompt_offsets", "output_offsets", "edge_offsets", "step_request")


def request_digests(stored: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    """The digest of each request, in order, from a file's tensors or a part of them.

    Offsets begin at 0. Hashed are, in order of name: the name, the dtype, and the bytes of the
    request's own slice. `step_request` only numbers it.
    """
    n_requests = len(stored["output_offsets"]) - 1
    step_ends = np.searchsorted(stored["step_request"], np.arange(n_requests), side="right")
    steps = np.concatenate([[0], step_ends])
    found: list[str] = []
    for request in range(n_requests):
        digest = hashlib.sha256()
        for name in sorted(stored):
            if name in _NOT_HASHED:
                continue
            begin, end = steps[request], steps[request + 1]
            if name == "edge_rows":
                begin, end = stored["edge_offsets"][begin], stored["edge_offsets"][end]
            elif name in _RAGGED:
                begin, end = stored[_RAGGED[name]][request : request + 2]
            piece = np.ascontiguousarray(stored[name][begin:end])
            digest.update(f"{name} {piece.dtype.str}\n".encode())
            digest.update(piece.reshape(-1).view(np.uint8).data)
        found.append(digest.hexdigest())
    return found
