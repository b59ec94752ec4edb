"""Stripes: the pieces in which a tensor of any size is encoded and decoded in bounded memory.

A stripe is a range of whole row blocks of one matrix, so its records are a contiguous piece of
the tensor's records and its channels choose their windows without looking at any other row.
Encoding a tensor stripe by stripe gives the bytes of encoding it at once; only the escape
pointers have to be counted on from one stripe to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from specpilot_kernels.w12 import layout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from specpilot_kernels.w12.codec import Survey
    from specpilot_kernels.w12.encoded import EncodedW12

STRIPE_WEIGHTS: Final = 1 << 21
"""Weights per stripe, where a row block is not larger: 4 MiB of BF16, which stay in the cache
between encoding, comparing and hashing."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """Rows of one matrix: `rows` channels from `channel` on (counted over all matrices of a
    stack), in `blocks` row blocks of records from `block` on."""

    channel: int
    rows: int
    block: int
    blocks: int


def stripes(shape: tuple[int, ...], *, weights: int = STRIPE_WEIGHTS) -> Iterator[Stripe]:
    """Yield the stripes of a tensor [rows, cols] or [matrices, rows, cols], in order.

    Each has at most `weights` weights, or one row block if that is more.
    """
    matrices = shape[0] if len(shape) == 3 else 1
    rows, cols = shape[-2:]
    step = stripe_rows(cols, weights=weights)
    row_blocks = layout.grid(rows, cols)[0]
    for matrix in range(matrices):
        for start in range(0, rows, step):
            count = min(step, rows - start)
            yield Stripe(
                channel=matrix * rows + start,
                rows=count,
                block=matrix * row_blocks + start // layout.RECORD_ROWS,
                blocks=-(-count // layout.RECORD_ROWS),
            )


def stripe_rows(cols: int, *, weights: int = STRIPE_WEIGHTS) -> int:
    """Return the rows of a full stripe of a matrix with `cols` inputs."""
    return max(1, weights // max(1, cols * layout.RECORD_ROWS)) * layout.RECORD_ROWS


class StripeCodec(Protocol):
    """An encoder and decoder of single stripes; several threads call it at once.

    Every implementation gives the same bytes. `bits`: uint16 [rows, cols], contiguous, in host
    memory. `records`: uint8 [row blocks, column blocks, 12288], host memory to write to.
    """

    def survey_stripe(self, bits: npt.NDArray[np.uint16]) -> Survey:
        """Choose the windows and count the escapes; nothing is encoded."""
        ...

    def encode_stripe(
        self, bits: npt.NDArray[np.uint16], records: npt.NDArray[np.uint8], *, max_escapes: int
    ) -> EncodedW12 | None:
        """Return the stripe encoded into `records`, or None if it has more than `max_escapes`."""
        ...

    def matches_stripe(self, bits: npt.NDArray[np.uint16], encoded: EncodedW12) -> bool:
        """Decode and return whether the result is `bits`, bit for bit."""
        ...

    def decode_stripe(self, encoded: EncodedW12, bits: npt.NDArray[np.uint16]) -> None:
        """Decode into `bits`; MalformedW12 if the parts do not fit together."""
        ...
