"""Which drafter block each request gets, within the rows that the drafter has (paper §4.4)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from specpilot_cli.simulate.policy import BLOCKS

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

_MEMORY = 0.8  # of earlier steps in the running acceptance, per step
_PRIOR_TRIES, _PRIOR_RIGHT = 4.0, 3.0


class Acceptance:
    """The share of right drafts of each request, recent steps counting most; [R] requests."""

    def __init__(self, n_requests: int) -> None:
        self._right = np.full(n_requests, _PRIOR_RIGHT)
        self._tries = np.full(n_requests, _PRIOR_TRIES)

    def of(self, requests: Int) -> Float:
        """The running share of these requests, [r]."""
        return np.asarray(self._right[requests] / self._tries[requests], dtype=np.float64)

    def saw(self, requests: Int, accepted: Int, depth: Int) -> None:
        """Add a step: `accepted` right drafts [r], and one wrong one where any was left [r]."""
        tried = np.minimum(accepted + 1, depth)
        self._right[requests] = _MEMORY * self._right[requests] + accepted
        self._tries[requests] = _MEMORY * self._tries[requests] + tried


def choose_blocks(share: Float, draft_rows: int) -> Int:
    """Blocks of 8, 12 or 16 for each request, [r]; their sum stays within `draft_rows`.

    share [r]: probability that one more draft is right. All start at 8, and the upgrade that adds
    most expected tokens per row comes first, which is optimal because each further upgrade of a
    request adds less. With too few rows for all, everybody keeps 8.
    """
    small = BLOCKS[0]
    blocks = np.full(share.shape, small, dtype=np.int64)
    room = draft_rows - int(blocks.sum())
    gains: list[tuple[float, int, int]] = []
    for lower, upper in pairwise(BLOCKS):
        depths = np.arange(lower, upper)
        gain = (share[:, None] ** depths).sum(axis=1) / (upper - lower)
        gains += [(-float(g), request, upper) for request, g in enumerate(gain)]
    for _, request, upper in sorted(gains):
        extra = upper - int(blocks[request])
        if 0 < extra <= room:
            blocks[request] = upper
            room -= extra
    return blocks


def share_nodes(score: Float, budget: int) -> Int:
    """Nodes of each request, [r]: the `budget` best of all by path log-probability.

    score [r, N]: nonincreasing along a row, -inf past its end. A prefix of each row results, so
    every share is a valid tree. Ties go to the shallower pop and then the earlier request.
    """
    requests, width = score.shape
    if budget <= 0 or width == 0:
        return np.zeros(requests, dtype=np.int64)
    order = np.argsort(-score.T.ravel(), kind="stable")[:budget]  # pop index major
    chosen = order[np.isfinite(score.T.ravel()[order])]
    return np.bincount(chosen % requests, minlength=requests).astype(np.int64)
