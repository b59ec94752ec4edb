"""Emptying a server's cache: SGLang refuses for a moment after its last request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.errors import MeasurementInvalid

MakeServer = Callable[..., Any]


def test_a_refusal_may_pass(make_server: MakeServer) -> None:
    server = make_server(lambda exchange: exchange.reply({}))
    server.flush_refusals = 3
    with HttpEngine(server.url) as engine:
        engine.flush_cache()
    assert server.flush_refusals == -1  # asked four times


def test_a_busy_server_does_not_flush(make_server: MakeServer) -> None:
    server = make_server(lambda exchange: exchange.reply({}))
    server.flush_refusals = 1000
    started = time.monotonic()
    with (
        HttpEngine(server.url, 0.3) as engine,
        pytest.raises(MeasurementInvalid, match=r"did not flush its cache: .*Flush cache failed"),
    ):
        engine.flush_cache()
    assert 0.3 < time.monotonic() - started < 30
    assert 1000 - server.flush_refusals < 20
