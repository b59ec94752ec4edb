"""Server-sent events from raw bytes, with the arrival time of each event."""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.engines.http_parts import check_size


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One `data:` line; times are when its first and last byte arrived, in seconds."""

    payload: bytes
    first_byte_s: float
    last_byte_s: float


class SseParser:
    """Splits a byte stream into `data:` payloads.

    Timing needs the moment an event began to arrive, which line iterators hide.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._line_start_s = 0.0

    def feed(self, raw: bytes, now_s: float) -> list[SseEvent]:
        """Take bytes that arrived at `now_s`; return the events they complete.

        Raises `ReplyTooLarge` for a line that is longer than an event may be.
        """
        events = []
        for part in raw.splitlines(keepends=True):
            if not self._pending:
                self._line_start_s = now_s
            self._pending += part
            check_size(len(self._pending))
            if not part.endswith(b"\n"):
                continue
            line = bytes(self._pending).strip()
            self._pending.clear()
            if line.startswith(b"data:"):
                events.append(SseEvent(line[5:].strip(), self._line_start_s, now_s))
        return events
