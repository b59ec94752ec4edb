"""`record --url` where files, server or disk fail it: one clear error, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specpilot_cli.io.safetensors_stream import SafetensorsFile
from specpilot_cli.main import main
from specpilot_cli.record.server import LiveRecorder
from specpilot_cli.schema.raw_lattice import INDEX_NAME, shard_name
from tests.unit.sglang_recorder.live_server import prompts

TEXTS = ["one", "two words", "three more words", "x"]

Damage = Callable[[Path], None]


@pytest.fixture
def record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`record(url)`: exit code and stderr of the command; a failure must leave no file."""
    place = tmp_path / "out"
    place.mkdir()
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(f"{p.model_dump_json()}\n" for p in prompts(TEXTS)))

    def run(url: str, concurrency: int = 2) -> tuple[int, str]:
        capfd.readouterr()
        code = main(
            ["record", "--url", url, "--prompts", str(asked), "--quiet", "--timeout", "30",
             "--concurrency", str(concurrency), "-o", str(place / "o.safetensors"),
             "--outputs", str(place / "a.jsonl")]
        )  # fmt: skip
        out, err = capfd.readouterr()
        assert (code, out) != (0, ""), err
        if code:
            assert out == ""
            assert err.count("error:") == 1
            assert "Traceback" not in err
            assert not list(place.iterdir())
        return code, err

    return run


def _damaging(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    """Damage the recorder's folder once all is written and before it is read."""
    wait = LiveRecorder.wait

    def after(self: LiveRecorder) -> None:
        wait(self)
        (folder,) = self._folders
        damage(folder)

    monkeypatch.setattr(LiveRecorder, "wait", after)


def _first(folder: Path) -> Path:
    return folder / shard_name(0)


def _cut(folder: Path) -> None:
    shard = _first(folder)
    shard.write_bytes(shard.read_bytes()[:-1000])


def _emptied(folder: Path) -> None:
    _first(folder).write_bytes(b"")


def _flip(folder: Path) -> None:
    """One bit of the first value: still a number, still a lattice."""
    shard = _first(folder)
    with SafetensorsFile(shard) as file:
        begin = file.info("scores").start
    content = bytearray(shard.read_bytes())
    content[begin] ^= 1
    shard.write_bytes(content)


def _renamed_request(folder: Path) -> None:
    shard = _first(folder)
    content = shard.read_bytes()
    assert b"specpilot-" in content
    shard.write_bytes(content.replace(b"specpilot-", b"specpiloT-", 1))


def _of_another_server(folder: Path) -> None:
    shard = _first(folder)
    session = json.loads((folder / INDEX_NAME).read_text())["session"].encode()
    content = shard.read_bytes()
    assert session in content
    shard.write_bytes(content.replace(session, b"z" * len(session)))


def _no_recorder(folder: Path) -> None:
    shard = _first(folder)
    shard.write_bytes(
        shard.read_bytes().replace(b"specpilot_raw_lattice", b"specpilot_raw_mattice")
    )


SHARDS: dict[str, tuple[Damage, str]] = {
    "cut": (_cut, "bad recorder shard"),
    "emptied": (_emptied, "bad recorder shard"),
    "missing": (lambda folder: _first(folder).unlink(), "bad recorder shard"),
    "a flipped bit": (_flip, "its content is not what the recorder wrote"),
    "another request": (_renamed_request, "its content is not what the recorder wrote"),
    "another server's": (_of_another_server, "it is shard 0 of session zzz"),
    "no recorder's": (_no_recorder, "its metadata is not a recorder's"),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_a_damaged_shard_voids_the_recording(
    serve: Any, record: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    damage, message = SHARDS[kind]
    _damaging(monkeypatch, damage)
    url, _ = serve("dense")
    code, err = record(url)
    assert code == 4
    assert message in err
    assert shard_name(0) in err
    assert "record again" in err


def _edit(**changed: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / INDEX_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return damage


INDEXES: dict[str, Damage] = {
    "cut": lambda folder: (folder / INDEX_NAME).write_text("{"),  # type: ignore[dict-item]
    "missing": lambda folder: (folder / INDEX_NAME).unlink(),
    "another server's": _edit(session="another"),
    "of another block": _edit(block=99),
    "without shards": _edit(shards=-1),
    "of an unknown form": _edit(schema_version=9),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_damaged_index_voids_the_recording(
    serve: Any, record: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _damaging(monkeypatch, INDEXES[kind])
    url, _ = serve("dense")
    code, err = record(url)
    assert code == 4
    assert "the recorder's index was damaged or replaced during the recording" in err
    assert INDEX_NAME in err


def test_an_index_with_shards_that_are_not_there(
    serve: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _damaging(monkeypatch, _edit(shards=99))
    url, _ = serve("dense")
    code, err = record(url)
    assert code == 4
    assert "bad recorder shard" in err


@pytest.mark.parametrize("answers", [0, 1, 3])
def test_a_server_that_dies_meanwhile(
    serve: Any, record: Any, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """Under the first requests, between them, or under the last: its files alone are no answer."""
    url, server = serve("dense")
    begin = LiveRecorder.__init__

    def begun(self: LiveRecorder, *args: Any, **kw: Any) -> None:
        begin(self, *args, **kw)
        server.dies_after = answers

    monkeypatch.setattr(LiveRecorder, "__init__", begun)
    code, err = record(url, concurrency=1)
    assert code in (3, 4)
    assert url in err
    assert "does not answer" in err


@pytest.mark.parametrize("file", ["answers", "lattices"])
def test_a_full_disk_here_leaves_neither_file(
    serve: Any, record: Any, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if file == "answers":
        monkeypatch.setattr("specpilot_cli.io.jsonl.json", SimpleNamespace(dumps=full))
    else:
        monkeypatch.setattr("specpilot_cli.io.lattice_file._write", full)
    url, _ = serve("dense")
    code, err = record(url)
    assert code == 3
    assert "No space left on device" in err


def test_undamaged_files_are_a_recording(serve: Any, record: Any) -> None:
    url, _ = serve("dense")
    assert record(url)[0] == 0
