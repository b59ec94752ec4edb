"""URLs and replies that no honest setup would give: refused, never believed, never a crash."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from specpilot_cli.engines import http_parts, replies, wire
from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.profile.live import record_trace

_BAD_URLS = [
    "", "host", "host:1", "localhost:30000", "//host:1", "http:", "http://", "http://:30000",
    "ftp://host", "file:///etc/passwd", "https:host", "http://host:0", "http://host:65536",
    "http://host:99999999999999999999", "http://host:port", "http://host:-1",
    "http://host:1?x=1", "http://host:1#top", "http://[::1", "http://ho st:1",
    "http://host\x00:1", "http://" + "a" * 70_000, "http://\ud800:1", "http://xn--\u00fc:1",
]  # fmt: skip


@pytest.mark.parametrize("url", _BAD_URLS, ids=lambda url: ascii(url)[:40])
def test_a_bad_url_is_bad_input(url: str) -> None:
    with pytest.raises(InputError) as caught:
        HttpEngine(url)
    assert caught.value.hint == "write it as http://host:port"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:1/", "http://host:1"),
        ("HTTP://host:65535", "http://host:65535"),
        ("https://host/prefix/", "https://host/prefix"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_a_good_url_is_kept(url: str, base: str) -> None:
    with HttpEngine(url) as engine:
        assert engine.base_url == base


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000, b"1" * 5000, b"[]", b"null",
     b"NaN"],
    ids=lambda raw: repr(raw[:8]),
)  # fmt: skip
def test_what_is_no_json_object_voids_the_measurement(raw: bytes) -> None:
    with pytest.raises(MeasurementInvalid) as caught:
        replies.decode_json(raw, "r-1")
    assert "r-1" in str(caught.value)


def _chunk(**changed: Any) -> bytes:
    meta = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "finish_reason": {"type": "length", "length": 2},
        "output_top_logprobs": [[[-0.1, 5, None]], [[-0.2, 6, None]]],
    }
    return json.dumps({"output_ids": [5, 6], "meta_info": {**meta, **changed}}).encode()


@pytest.mark.parametrize("rows", [5, 0.5, "rows", True, {"a": 1}])
def test_log_probabilities_that_are_no_list_void_the_measurement(rows: Any) -> None:
    with pytest.raises(MeasurementInvalid, match="output_top_logprobs is not a list"):
        wire.StreamAssembler("r-1", 2).add(_chunk(output_top_logprobs=rows))


@pytest.mark.parametrize(
    "row", [[5], [["x", 5]], [[-0.1, "x"]], [[-0.1]], [[True, 5]], [[-1e999, 5]], [[0.5, 5]]]
)
def test_a_malformed_row_of_log_probabilities_voids_the_measurement(row: Any) -> None:
    assembler = wire.StreamAssembler("r-1", 2)
    assembler.add(_chunk(output_top_logprobs=[row, row]))
    request = GenerateRequest("r-1", (1,), 2, top_logprobs=1)
    with pytest.raises(MeasurementInvalid, match="log-probability"):
        wire.parse_generation(assembler.finish(), request, wire.Arrival(0.0, 1.0, 2.0))


_HUGE = 10**400  # no float holds it


@pytest.mark.parametrize(
    ("key", "value"),
    [("spec_verify_ct", _HUGE), ("cached_tokens", _HUGE), ("prompt_tokens", 2**31),
     ("spec_verify_ct", -1), ("cached_tokens", 1.5)],
)  # fmt: skip
def test_a_count_that_is_none_voids_the_measurement(key: str, value: Any) -> None:
    reply = json.loads(_chunk(**{key: value}))
    with pytest.raises(MeasurementInvalid, match=f"{key}` is .*, not a count") as caught:
        wire.parse_generation(reply, GenerateRequest("r-1", (1,), 2), wire.Arrival(0.0, 1.0, 2.0))
    assert len(caught.value.message) < 120


@pytest.mark.parametrize("token", [2**31, 10**30, -1, True, 5.0, None])
def test_what_cannot_be_a_token_id_voids_the_measurement(token: Any) -> None:
    assembler = wire.StreamAssembler("r-1", 2)
    with pytest.raises(MeasurementInvalid, match="no token id"):
        assembler.add(json.dumps({"output_ids": [5, token], "meta_info": {}}).encode())


@pytest.mark.parametrize(
    ("own", "top"),
    [([-_HUGE, 7], [-0.1, 7]), ([-1.0, 7], [-_HUGE, 8]), ([-1.0, 7], [-0.1, 10**30]),
     ([-1.0, 7], [-0.1, -1]), ([0.5, 7], [0.6, 8]), ([-1.0, 7], [-2.0, 8]),
     ([float("-inf"), 7], [-0.1, 8]), ([-1.0, 8], [-0.1, 8])],
)  # fmt: skip
def test_scores_that_no_scorer_gives_void_the_measurement(own: Any, top: Any) -> None:
    meta = {"input_token_logprobs": [[None, 5], own], "input_top_logprobs": [None, [top]]}
    with pytest.raises(MeasurementInvalid):
        wire.parse_scores({"meta_info": meta}, (5, 7), 1, request_id="r-1")


def test_what_a_message_shows_of_a_reply_is_short() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, "x" * 10**6, [1] * 10**6, _HUGE):
        assert len(replies.shown(value)) < 120
    reason = {"type": "abort", "message": "m" * 10**6}
    with pytest.raises(MeasurementInvalid) as caught:
        replies.finish_type({"finish_reason": reason}, "r-1")
    assert len(caught.value.message) < 300


def test_a_description_nested_too_deeply_is_refused() -> None:
    def nested(levels: int) -> bytes:
        return b'{"specpilot": ' + b"[" * levels + b"]" * levels + b"}"

    assert replies.decode_description(nested(60), "info")
    with pytest.raises(MeasurementInvalid, match="nested over 64 levels"):
        replies.decode_description(nested(400), "info")


ENDLESS: dict[str, tuple[Callable[[HttpEngine], object], type[Exception]]] = {
    "/server_info": (lambda engine: engine.server_info(), MachineError),
    "/start_profile": (lambda engine: engine.post("/start_profile", {}, limit_s=30), MachineError),
    "/generate": (
        lambda engine: engine.generate(GenerateRequest("r-1", (5,), 4)), MeasurementInvalid
    ),
    "scores": (lambda engine: engine.score((5, 6, 7), 1), MeasurementInvalid),
}  # fmt: skip


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("path", ENDLESS)
def test_a_body_without_end_is_cut_off(
    make_server: Any, monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    """Not read to an end that never comes, nor kept: whatever was asked, whatever the status."""
    monkeypatch.setattr(http_parts, "MAX_REPLY_BYTES", 1 << 20)
    sent: list[int] = []

    def script(exchange: Any) -> None:
        exchange.open_stream(status)
        while True:
            exchange.raw(b"data: " * 20_000)
            sent.append(120_000)

    call, kind = ENDLESS[path]
    with (
        HttpEngine(make_server(script).url, 60.0) as engine,
        pytest.raises(kind, match="longer than 1 MiB"),
    ):
        call(engine)
    assert sum(sent) < 64 << 20  # what the sockets hold, far from what a minute could bring


def test_a_stream_of_more_tokens_than_asked_for_is_cut_off(make_server: Any) -> None:
    """Each event is short, so no limit of bytes would end it."""

    def script(exchange: Any) -> None:
        exchange.open_stream()
        total = 0
        while True:
            total += 1
            meta = {"prompt_tokens": 1, "completion_tokens": total, "finish_reason": None}
            exchange.event({"output_ids": [7], "meta_info": meta})

    with (
        HttpEngine(make_server(script).url, 60.0) as engine,
        pytest.raises(MeasurementInvalid, match="5 tokens where 4 were asked for"),
    ):
        engine.generate(GenerateRequest("r-1", (5,), 4))


def test_a_compressed_body_is_not_unpacked(make_server: Any) -> None:
    """A thousand bytes of it may become a gigabyte; nobody asked for it."""
    bomb = gzip.compress(b" " * (8 << 20) + b"{}")

    def script(exchange: Any) -> None:
        exchange.reply(bomb, headers={"Content-Encoding": "gzip"})

    with (
        HttpEngine(make_server(script).url, 60.0) as engine,
        pytest.raises(MeasurementInvalid, match="the reply is not JSON"),
    ):
        engine.server_info()


def test_a_profiled_server_that_answers_without_end(
    make_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_parts, "MAX_REPLY_BYTES", 1 << 20)

    def script(exchange: Any) -> None:
        if exchange.path != "/start_profile":
            exchange.reply({"version": "0.5.23"})
            return
        exchange.open_stream()
        while True:
            exchange.raw(b"x" * 100_000)

    with pytest.raises(MachineError, match="no sensible answer to /start_profile"):
        record_trace(make_server(script).url, steps=2)
