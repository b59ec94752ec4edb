"""The worked record of docs/w12-format.md, checked with arithmetic anyone can redo on paper."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from specpilot_kernels.w12 import codec, reference
from specpilot_kernels.w12.stored import from_stored, stored_parts

# Channel 0 of a 2 x 3 matrix: two zeros and the least denormal. Channel 1: 1.0, -0.40625, 0.0.
BITS = np.array([[0x0000, 0x8000, 0x0001], [0x3F80, 0xBED0, 0x0000]], dtype=np.uint16)


@pytest.fixture(params=[reference, codec], ids=["reference", "codec"])
def coder(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def test_worked_record(coder: ModuleType) -> None:
    encoded = coder.encode(BITS)

    # Channel 0 has exponent fields 0, 0, 0: only window 0 has them. Channel 1 has 127, 125, 0:
    # both normals fit any window 112..127 to 125..140; the highest begins at 125.
    assert encoded.window.tolist() == [0, 125]
    # The zero of channel 1 is outside 125..140: escape at column 2, pattern 0x0000.
    assert encoded.escape_ptr.tolist() == [0, 0, 1]
    assert encoded.escape_col.tolist() == [2]
    assert encoded.escape_bits.tolist() == [0x0000]
    # Stored: one record row with one escape, in its channel 1.
    parts = stored_parts(encoded)
    assert parts["escape_ptr"].tolist() == [0, 1]
    assert parts["escape_at"].tolist() == [1 << 24 | 2]
    assert parts["escape_bits"].tolist() == [0x0000]

    record = encoded.records[0, 0]
    expected = np.zeros(12288, dtype=np.uint8)
    # Channel 0 is held by thread 0: +0 and -0.
    expected[0] = 0b0_0_000_000
    expected[1] = 0b1_0_000_000
    # Column 2 belongs to the next thread, 1: low mantissa bits 0001 in the low plane.
    expected[8192 + 16] = 0x01
    # Channel 1 is held by thread 4 (16 bytes per thread).
    # 1.0 = 0 01111111 0000000: sign 0, offset 127 - 125 = 2 = 0010, mantissa 0.
    expected[64] = 0b0_0_000_001
    # -0.40625 = 1 01111101 1010000: sign 1, offset 0, top mantissa bits 101, low 0000.
    expected[65] = 0b1_0_101_000
    assert np.flatnonzero(record != expected).tolist() == []

    # One record, two windows, two pointers, one escape.
    assert encoded.nbytes == 12288 + 2 + 2 * 4 + 6
    assert np.array_equal(coder.decode(from_stored(BITS.shape, parts)), BITS)


def test_document_shows_this_record(repo: Path) -> None:
    text = (repo / "docs" / "w12-format.md").read_text(encoding="utf-8")
    section = text.split("## A worked record", 1)[1].split("\n## ", 1)[0]
    shown = {
        int(offset): int(value, 16)
        for offset, value in re.findall(r"^\| (\d+) \| 0x([0-9A-F]{2}) \|", section, re.MULTILINE)
    }
    parts = stored_parts(reference.encode(BITS))
    record = parts["records"][0, 0]
    nonzero = {int(i): int(record[i]) for i in np.flatnonzero(record)}
    assert shown == nonzero
    lists = re.findall(r"^\| `NAME_w12_(\w+)` \| ([^|]+) \|$", section, re.MULTILINE)
    assert {part: [int(value, 0) for value in values.split(",")] for part, values in lists} == {
        part: parts[part].tolist() for part in ("window", "escape_ptr", "escape_at", "escape_bits")
    }
    assert f"= {sum(array.nbytes for array in parts.values()):,} bytes" in section
