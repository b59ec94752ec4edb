"""Parts of an encoded tensor in device memory that do not fit together are named; no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specpilot_kernels.w12 import codec
from specpilot_kernels.w12.encoded import MalformedW12

torch = pytest.importorskip("torch")
device = pytest.importorskip("specpilot_kernels.w12.device")

PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")


@pytest.fixture
def parts() -> Any:
    """Eight channels of 64 escapes, in host memory: `check` looks at no device."""
    encoded = codec.encode(np.full((8, 64), 0x7FC1, np.uint16))
    return device.DeviceW12(
        encoded.shape, *(torch.from_numpy(getattr(encoded, name).copy()) for name in PARTS)
    )


def test_sound_parts_pass(parts: Any) -> None:
    parts.check()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_length_is_named(parts: Any, part: str) -> None:
    with pytest.raises(MalformedW12, match=part):
        replace(parts, **{part: getattr(parts, part)[:-1]}).check()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_dtype_is_named(parts: Any, part: str) -> None:
    with pytest.raises(MalformedW12, match=f"{part} is torch.int64"):
        replace(parts, **{part: getattr(parts, part).to(torch.int64)}).check()


@pytest.mark.parametrize("part", ["window", "escape_ptr", "escape_col", "escape_bits"])
def test_a_part_with_gaps_is_named(parts: Any, part: str) -> None:
    wide = getattr(parts, part).repeat_interleave(2)
    with pytest.raises(MalformedW12, match=f"{part} is not contiguous"):
        replace(parts, **{part: wide[::2]}).check()


def test_records_off_their_alignment_are_refused(parts: Any) -> None:
    room = torch.zeros(parts.records.numel() + 32, dtype=torch.uint8)
    begin = -room.data_ptr() % 16 + 8
    moved = room[begin : begin + parts.records.numel()].view(parts.records.shape)
    with pytest.raises(MalformedW12, match="16-byte aligned"):
        replace(parts, records=moved).check()
