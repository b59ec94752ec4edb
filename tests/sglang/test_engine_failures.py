"""What goes wrong with a real SGLang gives one clear error, and no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.sglang.info import check_handshake, read_plugin_state
from specpilot_cli.errors import MachineError, SpecPilotError
from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin
from tests.sglang.cpu_engine.models import LIVELY, TinyPair
from tests.sglang.cpu_engine.server import (
    CpuServer,
    changed_sglang,
    left_over,
    processes_of,
    start_together,
)

pytestmark = pytest.mark.slow

ASKED = PluginConfig(recorder=RecorderPlugin(mode="anchored", folder="/nowhere"))


@pytest.fixture(scope="module")
def servers(
    tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """Two servers that SGLang starts, and serves, without the plugin that was asked for."""
    folder = tmp_path_factory.mktemp("servers")
    changed = changed_sglang(
        folder / "changed",
        "srt/speculative/dflash_worker_v2.py",
        "def _selector_lattice(draft_model, pred_hidden, anchor_token_ids):",
        "def _selector_lattice(draft_model, pred_hidden, anchor_token_ids, depth=None):",
    )
    planned = [
        CpuServer("broken", plugin='{"schema_version": 1, "recorderr": null}'),
        CpuServer("changed", plugin=ASKED, site=changed),
    ]
    processes = {server.name: server.process(tiny_pair, folder) for server in planned}
    with ExitStack() as stack:
        start_together(stack, list(processes.values()))
        yield processes


def _handshake_error(server: ServerProcess) -> str:
    with HttpEngine(server.base_url) as engine:
        state = read_plugin_state(engine.server_info())
    with pytest.raises(MachineError) as caught:
        check_handshake(ASKED, state, name=server.name)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_broken_configuration_is_named(servers: dict[str, ServerProcess]) -> None:
    message = _handshake_error(servers["broken"])
    assert "the broken server runs without recorder" in message
    assert "broken.plugin.json" in message
    assert "recorderr" in message


def test_a_changed_signature_is_named(servers: dict[str, ServerProcess]) -> None:
    """SGLang itself, with one parameter more in a function that the recorder hooks."""
    message = _handshake_error(servers["changed"])
    assert "_selector_lattice` of SGLang 0.5.23 takes" in message
    assert "depth=" in message
    assert "supports SGLang 0.5.20 to 0.5.23" in message


def test_w12_without_the_plugin_ends_at_once(tiny_pair: TinyPair, tmp_path: Path) -> None:
    server = CpuServer("unplugged", arguments=("--quantization", "w12"))
    with pytest.raises(MachineError) as caught:
        server.process(tiny_pair, tmp_path).__enter__()
    assert "the unplugged server ended with status" in str(caught.value)
    assert "invalid choice: 'w12'" in str(caught.value)


def test_a_server_killed_while_it_serves(servers: dict[str, ServerProcess]) -> None:
    """The scheduler dies under two requests: both end with an error, and so does the server."""
    server = servers["broken"]
    everything = processes_of(server.log_path)
    (scheduler,) = [pid for pid, name in everything.items() if name.startswith("sglang::sched")]
    requests = [
        GenerateRequest(f"r{number}", tuple(LIVELY)[number : number + 5], 2000, ignore_eos=True)
        for number in range(2)
    ]
    with HttpEngine(server.base_url, 60.0) as engine, ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate_many, requests, concurrency=2)
        time.sleep(1.0)
        assert not running.done()
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(SpecPilotError) as caught:
            running.result(60)
    assert caught.value.exit_code in (3, 4)
    deadline = time.monotonic() + 60
    while server.running and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(MachineError, match="the broken server ended with status"):
        server.check()
    server.stop()
    assert left_over(server.log_path) == {}


def test_a_stopped_server_leaves_no_process(servers: dict[str, ServerProcess]) -> None:
    server = servers["changed"]
    assert len(processes_of(server.log_path)) >= 4  # the guard, and three of SGLang
    server.stop()
    assert left_over(server.log_path) == {}
