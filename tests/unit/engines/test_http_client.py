"""The HTTP client against well-behaved and hostile servers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import numpy as np
import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import AsyncHttpEngine, HttpEngine
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid

PROMPT = (5, 6, 7)
REQUEST = GenerateRequest("r-1", PROMPT, 6)
IDS = [11, 12, 13, 14, 15, 16]


def chunk(ids, total, *, finish=None, **meta):
    return {
        "text": None,
        "output_ids": list(ids),
        "meta_info": {
            "id": "x",
            "prompt_tokens": len(PROMPT),
            "completion_tokens": total,
            "finish_reason": finish,
            "spec_verify_ct": 2,
            "cached_tokens": 0,
            **meta,
        },
    }


LENGTH = {"type": "length", "length": 6}
CUMULATIVE = [chunk(IDS[:1], 1), chunk(IDS[:4], 4), chunk(IDS, 6, finish=LENGTH)]
INCREMENTAL = [chunk(IDS[:1], 1), chunk(IDS[1:4], 4), chunk(IDS[4:], 6, finish=LENGTH)]


def streams(events):
    return lambda exchange: exchange.stream(events)


def ask(server, request=REQUEST, *, timeout_s=5.0, stall_s=5.0):
    with HttpEngine(server.url, timeout_s, stall_timeout_s=stall_s) as engine:
        return engine.generate(request)


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTAL], ids=["cumulative", "incremental"])
def test_both_stream_forms_give_the_same_ids(make_server, events):
    answer = ask(make_server(streams(events)))
    assert list(answer.output_ids) == IDS
    assert answer.completion_tokens == 6
    assert answer.verify_steps == 2
    assert answer.tokens_per_step == pytest.approx(2.5)
    assert answer.prompt_ids == PROMPT
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("n_tokens", [3, 50], ids=["few", "many"])
def test_one_token_per_chunk_is_not_mistaken_for_a_cumulative_stream(make_server, n_tokens):
    ids = list(range(100, 100 + n_tokens))
    finish = {"type": "stop", "matched": 0}
    events = [
        chunk([token], index + 1, finish=finish if index == n_tokens - 1 else None)
        for index, token in enumerate(ids)
    ]
    answer = ask(make_server(streams(events)), GenerateRequest("r", PROMPT, 99))
    assert list(answer.output_ids) == ids


def test_a_token_repeated_in_every_chunk_is_read_right_in_both_forms(make_server):
    request = GenerateRequest("r", PROMPT, 4)
    stop = {"type": "length", "length": 4}
    grown = [chunk([9] * n, n, finish=stop if n == 4 else None) for n in range(1, 5)]
    single = [chunk([9], n, finish=stop if n == 4 else None) for n in range(1, 5)]
    for events in (grown, single):
        assert ask(make_server(streams(events)), request).output_ids == (9, 9, 9, 9)


def test_first_byte_is_of_the_first_chunk_with_tokens(make_server):
    def script(exchange):
        exchange.open_stream()
        exchange.event(chunk([], 0))
        time.sleep(0.15)
        for event in CUMULATIVE[:2]:
            exchange.event(event)
        time.sleep(0.8)
        exchange.event(CUMULATIVE[2])
        exchange.done()

    answer = ask(make_server(script))
    assert 0.14 < answer.time_to_first_token_s < answer.elapsed_s - 0.1
    assert answer.elapsed_s > 0.94
    assert answer.rate_tok_per_s == pytest.approx(6 / answer.elapsed_s)


def test_events_split_across_packets_are_joined(make_server):
    def script(exchange):
        exchange.open_stream()
        whole = b"".join(
            b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in CUMULATIVE
        )
        for start in range(0, len(whole), 37):
            exchange.raw(whole[start : start + 37])
        exchange.done()

    assert list(ask(make_server(script)).output_ids) == IDS


def test_text_prompts_report_the_ids_the_server_used(make_server):
    events = [{**event, "prompt_token_ids": [5, 6, 7]} for event in CUMULATIVE]
    server = make_server(streams(events))
    answer = ask(server, GenerateRequest("r", (), 6, text="hello"))
    assert answer.prompt_ids == PROMPT
    assert server.seen[0]["text"] == "hello"
    assert server.seen[0]["return_prompt_token_ids"] is True
    assert "input_ids" not in server.seen[0]


def test_decode_log_probs_arrive_with_the_tokens(make_server):
    rows = [[[-0.1 * k, token, None], [-2.0, 3, None]] for k, token in enumerate(IDS)]
    whole = [chunk(IDS[:2], 2, output_top_logprobs=rows[:2])]
    whole.append(chunk(IDS, 6, finish=LENGTH, output_top_logprobs=rows))
    parts = [chunk(IDS[:2], 2, output_top_logprobs=rows[:2])]
    parts.append(chunk(IDS[2:], 6, finish=LENGTH, output_top_logprobs=rows[2:]))
    request = GenerateRequest("r", PROMPT, 6, top_logprobs=2)
    for events in (whole, parts):
        answer = ask(make_server(streams(events)), request)
        assert [row[0].token_id for row in answer.top_logprobs] == IDS
        assert answer.top_logprobs[3][0].logprob == pytest.approx(-0.3)


def early_close(exchange):
    exchange.open_stream()
    exchange.event(CUMULATIVE[0])
    exchange.drop()


def no_done(exchange):
    exchange.open_stream()
    exchange.event(CUMULATIVE[2])
    exchange._handler.wfile.write(b"0\r\n\r\n")


def not_json(exchange):
    exchange.open_stream()
    exchange.raw(b"data: {oops\n\n")
    exchange.done()


def http_500(exchange):
    exchange.reply(b"boom", status=500)


def server_error(exchange):
    exchange.stream([CUMULATIVE[0], {"error": {"message": "out of memory"}}])


def midway_500(exchange):
    exchange.stream([*CUMULATIVE[:2], {"error": {"message": "HTTP 500"}}])


def broken_streams():
    abort = {"type": "abort", "message": "out of memory", "status_code": 500}
    no_ids = chunk(IDS, 6, finish=LENGTH)
    del no_ids["output_ids"]
    no_meta = {"output_ids": IDS}
    return {
        "closed early": (early_close, "broke|ended"),
        "no done": (no_done, "DONE"),
        "not json": (not_json, "not JSON"),
        "http 500": (http_500, "HTTP 500: boom"),
        "error event": (server_error, "out of memory"),
        "error after tokens": (midway_500, "HTTP 500"),
        "abort": (streams([CUMULATIVE[0], chunk(IDS[:2], 2, finish=abort)]), "aborted"),
        "no ids any more": (streams([CUMULATIVE[0], no_ids]), "output_ids"),
        "no meta": (streams([no_meta]), "meta_info"),
        "wrong count": (streams([chunk(IDS, 7, finish=LENGTH)]), "7 completion"),
        "no finish": (streams(CUMULATIVE[:2]), "finish reason"),
        "short": (streams([chunk(IDS[:4], 4, finish=LENGTH)]), "4 of 6"),
        "too long": (streams([chunk([*IDS, 1], 7, finish=LENGTH)]), "7 tokens where 6"),
        "empty": (streams([chunk([], 0, finish={"type": "stop"})]), "no token"),
        "text id": (streams([chunk(["a"], 1, finish=LENGTH)]), "no token id"),
        "null ids": (streams([chunk([None], 1, finish=LENGTH)]), "no token id"),
        "rewritten": (
            streams([*CUMULATIVE[:2], chunk([99, *IDS[1:]], 6, finish=LENGTH)]),
            "changed tokens",
        ),
        "prompt count": (
            streams([chunk(IDS, 6, finish=LENGTH, prompt_tokens=99)]),
            "server counted 99",
        ),
    }


@pytest.mark.parametrize("name", broken_streams())
def test_a_broken_answer_voids_the_measurement_and_names_the_request(make_server, name):
    script, message = broken_streams()[name]
    with pytest.raises(MeasurementInvalid, match=message) as caught:
        ask(make_server(script))
    assert caught.value.exit_code == 4
    assert "r-1" in str(caught.value)


def test_a_stalled_stream_is_cut_off_by_the_watchdog(make_server):
    over = threading.Event()

    def script(exchange):
        exchange.open_stream()
        exchange.event(CUMULATIVE[0])
        over.wait(60)

    started = time.monotonic()
    with pytest.raises(MeasurementInvalid, match=r"stalled for 0\.3 s"):
        ask(make_server(script), timeout_s=60.0, stall_s=0.3)
    assert time.monotonic() - started < 30
    over.set()


def test_a_trickle_of_bytes_without_an_event_counts_as_a_stall(make_server):
    def script(exchange):
        exchange.open_stream()
        exchange.event(CUMULATIVE[0])
        for _ in range(40):
            exchange.raw(b"x")
            time.sleep(0.05)

    with pytest.raises(MeasurementInvalid, match="stalled"):
        ask(make_server(script), stall_s=0.3)


def test_a_slow_trickle_of_events_ends_at_the_request_timeout(make_server):
    def script(exchange):
        exchange.open_stream()
        for _ in range(40):
            exchange.event(CUMULATIVE[0])
            time.sleep(0.05)

    with pytest.raises(MeasurementInvalid, match=r"no complete answer in 0\.5 s"):
        ask(make_server(script), timeout_s=0.5, stall_s=0.5)


def test_an_unreachable_server_is_a_machine_error_with_a_hint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with HttpEngine(url) as engine:
        for call in (engine.health, engine.flush_cache, lambda: engine.generate(REQUEST)):
            with pytest.raises(MachineError, match="does not answer") as caught:
                call()
            assert caught.value.exit_code == 3
            assert caught.value.hint


def test_a_server_of_another_kind_is_a_machine_error(make_server):
    server = make_server(lambda exchange: exchange.reply({"detail": "Not Found"}, status=404))
    with pytest.raises(MachineError, match="no /generate"):
        ask(server)


def test_a_server_that_wants_a_key_is_a_machine_error(make_server):
    server = make_server(lambda exchange: exchange.reply({"error": "Unauthorized"}, status=401))
    with pytest.raises(MachineError, match="HTTP 401"):
        ask(server)


@pytest.mark.parametrize("url", ["localhost:30000", "http://", "ftp://x"])
def test_a_bad_url_is_bad_input(url):
    with pytest.raises(InputError):
        HttpEngine(url)


def echo(exchange):
    """Answers with ids that depend on the prompt."""
    first = exchange.body["input_ids"][0]
    finish = {"type": "length", "length": 2}
    meta = {"prompt_tokens": 1}
    exchange.stream([chunk([first], 1, **meta), chunk([first, 1], 2, finish=finish, **meta)])


def test_closed_loop_keeps_the_asked_number_in_flight_and_the_order(make_server):
    gate = threading.Barrier(64, timeout=10)  # opens only when 64 requests are there at once

    def script(exchange):
        if exchange.body["input_ids"][0] < 64:
            gate.wait()
        echo(exchange)

    server = make_server(script)
    requests = [GenerateRequest(str(index), (index,), 2) for index in range(96)]
    done = []
    with HttpEngine(server.url) as engine:
        answers = engine.generate_many(requests, concurrency=64, on_done=done.append)
    assert [answer.output_ids[0] for answer in answers] == list(range(96))
    assert len(done) == 96
    assert server.peak_in_flight == 64


def test_one_failure_ends_the_whole_run(make_server):
    def script(exchange):
        if exchange.body["input_ids"] == [5]:
            exchange.reply(b"boom", status=500)
        else:
            echo(exchange)

    server = make_server(script)
    requests = [GenerateRequest(f"r{index}", (index,), 2) for index in range(60)]
    with HttpEngine(server.url) as engine, pytest.raises(MeasurementInvalid, match="r5"):
        engine.generate_many(requests, concurrency=4)
    assert len(server.seen) < 20


def score_reply(rows, top):
    return {
        "output_ids": [],
        "meta_info": {"input_token_logprobs": rows, "input_top_logprobs": top},
    }


GOOD_ROWS = [[None, 7, None], [-0.5, 11, None], [-3.0, 12, None]]
GOOD_TOP = [None, [[-0.5, 11, None]], [[-0.25, 40, None]]]


def score(server, ids=(5, 6, 7, 11, 12), start=3):
    with HttpEngine(server.url, 2.0) as engine:
        return engine.score(ids, start)


def test_scores_are_those_of_the_forced_tokens(make_server):
    server = make_server(lambda exchange: exchange.reply(score_reply(GOOD_ROWS, GOOD_TOP)))
    scores = score(server)
    np.testing.assert_array_equal(scores.token_logprobs, [-0.5, -3.0])
    np.testing.assert_array_equal(scores.argmax_ids, [11, 40])
    np.testing.assert_array_equal(scores.margins, [0.0, 2.75])
    assert server.seen[0]["logprob_start_len"] == 2
    assert server.seen[0]["sampling_params"]["max_new_tokens"] == 0
    assert server.seen[0]["top_logprobs_num"] == 1


@pytest.mark.parametrize(
    ("rows", "top", "message"),
    [
        (GOOD_ROWS[:2], GOOD_TOP, "2 rows, not 3"),
        (GOOD_ROWS, GOOD_TOP[:2], "2 rows, not 3"),
        ([None, [-0.5, 12, None], GOOD_ROWS[2]], GOOD_TOP, "scored token 12"),
        ([None, [float("nan"), 11, None], GOOD_ROWS[2]], GOOD_TOP, "`nan`"),
        ([None, [None, 11, None], GOOD_ROWS[2]], GOOD_TOP, "`None`"),
        ([None, [float("-inf"), 11, None], GOOD_ROWS[2]], GOOD_TOP, "`-inf`"),
        (GOOD_ROWS, [None, [[float("nan"), 11, None]], GOOD_TOP[2]], "`nan`"),
        (GOOD_ROWS, [None, None, GOOD_TOP[2]], "no top"),
        ([None, [0.5, 11, None], GOOD_ROWS[2]], GOOD_TOP, "above zero"),
        ([None, [-0.2, 11, None], GOOD_ROWS[2]], GOOD_TOP, "above the argmax"),
        (None, GOOD_TOP, "no `input_token_logprobs`"),
    ],
)
def test_bad_scores_void_the_measurement(make_server, rows, top, message):
    server = make_server(lambda exchange: exchange.reply(score_reply(rows, top)))
    with pytest.raises(MeasurementInvalid, match=message):
        score(server)


def test_an_exact_tie_has_margin_zero(make_server):
    rows = [None, [-0.75, 11, None]]
    top = [None, [[-0.75, 2, None]]]
    server = make_server(lambda exchange: exchange.reply(score_reply(rows, top)))
    assert score(server, (5, 11), 1).margins.tolist() == [0.0]


def test_connections_are_reused_between_requests(make_server):
    peers = set()

    def script(exchange):
        peers.add(exchange._handler.client_address)
        exchange.stream(CUMULATIVE)

    server = make_server(script)
    with HttpEngine(server.url) as engine:
        for _ in range(5):
            engine.generate(REQUEST)
    assert len(peers) == 1


def test_the_async_client_works_inside_a_running_loop(make_server):
    server = make_server(streams(CUMULATIVE))

    async def main():
        async with AsyncHttpEngine(server.url) as engine:
            await engine.health()
            return await engine.generate(REQUEST)

    assert list(asyncio.run(main()).output_ids) == IDS
