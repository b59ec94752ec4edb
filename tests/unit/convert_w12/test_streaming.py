"""Stripes, spools and second passes: the same folder as in one piece, in little memory."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_cli.convert_w12 import pipeline
from specpilot_cli.convert_w12.convert import survey_folder
from specpilot_cli.convert_w12.plan import MAX_INPUTS, Selection, reason_to_keep
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.io import spool
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.safetensors_stream import (
    NUMPY_DTYPES,
    SafetensorsFile,
    TensorData,
    TensorInfo,
    bf16_data,
)
from specpilot_kernels.w12.stripes import stripes
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights

# VmHWM: the peak of this program alone; ru_maxrss would count its parent's.
_PEAK_RSS = (
    "import sys\n"
    "from pathlib import Path\n"
    "from specpilot_cli.main import main\n"
    "code = main(sys.argv[1:])\n"
    "lines = Path('/proc/self/status').read_text().splitlines()\n"
    "print([code, *(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))])\n"
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row block per stripe, 1 kB per piece of another tensor, escapes spooled to files."""
    monkeypatch.setattr(pipeline, "stripes", functools.partial(stripes, weights=1))
    monkeypatch.setattr(pipeline, "PIECE_BYTES", 1000)
    monkeypatch.setattr(spool, "_IN_MEMORY_BYTES", 100)
    monkeypatch.setattr(spool, "_CHUNK_BYTES", 64)


def some_zeros(seed: int, *shape: int, share: float, first_row: int = 0) -> TensorData:
    bits = np.array(weights(seed, *shape).data)
    chosen = np.random.default_rng(seed).random(shape) < share
    chosen[:first_row] = False
    bits[chosen] = 0
    return bf16_data(bits)


def test_small_pieces_give_the_same_folder(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = make_checkpoint(shards=3)
    convert(source, tmp_path / "whole")
    request.getfixturevalue("small_pieces")
    convert(source, tmp_path / "w12")
    assert digests(tmp_path / "w12") == digests(tmp_path / "whole")
    assert verify_folder(tmp_path / "w12", source, threads=3).verdict == "identical"
    restore_folder(tmp_path / "w12", tmp_path / "back", threads=2)
    assert digests(tmp_path / "back") == digests(source)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("first_row", [0, 400, 1000])
def test_tensor_that_turns_out_not_to_shrink_is_taken_back(
    first_row: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Its first stripes are written and spooled before the zeros appear."""
    source = make_checkpoint(
        {
            "a.weight": some_zeros(1, 512, 256, share=0.01),
            "b.weight": some_zeros(2, 1100, 256, share=0.5, first_row=first_row),
            "c.weight": some_zeros(3, 512, 256, share=0.01),
        }
    )
    surveyed = survey_folder(open_hf_folder(source), Selection())
    done = convert(source, tmp_path / "w12")
    assert done.outcomes == surveyed.outcomes
    assert [outcome.converted for outcome in done.outcomes] == [True, first_row == 1000, True]
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)


@pytest.mark.usefixtures("small_pieces")
def test_converts_exactly_as_long_as_it_shrinks(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """At the last escape that still saves a byte, and at the first that does not."""
    shape, base = (256, 128), np.array(weights(1, 256, 128).data)
    base[:] = 0x3C00
    overhead = 4 * 12288 + 256 + 4 * 3
    most = (2 * base.size - 1 - overhead) // 6

    def with_escapes(count: int) -> npt.NDArray[np.uint16]:
        bits = base.copy()
        for row in range(256):
            here = min(60, max(0, count - 60 * row))
            bits[row, :here] = 0
        return bits

    source = make_checkpoint(
        {
            "most.weight": bf16_data(with_escapes(most)),
            "one.weight": bf16_data(with_escapes(most + 1)),
        }
    )
    done = {outcome.name: outcome for outcome in convert(source, tmp_path / "w12").outcomes}
    assert done["most.weight"].escapes == most
    assert done["most.weight"].stored_bytes < 2 * base.size
    assert not done["one.weight"].converted
    assert done["one.weight"].shape == shape


def test_everything_in_a_shard_is_aligned(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(
        {
            "a": np.arange(3, dtype=np.uint8),
            "b": bf16_data(np.arange(5, dtype=np.uint16)),
            "c": np.arange(3, dtype=np.float32),
            "d.weight": weights(0, 131, 640),
            "e": np.arange(2, dtype=np.int64),
            "f.weight": weights(1, 131, 640),
        }
    )
    convert(source, tmp_path / "w12")
    with SafetensorsFile(tmp_path / "w12" / "model.safetensors") as file:
        for name in file.names:
            info = file.info(name)
            assert info.start % NUMPY_DTYPES[info.dtype].itemsize == 0, name
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)


def test_rows_too_long_to_hold_stay(make_checkpoint: MakeCheckpoint) -> None:
    shape = (128, MAX_INPUTS + 1)
    info = TensorInfo("a.weight", "BF16", shape, 0, 2 * shape[0] * shape[1])
    assert "inputs" in (reason_to_keep(info, {}, Selection()) or "")
    shorter = TensorInfo("a.weight", "BF16", (128, MAX_INPUTS), 0, 0)
    assert reason_to_keep(shorter, {}, Selection()) is None


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    """384 MB in one tensor, a quarter of its escapes' limit: far less than that is held."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}", encoding="utf-8")
    shape = (24_576, 8192)
    row = np.array(some_zeros(1, 1, shape[1], share=0.02).data)
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 * shape[0] * shape[1]]}
    text = json.dumps({"a.weight": entry}).encode()
    text += b" " * (-len(text) % 8)
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(shape[0] // 128):
            file.write(np.repeat(row, 128, axis=0).tobytes())
    packed, back = tmp_path / "w12", tmp_path / "back"
    for words in (
        ("convert-w12", source, "-o", packed),
        ("w12", "verify", packed, "--against", source),
        ("w12", "restore", packed, "-o", back),
        ("convert-w12", source, "--dry-run"),
    ):
        command = [sys.executable, "-c", _PEAK_RSS, *map(str, words), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        code, peak_kb = json.loads(done.stdout.splitlines()[-1])
        assert code == 0, done.stderr
        assert peak_kb < 320_000, words
    original = (source / "model.safetensors").read_bytes()
    assert (back / "model.safetensors").read_bytes() == original
