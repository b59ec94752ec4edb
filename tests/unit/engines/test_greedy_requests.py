"""What a request names, and what a reply must hold: parameters and token ids."""

from __future__ import annotations

from typing import Any

import pytest

from specpilot_cli.engines import wire
from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.errors import MachineError

IDS = [11, 12, 13, 14, 15, 16]
META = {
    "prompt_tokens": 3,
    "completion_tokens": 6,
    "finish_reason": {"type": "length", "length": 6},
}


def ask(server: Any) -> Generation:
    with HttpEngine(server.url, 60.0) as engine:
        return engine.generate(GenerateRequest("r-1", (5, 6, 7), 6))


def test_a_server_without_token_ids_is_refused(make_server: Any) -> None:
    server = make_server(lambda exchange: exchange.stream([{"text": "words", "meta_info": META}]))
    with pytest.raises(MachineError, match="reports no token ids") as caught:
        ask(server)
    assert caught.value.exit_code == 3
    assert "r-1" in str(caught.value)


def test_a_request_leaves_nothing_to_the_servers_defaults(make_server: Any) -> None:
    server = make_server(lambda exchange: exchange.stream([{"output_ids": IDS, "meta_info": META}]))
    ask(server)
    params = server.seen[0]["sampling_params"]
    assert params == {**wire.GREEDY, "max_new_tokens": 6}
    assert (params["temperature"], params["top_k"], params["repetition_penalty"]) == (0, 1, 1.0)
