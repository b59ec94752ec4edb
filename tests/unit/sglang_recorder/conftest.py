"""A recording fake server in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from specpilot_cli.engines.sglang.plugin import recorder as plugin
from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.schema.plugin_config import PluginConfig
from tests.unit.sglang_recorder import fake_sglang
from tests.unit.sglang_recorder.live_server import FakeServer, Recording

DENSE = {"SGLANG_SIMULATE_ACC_LEN": "1", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}


Start = Callable[..., Recording]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start fake servers: `start(mode, **worker options)`."""
    closers: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", closers.append)

    def begin(
        mode: str = "dense",
        *,
        folder: Path = tmp_path / "shards",
        max_steps: int = 1_000_000,
        environ: dict[str, str] | None = None,
        tp: dict[str, Any] | None = None,
        **options: Any,
    ) -> Recording:
        given = (DENSE if mode == "dense" else {}) if environ is None else environ
        for name in DENSE:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        fake_sglang.install(monkeypatch, **(tp or {}))
        state = State(sglang_version="0.5.23")
        config = PluginConfig.model_validate(
            {"recorder": {"mode": mode, "folder": str(folder), "max_steps": max_steps}}
        )
        plugin.activate(config, state)
        worker = fake_sglang.dflash_worker(one_token=mode == "dense", **options)
        return Recording(state, worker, folder)

    yield begin
    for close in closers:
        close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"name": name}))
    return tmp_path


@pytest.fixture
def serve(start: Start, models: Path, make_server: Any) -> Iterator[Any]:
    """Start a recording server: `serve(mode) -> (url, FakeServer)`."""
    started: list[FakeServer] = []

    def begin(mode: str = "dense", **options: Any) -> tuple[str, FakeServer]:
        server = FakeServer(start(mode, **options), models)
        started.append(server)
        return make_server(server).url, server

    yield begin
    for server in started:
        server.stop = True
        server.thread.join()
