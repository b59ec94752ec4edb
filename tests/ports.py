"""Ports for servers of tests."""

from __future__ import annotations

import os
import random
from contextlib import suppress

from specpilot_cli.engines.process import check_port_free
from specpilot_cli.errors import MachineError

_PORTS = range(20_000, 30_000)  # below the ports of outgoing connections


def free_port() -> int:
    """A free port that the system gives to nobody else while a server starts.

    Nor does `free_port` of another pytest-xdist worker: each has ports of its own.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = _PORTS[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) :: workers]
    while True:
        port = random.SystemRandom().choice(own)  # no seed of a test decides it
        with suppress(MachineError):
            check_port_free(port)
            return port
