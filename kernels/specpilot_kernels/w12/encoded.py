"""The W12 container in memory: records, windows and escapes of one weight tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_kernels.w12 import layout


class MalformedW12(ValueError):
    """The parts of an encoded tensor contradict each other or the format."""


class StackShape:
    """What the shape of an encoded tensor says; see `EncodedW12.shape`."""

    __slots__ = ()
    shape: tuple[int, ...]

    @property
    def matrices(self) -> int:
        """How many matrices are stacked; 1 for a plain matrix."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def rows(self) -> int:
        """Output channels of one matrix."""
        return self.shape[-2]

    @property
    def cols(self) -> int:
        """Inputs of one matrix."""
        return self.shape[-1]


@dataclass(frozen=True, slots=True)
class EncodedW12(StackShape):
    """One encoded tensor: a matrix, or a stack of equal matrices such as MoE experts.

    This is the form that codecs and kernels work on; `stored` has the one that folders hold.
    channels = matrices x rows; a record never spans two matrices of a stack.

    shape: (rows, cols) or (matrices, rows, cols) of the BF16 tensor.
    records: uint8 [matrices x row blocks, column blocks, 12288].
    window: uint8 [channels], lowest exponent field of each channel's window.
    escape_ptr: int32 [channels + 1]; channel n owns escapes ptr[n] .. ptr[n + 1].
    escape_col: int32 [escapes], strictly rising inside a channel.
    escape_bits: uint16 [escapes], the exact BF16 patterns.
    """

    shape: tuple[int, ...]
    records: npt.NDArray[np.uint8]
    window: npt.NDArray[np.uint8]
    escape_ptr: npt.NDArray[np.int32]
    escape_col: npt.NDArray[np.int32]
    escape_bits: npt.NDArray[np.uint16]

    @property
    def escapes(self) -> int:
        """Weights stored as exact 16-bit patterns."""
        return int(self.escape_bits.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form, see `layout.encoded_nbytes`."""
        return layout.encoded_nbytes(self.rows, self.cols, self.escapes, matrices=self.matrices)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the original tensor; ZeroDivisionError if empty."""
        return self.nbytes * 8 / (self.matrices * self.rows * self.cols)

    def check(self) -> None:
        """Raise MalformedW12 unless `decode` can safely read every part.

        Says nothing about whether the weights are the right ones.
        """
        if len(self.shape) not in (2, 3) or min(self.shape) < 0:
            raise MalformedW12(f"shape {list(self.shape)} is neither a matrix nor a stack")
        row_blocks, col_blocks = layout.grid(self.rows, self.cols)
        channels = self.matrices * self.rows
        expected = {
            "records": (np.uint8, (self.matrices * row_blocks, col_blocks, layout.RECORD_BYTES)),
            "window": (np.uint8, (channels,)),
            "escape_ptr": (np.int32, (channels + 1,)),
            "escape_col": (np.int32, (self.escapes,)),
            "escape_bits": (np.uint16, (self.escapes,)),
        }
        for part, (dtype, shape) in expected.items():
            array = getattr(self, part)
            if array.dtype != dtype or array.shape != shape:
                raise MalformedW12(
                    f"{part} is {array.dtype} {list(array.shape)}, "
                    f"expected {np.dtype(dtype)} {list(shape)}"
                )
        self._check_windows_and_escapes()

    def _check_windows_and_escapes(self) -> None:
        if self.window.size and int(self.window.max()) > layout.MAX_WINDOW_LO:
            raise MalformedW12(f"a window begins above exponent field {layout.MAX_WINDOW_LO}")
        counts = np.diff(self.escape_ptr.astype(np.int64))
        if self.escape_ptr[0] != 0 or int(self.escape_ptr[-1]) != self.escapes:
            raise MalformedW12("escape_ptr does not cover the escape list")
        if counts.size and int(counts.min()) < 0:
            raise MalformedW12("escape_ptr falls")
        col = self.escape_col
        if col.size and (int(col.min()) < 0 or int(col.max()) >= self.cols):
            raise MalformedW12("an escape column is outside the matrix")
        channel = np.repeat(np.arange(counts.size), counts)
        if np.any((np.diff(col) <= 0) & (np.diff(channel) == 0)):
            raise MalformedW12("escape columns do not rise inside a channel")


def matrix_stack(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Return `bits` as uint16 [matrices, rows, cols]; ValueError for another dtype or rank."""
    if bits.dtype != np.uint16:
        raise ValueError(f"W12 encodes uint16 BF16 patterns, got {bits.dtype}")
    if bits.ndim not in (2, 3):
        raise ValueError(f"W12 encodes matrices or stacks of them, got shape {list(bits.shape)}")
    return bits if bits.ndim == 3 else bits[np.newaxis]
