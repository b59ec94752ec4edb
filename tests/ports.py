"""Ports for servers of tests."""

from __future__ import annotations

from specpilot_cli.engines.process import bind_port


def free_port() -> int:
    """A port that is free right now."""
    with bind_port(0) as bound:
        return int(bound.getsockname()[1])
