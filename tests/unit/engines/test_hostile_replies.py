"""URLs and replies that no honest setup would give: refused, never believed, never a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specpilot_cli.engines import wire
from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.errors import InputError, MeasurementInvalid

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
        wire.decode_json(raw, "r-1")
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
        wire.StreamAssembler("r-1").add(_chunk(output_top_logprobs=rows))


@pytest.mark.parametrize(
    "row", [[5], [["x", 5]], [[-0.1, "x"]], [[-0.1]], [[True, 5]], [[-1e999, 5]], [[0.5, 5]]]
)
def test_a_malformed_row_of_log_probabilities_voids_the_measurement(row: Any) -> None:
    assembler = wire.StreamAssembler("r-1")
    assembler.add(_chunk(output_top_logprobs=[row, row]))
    request = GenerateRequest("r-1", (1,), 2, top_logprobs=1)
    with pytest.raises(MeasurementInvalid, match="log-probability"):
        wire.parse_generation(assembler.finish(), request, wire.Arrival(0.0, 1.0, 2.0))
