"""The GPU's stripe codec around a fake device: limits, buffers and what goes where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.codec import CpuCodec
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12
from tests import fake_gpu

pytest.importorskip("torch")

from specpilot_kernels.w12 import gpu_codec

Bits = npt.NDArray[np.uint16]
CPU, GPU = CpuCodec(), gpu_codec.GpuStripeCodec()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return fake_gpu.install(monkeypatch)


@pytest.fixture
def bits() -> Bits:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((300, 130), dtype=np.float32).view(np.uint32) >> 16
    values[rng.random(values.shape) < 0.01] = 0
    return values.astype(np.uint16)


def room(bits: Bits) -> npt.NDArray[np.uint8]:
    return np.full((*layout.grid(*bits.shape), layout.RECORD_BYTES), 0xA5, np.uint8)


def encode(coder: CpuCodec | gpu_codec.GpuStripeCodec, bits: Bits) -> EncodedW12:
    encoded = coder.encode_stripe(bits, room(bits), max_escapes=bits.size)
    assert encoded is not None
    return encoded


def test_records_go_to_the_given_room(bits: Bits) -> None:
    records = room(bits)
    encoded = GPU.encode_stripe(bits, records, max_escapes=bits.size)
    assert encoded is not None
    assert encoded.records is records
    expected = encode(CPU, bits)
    assert encoded.shape == bits.shape
    for part in fake_gpu.PARTS:
        found, wanted = getattr(encoded, part), getattr(expected, part)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), part
        assert np.array_equal(found, wanted), part
    assert records.nbytes > 2 * fake_gpu.PIECE_BYTES


def test_too_many_escapes_are_told_before_records_are_fetched(bits: Bits) -> None:
    escapes = encode(CPU, bits).escapes
    records = room(bits)
    assert GPU.encode_stripe(bits, records, max_escapes=escapes - 1) is None
    assert (records == 0xA5).all()
    assert GPU.encode_stripe(bits, records, max_escapes=escapes) is not None


def test_survey_is_the_cpu_codecs(bits: Bits) -> None:
    found, wanted = GPU.survey_stripe(bits), CPU.survey_stripe(bits)
    assert np.array_equal(found.window, wanted.window)
    assert np.array_equal(found.escape_counts, wanted.escape_counts)


def test_what_lies_in_host_memory_is_judged(bits: Bits, calls: list[str]) -> None:
    encoded = encode(GPU, bits)
    assert GPU.matches_stripe(bits, encoded)
    encoded.records[-1, -1, layout.view_offset(43, 1)] ^= 1
    assert not GPU.matches_stripe(bits, encoded)
    assert calls == ["encode", "compare", "compare"]


def test_decodes_into_the_given_room(bits: Bits) -> None:
    out = np.full_like(bits, 0xA5A5)
    GPU.decode_stripe(encode(CPU, bits), out)
    assert np.array_equal(out, bits)


def test_malformed_parts_and_wrong_rooms_are_refused(bits: Bits, calls: list[str]) -> None:
    encoded = encode(CPU, bits)
    bad = replace(encoded, escape_col=encoded.escape_col + np.int32(130))
    with pytest.raises(MalformedW12, match="outside the matrix"):
        GPU.decode_stripe(bad, np.empty_like(bits))
    with pytest.raises(MalformedW12, match="outside the matrix"):
        GPU.matches_stripe(bits, bad)
    assert calls == []
    with pytest.raises(ValueError, match=r"\[300, 130\] does not fit uint16 \[130, 300\]"):
        GPU.decode_stripe(encoded, np.empty((130, 300), np.uint16))
