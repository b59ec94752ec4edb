"""What every test runs under: a home of its own, no network, GPU tests skipped aloud."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.doctor.cuda_driver import cuda_devices

_NO_DEVICE = "no CUDA device"
_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_devices():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=_NO_DEVICE))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count the skipped GPU tests, so that a green run cannot hide them."""
    skipped = [r for r in terminalreporter.getreports("skipped") if _NO_DEVICE in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests did not run: {_NO_DEVICE}")


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point HOME and the XDG folders at a temporary folder, for child processes too."""
    home = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    patch.setenv("HOME", str(home))
    for variable, name in (
        ("XDG_CONFIG_HOME", ".config"),
        ("XDG_CACHE_HOME", ".cache"),
        ("XDG_DATA_HOME", ".local/share"),
    ):
        patch.setenv(variable, str(home / name))
    for variable in [name for name in os.environ if name.startswith("SPECPILOT_")]:
        patch.delenv(variable)
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("NO_COLOR", "1")
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        inet = self.family in (socket.AF_INET, socket.AF_INET6)
        if inet and not str(address[0]).startswith(_LOOPBACK):
            raise OSError(f"tests may not reach {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root folder."""
    return Path(__file__).resolve().parent.parent
