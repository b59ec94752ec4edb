"""Events of a Chrome trace as torch.profiler writes it, one at a time.

A trace of a busy minute is gigabytes of JSON, nearly all of it host events that nobody asks for:
the file is never held, only one event and a buffer. Plain and gzip files are told apart by their
first bytes. Cut, garbled and foreign files raise `InputError` naming line and event.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import refuse_special_file

_CHUNK_BYTES = 1 << 20
# One event is a few hundred characters; a header value (process groups) a few thousand.
_MAX_VALUE_CHARS = 8 << 20
_LOOK_AHEAD = 3  # `1e+` is the longest beginning of a number that reads as a shorter one
_GZIP_MAGIC = b"\x1f\x8b"
_SPACE = " \t\r\n"
_EVENTS_KEY = "traceEvents"
_HINT = "profile again: a trace is whole only once the server has logged that profiling is done"


class ChromeTrace:
    """A trace file. `header` holds the other top-level keys, those before the events first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._text = codecs.getincrementaldecoder("utf-8")()
        self._decode = json.JSONDecoder().raw_decode
        self._buffer, self._at, self._ended = "", 0, False
        self._lines, self._events = 1, 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event, in file order. Raises `InputError` where the file cannot be read on."""
        refuse_special_file(self.path)
        try:
            with self.path.open("rb") as raw, _unpacked(raw) as file:
                self._file = file
                yield from self._document()
        except FileNotFoundError as error:
            raise InputError(f"no such file: `{self.path}`", where=str(self.path)) from error
        except UnicodeDecodeError as error:
            raise self._error("not UTF-8 text") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._error(f"the gzip stream is cut or damaged ({error})") from error
        except OSError as error:
            raise InputError(
                f"cannot read `{self.path}`: {error.strerror or error}", where=str(self.path)
            ) from error

    def _document(self) -> Iterator[dict[str, Any]]:
        first = self._next()
        if first == "[":  # the bare form: only events
            yield from self._array()
        elif first == "{":
            yield from self._object()
        else:
            raise self._error("not a Chrome trace: it starts with neither `{` nor `[`")
        if self._next():
            raise self._error("text after the end of the trace")

    def _object(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        found = False
        while (sign := self._next()) != "}":
            if sign == ",":
                self._at += 1
                sign = self._next()
            key = self._value() if sign == '"' else None
            if not isinstance(key, str) or self._next() != ":":
                raise self._error("not JSON: a key was expected")
            self._at += 1
            if key == _EVENTS_KEY:
                if self._next() != "[":
                    raise self._error(f"`{_EVENTS_KEY}` is not a list")
                found = True
                yield from self._array()
            else:
                self.header[key] = self._value()
        self._at += 1
        if not found:
            raise self._error(f"not a Chrome trace: it has no `{_EVENTS_KEY}`")

    def _array(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        while (sign := self._next()) != "]":
            if self._events:
                if sign != ",":
                    raise self._error("not JSON: a comma was expected")
                self._at += 1
            self._events += 1
            event = self._value()
            if not isinstance(event, dict):
                raise self._error("an event is not an object")
            yield event
        self._at += 1

    def _value(self) -> Any:
        """The JSON value at the next sign; more is read until it is whole."""
        if not self._next():
            raise self._error("the file ends early")
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except RecursionError as error:
                raise self._error("nested too deeply") from error
            except json.JSONDecodeError as error:
                beyond = error.pos - self._at
                too_long = len(self._buffer) - self._at > _MAX_VALUE_CHARS
                if not too_long and self._read():
                    continue
                at = self._at + beyond
                cut = not too_long and (
                    at >= len(self._buffer.rstrip()) or error.msg.startswith("Unterminated")
                )
                problem = "the file ends early" if cut else f"not JSON: {error.msg}"
                raise self._error(problem, at=at) from error
            except ValueError as error:  # Python reads no whole number of thousands of digits
                raise self._error("a number that is too long") from error
            # The next chunk may go on with a number, but not with what has an end of its own.
            open_end = end + _LOOK_AHEAD > len(self._buffer)
            length = end - self._at
            if open_end and not isinstance(value, dict | list | str) and self._read():
                continue
            self._at += length  # a read moves the buffer, so `end` may no longer hold
            return value

    def _next(self) -> str:
        """The next sign that is no space, not consumed; empty at the end of the file."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in _SPACE:
                    return self._buffer[self._at]
                self._at += 1
            if not self._read():
                return ""

    def _read(self) -> bool:
        """Append a chunk and drop what is consumed; False at the end of the file."""
        if self._ended:
            return False
        # What can be unpacked before a cut is read first, so that the error names the place.
        data = self._file.read1(_CHUNK_BYTES)
        self._ended = not data
        chunk = self._text.decode(data, final=self._ended)
        self._lines += self._buffer.count("\n", 0, self._at)
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
        return not self._ended

    def _error(self, problem: str, *, at: int | None = None) -> InputError:
        end = self._at if at is None else min(at, len(self._buffer))
        line = self._lines + self._buffer.count("\n", 0, end)
        place = f", in event {self._events}" if self._events else ""
        return InputError(
            f"not a whole trace: {problem}{place}", where=f"{self.path}:{line}", hint=_HINT
        )


def _unpacked(raw: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    """`raw` itself, or what its gzip stream holds."""
    packed = raw.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] == _GZIP_MAGIC
    return gzip.GzipFile(fileobj=raw, mode="rb") if packed else raw
