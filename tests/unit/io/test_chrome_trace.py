"""The streaming reader of traces: whole files, cut and garbled ones, and bounded memory."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io import chrome_trace
from specpilot_cli.io.chrome_trace import ChromeTrace

REPO = Path(__file__).resolve().parents[3]
DF8 = REPO / "tests" / "fixtures" / "traces" / "df8.trace.json.gz"


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    trace = ChromeTrace(path)
    events = list(trace.events())
    return events, trace.header


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_events_and_header_are_those_of_the_whole_document() -> None:
    events, header = _read(DF8)
    with gzip.open(DF8, "rt", encoding="utf-8") as file:
        whole = json.load(file)
    assert events == whole.pop("traceEvents")
    assert header == whole


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_chunks_may_cut_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    document = {
        "schemaVersion": 12, "x": -1.5e3, "flag": True, "none": None, "s": 'q"\\é\n',
        "traceEvents": [{"a": 12345, "b": [1, 23, {"c": "]}"}]}, {}, {"ts": 5148244413405.125}],
        "last": 678,
    }  # fmt: skip
    path = _write(tmp_path / "t.json", json.dumps(document, indent=1, ensure_ascii=False))
    monkeypatch.setattr(chrome_trace, "_CHUNK_BYTES", size)
    events, header = _read(path)
    assert events == document.pop("traceEvents")
    assert header == document


def test_the_bare_form_is_a_list_of_events(tmp_path: Path) -> None:
    assert _read(_write(tmp_path / "t.json", ' [ {"a":1}\n,{"a":2}] '))[0] == [{"a": 1}, {"a": 2}]
    assert _read(_write(tmp_path / "e.json", '{"traceEvents":[]}'))[0] == []


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ('{"traceEvents":[{"a":1},\n{"a":', "the file ends early, in event 2", 2),
        ('{"traceEvents":[{"a":1},\n{"a":"x', "the file ends early, in event 2", 2),
        ('{"traceEvents":[{"a":1}', "a comma was expected, in event 1", 1),
        ('{"traceEvents":[{"a":1}]', "a key was expected", 1),
        ('{"traceEvents":[{"a":1}\n{"b":2}]}', "a comma was expected, in event 1", 2),
        ('{"traceEvents":[{"a":1},\n\n{"b":@}]}', "not JSON", 3),
        ('{"traceEvents":[1]}', "an event is not an object", 1),
        ('{"traceEvents":{}}', "is not a list", 1),
        ('{"other":[]}', "it has no `traceEvents`", 1),
        ("hello", "neither `{` nor `[`", 1),
        ("", "neither `{` nor `[`", 1),
        ('{"traceEvents":[]} {}', "text after the end", 1),
        ('{"traceEvents":[' + "[" * 100_000, "", 1),
    ],
)
def test_what_is_no_trace_is_refused_at_its_place(
    tmp_path: Path, text: str, message: str, line: int
) -> None:
    path = _write(tmp_path / "t.json", text)
    with pytest.raises(InputError, match="not a whole trace") as caught:
        _read(path)
    assert message in caught.value.message
    assert caught.value.where == f"{path}:{line}"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_cut_gzip_file_is_named(tmp_path: Path, share: float) -> None:
    data = DF8.read_bytes()
    path = tmp_path / "cut.trace.json.gz"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(InputError, match="cut or damaged") as caught:
        _read(path)
    assert str(path) in (caught.value.where or "")


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    data = bytearray(DF8.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 64):
        data[at] ^= 0x5A
    path = tmp_path / "bad.json.gz"
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="not a whole trace"):
        _read(path)


def test_other_bytes_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents":[{"a":"\xff"}]}')
    with pytest.raises(InputError, match="not UTF-8"):
        _read(path)
    with pytest.raises(InputError, match="no such file"):
        _read(tmp_path / "none.json")
    with pytest.raises(InputError, match="a folder"):
        _read(tmp_path)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    event = json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "args": {"x": "y" * 300}})
    path = tmp_path / "long.json"
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents":[' + event)
        for _ in range(100_000):
            file.write(",\n" + event)
        file.write("]}")
    assert path.stat().st_size > 35e6
    tracemalloc.start()
    n = sum(1 for _ in ChromeTrace(path).events())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == 100_001
    assert peak < 10e6


def test_garbage_ends_after_a_bounded_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents":[{"name":"')
        for _ in range(40):
            file.write("x" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(InputError, match="not JSON"):
        _read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6


def test_damaged_bytes_give_an_error_or_a_trace_but_nothing_else(tmp_path: Path) -> None:
    """Cut, flipped and repeated bytes of a real trace: 300 of them, the same every time."""
    with gzip.open(DF8) as file:
        data = file.read()[:40_000]
    rng = random.Random(7)
    refused = 0
    for _ in range(300):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(bad))
            bad[at : at + rng.randint(0, 3)] = rng.choice((b"", b'"', b"{", b"\xff", b"]}", b"1e9"))
        path = tmp_path / "t.json"
        path.write_bytes(bytes(bad) + rng.choice((b"", b"]}")))
        try:
            _read(path)
        except InputError as error:
            refused += str(path) in (error.where or "")
    assert refused > 250
