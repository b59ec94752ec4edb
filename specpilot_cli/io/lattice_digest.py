"""What was recorded is what is replayed: a sha256 per request of a lattice file, and per shard.

A flipped bit in a score is still a score. So every request's stored bytes are hashed when a file is
written, and compared when it is read, request by request, however few are held at once. The shards
of a recorder inside a server are hashed as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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
            _add(digest, name, stored[name][begin:end])
        found.append(digest.hexdigest())
    return found


def shard_digest(tensors: Mapping[str, npt.NDArray[Any]], requests: Sequence[str]) -> str:
    """The digest of a recorder's shard: its request ids, then all tensors in order of name."""
    digest = hashlib.sha256("".join(f"{name}\n" for name in requests).encode())
    for name in sorted(tensors):
        _add(digest, name, tensors[name])
    return digest.hexdigest()


def _add(digest: Any, name: str, part: npt.NDArray[Any]) -> None:
    piece = np.ascontiguousarray(part)
    digest.update(f"{name} {piece.dtype.str}\n".encode())
    digest.update(piece.reshape(-1).view(np.uint8).data)
