"""The client in its own process: same answers, same errors, and no process left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.client_process import ProcessEngine
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid

Servers = Callable[[Any], Any]


def answer(exchange: Any) -> None:
    if exchange.path == "/server_info":
        exchange.reply({"pid": os.getpid()})
        return
    n = exchange.body["sampling_params"]["max_new_tokens"]
    meta = {"prompt_tokens": 2, "completion_tokens": n, "finish_reason": {"type": "length"}}
    exchange.stream([{"output_ids": list(range(n)), "meta_info": meta}])


def test_answers_come_back_with_the_clients_own_cost(make_server: Servers) -> None:
    with ProcessEngine(make_server(answer).url) as engine:
        assert engine.server_info()["pid"] == os.getpid()
        done: list[str] = []
        requests = [GenerateRequest(f"r{i}", (5, 6), 3 + i) for i in range(4)]
        answers = engine.generate_many(
            requests, concurrency=2, on_done=lambda one: done.append(one.request_id)
        )
        assert [len(one.output_ids) for one in answers] == [3, 4, 5, 6]
        assert done == ["r0", "r1", "r2", "r3"]
        assert all(one.submit_s < one.first_byte_s <= one.last_byte_s for one in answers)
        assert engine.cpu_s > 0.0
        assert engine._process is not None
        pid = engine._process.pid
        assert pid != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_errors_keep_their_kind_place_and_hint(make_server: Servers) -> None:
    server = make_server(lambda exchange: exchange.reply({"error": "no"}, status=500))
    with ProcessEngine(server.url, name="candidate server") as engine:
        with pytest.raises(MeasurementInvalid) as caught:
            engine.generate(GenerateRequest("r-1", (1,), 2))
        assert "HTTP 500" in caught.value.message
        assert "candidate server" in str(caught.value.where)
        assert caught.value.hint
        with pytest.raises(MeasurementInvalid):  # and it still answers
            engine.generate(GenerateRequest("r-2", (1,), 2))


def test_a_server_that_is_not_there_is_the_machines_lack() -> None:
    with ProcessEngine("http://127.0.0.1:9") as engine, pytest.raises(MachineError):
        engine.health()


def test_a_bad_url_is_refused_before_a_process_starts() -> None:
    with pytest.raises(InputError):
        ProcessEngine("nonsense")


def test_a_killed_client_is_said_so(make_server: Servers) -> None:
    with ProcessEngine(make_server(answer).url) as engine:
        engine.server_info()
        assert engine._process is not None
        engine._process.kill()
        with pytest.raises(MachineError, match="client process has died"):
            engine.server_info()


def test_an_interrupted_call_ends_its_client_at_once(make_server: Servers) -> None:
    """A client at work would not notice until it is done that nobody waits for it."""
    arrived, over = threading.Event(), threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def hold(exchange: Any) -> None:
        if exchange.path == "/generate":
            arrived.set()
            over.wait(60)
        answer(exchange)

    def interrupt() -> None:
        arrived.wait(60)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with ProcessEngine(make_server(hold).url) as engine:
        engine.server_info()
        process = engine._process
        assert process is not None
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(GenerateRequest("r", (1,), 2))
        assert process.returncode == -signal.SIGKILL
        over.set()
