"""One lattice as one row of 32-bit words, so that a step is one copy from the device to the host.

The words are int32 or float32 by column. A row holds, in this order: the anchor and stock's chain
(1 + L token ids), prefix and commit length, candidates, edge scores, unary logits, and their
full-vocabulary logsumexp. Block 8 and 16 candidates are 8 kB, block 16 are 18 kB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Columns of a row for `positions` L drafted positions of `candidates` K tokens each."""

    positions: int
    candidates: int

    @property
    def stock(self) -> slice:
        """Stock's chain, int32 [L]; the anchor is the word before it, column 0."""
        return slice(1, 1 + self.positions)

    @property
    def prefix_len(self) -> int:
        """Tokens before the anchor, int32."""
        return 1 + self.positions

    @property
    def commit_len(self) -> int:
        """Tokens the step committed, int32."""
        return 2 + self.positions

    @property
    def candidate_ids(self) -> slice:
        """int32 [L * K]."""
        return self._after(3 + self.positions, self.positions * self.candidates)

    @property
    def scores(self) -> slice:
        """float32 [L * K * K], (predecessor, candidate)."""
        return self._after(self.candidate_ids.stop, self.positions * self.candidates**2)

    @property
    def unary(self) -> slice:
        """float32 [L * K]."""
        return self._after(self.scores.stop, self.positions * self.candidates)

    @property
    def unary_logsumexp(self) -> slice:
        """float32 [L]."""
        return self._after(self.unary.stop, self.positions)

    @property
    def words(self) -> int:
        """Length of a row in 4-byte words."""
        return int(self.unary_logsumexp.stop)

    @staticmethod
    def _after(start: int, length: int) -> slice:
        return slice(start, start + length)

    def unpack(self, rows: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[Any]]:
        """Split rows int32 [S, words] into the shard tensors of `schema/raw_lattice.py`.

        All but `request`, which the rows do not hold.
        """
        n, k = self.positions, self.candidates
        real = rows.view(np.float32)
        return {
            "prefix_len": rows[:, self.prefix_len].copy(),
            "commit_len": rows[:, self.commit_len].copy(),
            "anchor": rows[:, 0].copy(),
            "stock_choice": rows[:, self.stock].copy(),
            "candidate_ids": rows[:, self.candidate_ids].reshape(-1, n, k),
            "scores": real[:, self.scores].reshape(-1, n, k, k),
            "unary": real[:, self.unary].reshape(-1, n, k),
            "unary_logsumexp": real[:, self.unary_logsumexp].copy(),
        }
