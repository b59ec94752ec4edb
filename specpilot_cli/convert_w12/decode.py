"""One tensor of a W12 folder back to the source's bytes, stripe by stripe and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from specpilot_cli.convert_w12.pipeline import (
    Crew,
    HashChain,
    Piece,
    Slot,
    byte_pieces,
    stripe_of,
    stripe_pieces,
)
from specpilot_cli.io.safetensors_stream import tensor_nbytes
from specpilot_cli.io.w12_folder import W12Folder
from specpilot_cli.schema.w12_manifest import W12Source, W12Tensor
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.encoded import MalformedW12
from specpilot_kernels.w12.stored import Parts, from_stored

Raw = npt.NDArray[np.uint8]

_CHUNK_BYTES = 1 << 20


def source_head(source: W12Source) -> bytes:
    """Return the first bytes of a source file: length prefix and header."""
    header = source.header.encode()
    return len(header).to_bytes(8, "little") + header


def tensor_pieces(tensor: W12Tensor) -> Iterable[Piece]:
    """Yield the pieces in which a tensor is read and decoded."""
    if tensor.encoding == "w12":
        return stripe_pieces(tuple(tensor.shape))
    return byte_pieces(tensor_nbytes(tensor.dtype, tensor.shape))


def decode_tensor(
    crew: Crew,
    opened: W12Folder,
    tensor: W12Tensor,
    take: Callable[[Piece, Raw, Slot], None],
    *,
    stored: HashChain | None = None,
) -> str | None:
    """Give `take` the source's bytes of every piece, in order, with the slot that holds them.

    stored: gets what the folder stores of the tensor, in hashing order. Returns what is
    malformed, if anything is: then not all pieces were given.
    """
    malformed: list[str] = []

    def load(piece: Piece, slot: Slot) -> tuple[Raw, Future[None] | None]:
        raw = slot.raw(piece.nbytes)
        if tensor.encoding == "stored":
            opened.shard(tensor).read_into(opened.part(tensor), piece.start, raw.data)
            if stored is not None:
                stored.update(raw, slot)
            return raw, None
        stripe, cols = stripe_of(piece), tensor.shape[-1]
        records = slot.records(stripe.blocks, cols)
        parts = opened.read_stripe(tensor, stripe, records)
        if stored is not None:
            stored.update(records, slot)
        return raw, crew.submit(slot, _decode, crew, parts, raw.view("<u2").reshape(-1, cols))

    def finish(piece: Piece, slot: Slot, loaded: Future[tuple[Raw, Future[None] | None]]) -> bool:
        try:
            raw, decoding = loaded.result()
            if decoding is not None:
                decoding.result()
        except MalformedW12 as error:
            malformed.append(str(error))
            return False
        take(piece, raw, slot)
        return True

    if crew.flow(tensor_pieces(tensor), load, finish) and stored is not None:
        _hash_small_parts(opened, tensor, stored)
    return malformed[0] if malformed else None


def _decode(crew: Crew, parts: Parts, bits: npt.NDArray[np.uint16]) -> None:
    crew.codec.decode_stripe(from_stored(bits.shape, parts), bits)


def _hash_small_parts(opened: W12Folder, tensor: W12Tensor, stored: HashChain) -> None:
    if tensor.encoding == "stored":
        return
    for part in layout.PART_SUFFIXES:
        if part == "records":
            continue
        info = opened.part(tensor, part)
        for start in range(0, info.nbytes, _CHUNK_BYTES):
            chunk = np.empty(min(_CHUNK_BYTES, info.nbytes - start), np.uint8)
            opened.shard(tensor).read_into(info, start, chunk.data)
            stored.update(chunk)
