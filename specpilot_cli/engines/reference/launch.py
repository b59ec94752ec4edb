"""How the reference server is started: its command line, and its tie to the parent. No torch."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from pathlib import Path

from specpilot_cli.engines.reference.faults import Fault
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.errors import MachineError

# Set by `engines/guard.py` for the server it starts.
PARENT_ENV = "SPECPILOT_PARENT_PID"
_PARENT_POLL_S = 0.5
_PACKAGES = ("torch", "tokenizers", "starlette", "uvicorn")


def require_engine() -> None:
    """Raise `MachineError` unless the packages of the reference engine are installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(
            f"the reference engine needs {', '.join(missing)}",
            hint="pip install '.[torch]' in the clone",
        )


def serve_command(
    target: Path,
    drafter: Path | None,
    spec: SpecConfig,
    *,
    port: int,
    host: str = "127.0.0.1",
    threads: int = 1,
    dtype: str = "float32",
    max_running: int | None = None,
    fault: Fault | None = None,
    pace_ms: float | None = None,
    slow_pct: float = 0.0,
) -> list[str]:
    """The `specpilot serve` command of a reference server, for `engines.process.ServerProcess`."""
    command = [sys.executable, "-m", "specpilot_cli", "serve", "--target", str(target)]
    if drafter is not None:
        command += ["--drafter", str(drafter)]
    command += ["--mode", spec.mode, "--block", str(spec.block)]
    command += ["--nodes", str(spec.n_nodes), "--scoring", spec.scoring]
    command += ["--host", host, "--port", str(port), "--threads", str(threads), "--dtype", dtype]
    if max_running is not None:
        command += ["--max-running", str(max_running)]
    if pace_ms is not None:
        command += ["--pace", repr(pace_ms)]
    if slow_pct:
        command += ["--slow", repr(slow_pct)]
    if fault is not None:
        command += ["--fault", fault.argument]
    return command


def watch_parent() -> None:
    """End this process once the parent named in the environment is gone.

    The kernel does the same on Linux (see `guard.py`); this covers other systems.
    """
    expected = os.environ.get(PARENT_ENV)
    if expected is None or not expected.isdigit():
        return

    def poll() -> None:
        while os.getppid() == int(expected):
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=poll, name="parent-watch", daemon=True).start()
