"""A server that is not what was asked for, not ours, or not there any more."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.apply.reference.systems import SystemPlan, check_handshake, check_owner
from specpilot_cli.apply.serving import Fleet, _held_port, launch
from specpilot_cli.engines.listeners import listens
from specpilot_cli.engines.process import ServerProcess, bind_port, check_port_free
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.errors import MachineError, MeasurementInvalid
from specpilot_cli.ui import SilentReporter
from tests.ports import free_port

PLAN = SystemPlan(
    "candidate", "tuned", Path("t"), Path("d"), SpecConfig("tree", 16, 12), "w12", LogitFault(48)
)
RIGHT = PLAN.describe()
WRONG = {
    "mode": "chain", "rows": 8, "nodes": 7, "block": 8, "scoring": "marginal",
    "weight_format": "bf16", "fault": None,
}  # fmt: skip


def test_a_server_that_runs_what_was_asked_for() -> None:
    check_handshake(PLAN, {"specpilot": {**RIGHT, "dtype": "float32", "threads": 1}})


def test_wrong_values_cover_every_key() -> None:
    assert WRONG.keys() == RIGHT.keys()


@pytest.mark.parametrize("key", WRONG)
def test_every_difference_stops_the_run(key: str) -> None:
    with pytest.raises(MachineError, match=f"the tuned server runs {key}=.*, asked for"):
        check_handshake(PLAN, {"specpilot": {**RIGHT, key: WRONG[key]}})
    silent = {name: value for name, value in RIGHT.items() if name != key}
    with pytest.raises(MachineError, match=f"the tuned server runs {key}=None, asked for"):
        check_handshake(PLAN, {"specpilot": silent})


def test_a_fault_nobody_asked_for_stops_the_run() -> None:
    clean = SystemPlan("baseline", "stock chain", Path("t"), None, SpecConfig("ar"), "bf16")
    faulty = {**clean.describe(), "fault": LogitFault(0).describe()}
    with pytest.raises(MachineError, match="the stock chain server runs fault="):
        check_handshake(clean, {"specpilot": faulty})
    # null must be said, not left out: an older server would not know the key
    with pytest.raises(MachineError, match="runs fault=None"):
        check_handshake(
            clean, {"specpilot": {k: v for k, v in clean.describe().items() if k != "fault"}}
        )


@pytest.mark.parametrize("info", [{}, {"specpilot": None}, {"specpilot": "tree"}])
def test_a_server_without_a_state_stops_the_run(info: dict[str, Any]) -> None:
    with pytest.raises(MachineError, match="does not say which mechanisms are active"):
        check_handshake(PLAN, info)


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
print("model loaded", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def process(tmp_path: Path) -> ServerProcess:
    """A server that answers health checks."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    return ServerProcess(command, port=port, log_path=tmp_path / "log", name="tuned server")


def test_a_server_of_this_run_is_known_by_its_session(process: ServerProcess) -> None:
    with process as server:
        child = _child_of(server)
        check_owner(PLAN, server, {"pid": child})
        for stranger in (os.getpid(), 1, 2**30, -1, "7", None, True):
            with pytest.raises(MachineError, match=f"port {server.port} is answered by a proc"):
                check_owner(PLAN, server, {"pid": stranger})
    assert not process.owns(os.getpid())


def _fleet(server: ServerProcess) -> Fleet:
    return Fleet({"candidate": server}, {}, {}, {"candidate": PLAN})


def test_a_server_knows_its_own_port(process: ServerProcess) -> None:
    with process as server:
        assert server.listens()
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            assert server._process is not None
            assert listens(stranger.getsockname()[1], server._process.pid) is False
    assert process.listens() is None


def _child_of(server: ServerProcess) -> int:
    """The server itself, started by the guard."""
    assert server._process is not None
    guard = server._process.pid
    found = Path(f"/proc/{guard}/task/{guard}/children").read_text(encoding="utf-8").split()
    assert len(found) == 1
    return int(found[0])


def test_failing_work_on_a_dead_server_shows_its_log(process: ServerProcess) -> None:
    def fail(server: ServerProcess) -> None:
        with _fleet(server).watched():
            os.kill(_child_of(server), signal.SIGKILL)
            raise MeasurementInvalid("the connection broke")

    with process as server:
        with pytest.raises(MachineError, match="the tuned server ended with status 137") as error:
            fail(server)
        assert "model loaded" in error.value.message
        assert isinstance(error.value.__context__, MeasurementInvalid)


def test_failing_work_on_living_servers_is_what_it_was(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specpilot_cli.apply.serving._DEATH_S", 0.2)
    with process as server:
        fleet = _fleet(server)
        with pytest.raises(MeasurementInvalid, match="odd reply"), fleet.watched():
            raise MeasurementInvalid("odd reply")
        with fleet.watched():
            assert server.running


def test_a_held_port_is_given_to_nobody_else_and_takes_its_server() -> None:
    with _held_port(0) as port:
        with ExitStack() as stack:
            others = [stack.enter_context(bind_port(0)) for _ in range(50)]
            assert port not in {other.getsockname()[1] for other in others}
        check_port_free(port)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()


def test_a_busy_port_is_no_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        held = _held_port(port)
        with pytest.raises(MachineError, match=f"port {port} on 127.0.0.1 is already in use"):
            held.__enter__()


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    port = free_port()
    broken = SystemPlan("ar", "plain decoding", tmp_path / "none", None, SpecConfig("ar"), "bf16")
    servers = launch([broken], tmp_path, first_port=port, reporter=SilentReporter())
    with pytest.raises(MachineError, match="the plain decoding server ended with stat") as error:
        servers.__enter__()
    assert "not a model folder" in error.value.message
    assert error.value.hint == f"the whole log is in {tmp_path / 'ar.log'}"
    check_port_free(port)
