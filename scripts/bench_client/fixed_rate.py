"""A server in SGLang's shape that streams tokens at a fixed rate, and says when it did so.

Token k of a stream leaves at `start + k / rate`, whatever the load: no model, no queue. `/stats`
gives, for each request id, when the request was complete and when its last byte was handed to the
kernel, on the machine's monotonic clock, which the client shares.

    python -m bench_client.fixed_rate --port 31900 --rate 200 --every 1 --form cumulative
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from functools import lru_cache
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TEXT_PER_TOKEN = " word"


@lru_cache(maxsize=16384)
def event(count: int, total: int, every: int, prompt_tokens: int, form: str) -> bytes:
    """The chunk that brings a stream to `count` of `total` tokens, framed for HTTP."""
    first = 0 if form == "cumulative" else max(0, count - every)
    ids = list(range(1000 + first, 1000 + count))
    done = count == total
    payload = {
        "text": _TEXT_PER_TOKEN * (count - first),
        "output_ids": ids,
        "meta_info": {
            "id": "0" * 32,
            "finish_reason": {"type": "length", "length": total} if done else None,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "cached_tokens": 0,
            "spec_verify_ct": count // max(every, 1),
            "weight_version": "default",
        },
    }
    data = b"data: " + json.dumps(payload).encode() + b"\n\n"
    if done:
        data += b"data: [DONE]\n\n"
    framed = b"%x\r\n%s\r\n" % (len(data), data)
    return framed + b"0\r\n\r\n" if done else framed


class FixedRate(asyncio.Protocol):
    """One connection; requests follow each other on it."""

    def __init__(self, options: argparse.Namespace, stats: dict[str, Any]) -> None:
        self.options, self.stats = options, stats
        self.pending = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pending += data
        while True:
            head, found, rest = bytes(self.pending).partition(b"\r\n\r\n")
            if not found:
                return
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.strip().lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            self.pending = bytearray(rest[length:])
            self.answer(head.split(b" ", 2)[1].decode(), rest[:length])

    def answer(self, path: str, body: bytes) -> None:
        """One request."""
        if path == "/generate":
            self.stream(json.loads(body))
            return
        known: dict[str, Any] = {"/stats": self.stats, "/server_info": {"version": "fixed rate"}}
        content = json.dumps(known.get(path, {})).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(content), content)
        )

    def stream(self, body: dict[str, Any]) -> None:
        """Send tokens at their times."""
        loop = asyncio.get_running_loop()
        start, every = time.monotonic(), self.options.every
        total = body["sampling_params"]["max_new_tokens"]
        name, prompt_tokens = body.get("rid") or "?", len(body["input_ids"])
        self.transport.write(_HEAD)

        def send(count: int) -> None:
            self.transport.write(event(count, total, every, prompt_tokens, self.options.form))
            if count == total:
                self.stats[name] = {"received_s": start, "sent_s": time.monotonic()}
                return
            following = min(total, count + every)
            loop.call_at(start + following / self.options.rate, send, following)

        first = min(total, every)
        loop.call_at(start + first / self.options.rate, send, first)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=200.0, help="tokens per second of a stream")
    parser.add_argument("--every", type=int, default=1, help="tokens in one chunk")
    parser.add_argument("--form", choices=("cumulative", "incremental"), default="cumulative")
    return parser.parse_args(words)


async def serve(options: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    stats: dict[str, Any] = {}
    server = await asyncio.get_running_loop().create_server(
        lambda: FixedRate(options, stats), "127.0.0.1", options.port
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(parse()))
