"""A recording fake server in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from specpilot_cli.engines.sglang.plugin import recorder as plugin
from specpilot_cli.engines.sglang.plugin.state import State
from specpilot_cli.schema.plugin_config import PluginConfig
from tests.unit.sglang_recorder import fake_sglang

DENSE = {"SGLANG_SIMULATE_ACC_LEN": "1", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}


@dataclass
class Recording:
    """A fake server whose plugin records."""

    state: State
    worker: Any
    folder: Path
    closers: list[Callable[[], None]] = field(default_factory=list)

    def facts(self) -> dict[str, Any] | None:
        return self.state.report()["active"].get("recorder")

    def problems(self) -> list[str]:
        return list(self.state.report()["problems"])

    def scheduler(self, **options: Any) -> fake_sglang.Scheduler:
        return fake_sglang.Scheduler(self.worker, **options)


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
