"""One tensor of the source to one output shard: read, encode, decode, compare, hash, write.

All of it happens stripe by stripe in one pass over the source. A tensor that turns out not to
shrink is taken back and carried over in a second pass; its escapes are never all in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.convert_w12.output import OutputShard
from specpilot_cli.convert_w12.pipeline import (
    Crew,
    HashChain,
    Piece,
    Slot,
    byte_pieces,
    stripe_of,
    stripe_pieces,
)
from specpilot_cli.convert_w12.plan import Outcome, why_not_smaller
from specpilot_cli.io.safetensors_stream import SafetensorsFile, TensorInfo
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.stored import Parts, from_stored, stored_parts
from specpilot_kernels.w12.stripes import Stripe

# Windows and the number of escapes of one stripe.
_Surveyed = tuple[npt.NDArray[np.uint8], int]
_Stored = tuple[npt.NDArray[np.uint8], Future[_Surveyed] | None]


@dataclass(slots=True)
class SourceStream:
    """A source file read from front to back and hashed on the way.

    chain: the sha256 of everything before the tensor under way, and of what was read of it.
    """

    file: SafetensorsFile
    chain: HashChain

    def read(self, info: TensorInfo, piece: Piece, slot: Slot) -> npt.NDArray[np.uint8]:
        """Return the bytes of a piece, and hash those that were not hashed before."""
        raw = self.file.read_pages(info, piece.start, piece.nbytes, slot.room(piece.nbytes))
        # The chain's length is a file offset: the header went into it first.
        known = self.chain.nbytes - info.start - piece.start
        if known < piece.nbytes:
            self.chain.update(raw[max(0, known) :], slot)
        return raw


@dataclass(slots=True)
class _Windows:
    """Counts over the stripes of one tensor."""

    escapes: int = 0
    low: int = layout.MAX_WINDOW_LO
    high: int = 0

    def add(self, window: npt.NDArray[np.uint8], escapes: int) -> None:
        self.escapes += escapes
        self.low = min(self.low, int(window.min()))
        self.high = max(self.high, int(window.max()))


def convert_tensor(
    crew: Crew, source: SourceStream, info: TensorInfo, out: OutputShard, reason: str | None
) -> tuple[Outcome, Future[str]]:
    """Write one tensor; returns what became of it and the CRC-32 of what is stored.

    reason: why it must not be converted, or None.
    """
    if reason is None:
        encoded = _encode(crew, source, info, out)
        if encoded is not None:
            return encoded
    return _store(crew, source, info, out, reason)


def most_escapes(shape: tuple[int, ...], raw_nbytes: int) -> int:
    """Return how many escapes a tensor may have and still be smaller as W12; below 0: none."""
    spare = raw_nbytes - 1 - layout.encoded_tensor_nbytes(shape, 0)
    return min(layout.MAX_ESCAPES, spare // layout.ESCAPE_BYTES)


def survey_tensor(crew: Crew, file: SafetensorsFile, info: TensorInfo, shard: str) -> Outcome:
    """Return what converting a tensor would give; reads it and writes nothing."""
    found = _Windows()

    def load(piece: Piece, slot: Slot) -> Future[_Surveyed]:
        raw = file.read_pages(info, piece.start, piece.nbytes, slot.room(piece.nbytes))
        return crew.submit(slot, _survey, crew, raw, info)

    def finish(_: Piece, slot: Slot, loaded: Future[Future[_Surveyed]]) -> bool:
        found.add(*loaded.result().result())
        return True

    crew.flow(stripe_pieces(info.shape), load, finish)
    return _outcome(info, shard, found)


def kept(info: TensorInfo, shard: str, reason: str) -> Outcome:
    """Return the outcome of a tensor that stays as it is."""
    return Outcome(
        info.name, info.dtype, info.shape, shard, info.nbytes, info.nbytes, reason=reason
    )


def _outcome(info: TensorInfo, shard: str, found: _Windows) -> Outcome:
    nbytes = layout.encoded_tensor_nbytes(info.shape, found.escapes)
    if nbytes >= info.nbytes:
        return kept(info, shard, why_not_smaller(info.shape, nbytes, found.escapes))
    return Outcome(
        info.name, info.dtype, info.shape, shard, info.nbytes, nbytes,
        escapes=found.escapes, window_low=found.low, window_high=found.high,
    )  # fmt: skip


def _encode(
    crew: Crew, source: SourceStream, info: TensorInfo, out: OutputShard
) -> tuple[Outcome, Future[str]] | None:
    limit = most_escapes(info.shape, info.nbytes)
    if limit < 0:
        return None
    chain, found = crew.stored_chain(), _Windows()

    def load(piece: Piece, slot: Slot) -> Future[Parts | None]:
        raw = source.read(info, piece, slot)
        return crew.submit(
            slot, _encode_checked, crew, slot, raw, info, stripe_of(piece), limit - found.escapes
        )

    def finish(_: Piece, slot: Slot, loaded: Future[Future[Parts | None]]) -> bool:
        parts = loaded.result().result()
        if parts is None or found.escapes + parts["escape_bits"].size > limit:
            return False
        found.add(parts["window"], parts["escape_bits"].size)
        chain.update(parts["records"], slot)
        out.add_stripe(parts)
        return True

    if not crew.flow(stripe_pieces(info.shape), load, finish):
        out.forget_stripes()
        return None
    out.end_encoded(info, chain)
    return _outcome(info, out.name, found), chain.hexdigest()


def _store(
    crew: Crew, source: SourceStream, info: TensorInfo, out: OutputShard, reason: str | None
) -> tuple[Outcome, Future[str]]:
    """Carry a tensor over; without a reason, count what W12 would have taken."""
    chain, found = crew.stored_chain(), _Windows()
    pieces: Iterable[Piece]
    pieces = byte_pieces(info.nbytes) if reason is not None else stripe_pieces(info.shape)
    out.begin_stored(info)

    def load(piece: Piece, slot: Slot) -> _Stored:
        raw = source.read(info, piece, slot)
        chain.update(raw, slot)
        return raw, crew.submit(slot, _survey, crew, raw, info) if reason is None else None

    def finish(_: Piece, slot: Slot, loaded: Future[_Stored]) -> bool:
        raw, survey = loaded.result()
        if survey is not None:
            found.add(*survey.result())
        out.add_bytes(raw.data)
        return True

    crew.flow(pieces, load, finish)
    out.end_stored(info)
    if reason is not None:
        return kept(info, out.name, reason), chain.hexdigest()
    return _outcome(info, out.name, found), chain.hexdigest()


def _survey(crew: Crew, raw: npt.NDArray[np.uint8], info: TensorInfo) -> _Surveyed:
    found = crew.codec.survey_stripe(_matrix(raw, info))
    return found.window, found.escapes


def _encode_checked(
    crew: Crew,
    slot: Slot,
    raw: npt.NDArray[np.uint8],
    info: TensorInfo,
    stripe: Stripe,
    max_escapes: int,
) -> Parts | None:
    """Return what is to be stored of one stripe, after decoding just that."""
    bits = _matrix(raw, info)
    records = slot.records(stripe.blocks, info.shape[-1])
    encoded = crew.codec.encode_stripe(bits, records, max_escapes=max_escapes)
    if encoded is None:
        return None
    parts = stored_parts(encoded)
    if not crew.codec.matches_stripe(bits, from_stored(bits.shape, parts)):
        first, last = stripe.channel, stripe.channel + stripe.rows - 1
        raise RuntimeError(
            f"W12 codec error: `{info.name}` does not decode to its own bits "
            f"in channels {first} to {last}"
        )
    return parts


def _matrix(raw: npt.NDArray[np.uint8], info: TensorInfo) -> npt.NDArray[np.uint16]:
    return raw.view("<u2").reshape(-1, info.shape[-1])
