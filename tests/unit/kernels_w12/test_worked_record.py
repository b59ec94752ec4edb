"""The worked record of docs/w12.md, checked with arithmetic anyone can redo on paper."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from specpilot_kernels.w12 import codec, reference

# Channel 0 of a 2 x 3 matrix: 1.0, -0.40625 and 0.0. Channel 1: three zeros.
BITS = np.array([[0x3F80, 0xBED0, 0x0000], [0x0000, 0x8000, 0x0001]], dtype=np.uint16)


@pytest.fixture(params=[reference, codec], ids=["reference", "codec"])
def coder(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def test_worked_record(coder: ModuleType) -> None:
    encoded = coder.encode(BITS)

    # Exponent fields of channel 0: 127, 125, 0. Both normals fit any window 112..127 to
    # 125..140; the highest begins at 125. Channel 1 has fields 0, 0, 0: only window 0 has them.
    assert encoded.window.tolist() == [125, 0]
    # The zero of channel 0 is outside 125..140: escape at column 2, pattern 0x0000.
    assert encoded.escape_ptr.tolist() == [0, 1, 1]
    assert encoded.escape_col.tolist() == [2]
    assert encoded.escape_bits.tolist() == [0x0000]

    record = encoded.records[0, 0]
    expected = np.zeros(12288, dtype=np.uint8)
    # 1.0 = 0 01111111 0000000: sign 0, offset 127 - 125 = 2 = 0010, mantissa 0.
    expected[0] = 0b0_0_000_001
    # -0.40625 = 1 01111101 1010000: sign 1, offset 0, top mantissa bits 101, low 0000.
    expected[1] = 0b1_0_101_000
    # Channel 1 is held by thread 4 (16 bytes per thread): +0, -0 and the least denormal.
    expected[64] = 0b0_0_000_000
    expected[65] = 0b1_0_000_000
    # Column 2 belongs to the next thread, 5: low mantissa bits 0001 in the low plane.
    expected[8192 + 80] = 0x01
    assert np.flatnonzero(record != expected).tolist() == []

    # One record, two windows, three pointers, one escape.
    assert encoded.nbytes == 12288 + 2 + 3 * 4 + 6
    assert np.array_equal(coder.decode(encoded), BITS)


def test_document_shows_this_record(repo: Path) -> None:
    text = (repo / "docs" / "w12.md").read_text(encoding="utf-8")
    section = text.split("## A worked record", 1)[1].split("\n## ", 1)[0]
    shown = {
        int(offset): int(value, 16)
        for offset, value in re.findall(r"^\| (\d+) \| 0x([0-9A-F]{2}) \|", section, re.MULTILINE)
    }
    record = reference.encode(BITS).records[0, 0]
    nonzero = {int(i): int(record[i]) for i in np.flatnonzero(record)}
    assert shown == nonzero
