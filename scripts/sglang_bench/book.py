"""The result of a run, written anew after every measurement, so that an end at any time is fine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_bench.fleet import gpu_state
from sglang_bench.load import BadAnswer, get_json, prompts_of, steady_ms, together
from sglang_bench.stats import PairedRatio, Spread, orders
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.report.json_out import build_envelope, render_json

COMMAND = "scripts/measure_sglang_w12.py"
LEAST_ROUNDS = 3


class Clock:
    """Seconds that are left of a budget."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s
        self._start = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._start


class Book:
    """Results by kind; `put` writes the whole document."""

    def __init__(
        self, path: Path, clock: Clock, setup: dict[str, Any], *, command: str = COMMAND
    ) -> None:
        self.path, self.clock, self._command = path, clock, command
        self._lock = threading.RLock()  # the demo pair is asked beside what is loading
        self.results: dict[str, Any] = {
            "setup": setup, "servers": {}, "timings": {}, "failures": [], "log": [],
        }  # fmt: skip

    def put(self, kind: str, name: str, value: Any) -> None:
        """Keep `value` under `kind` and `name`, and save."""
        with self._lock:
            self.results.setdefault(kind, {})[name] = value
            self.save()

    def note(self, text: str) -> None:
        """A line with the time, on the terminal and in the result."""
        line = f"{self.clock.spent_s:6.1f} s  {text}"
        print(line, flush=True)
        with self._lock:
            self.results["log"].append(line)
            self.save()

    def fail(self, what: str, error: BaseException) -> None:
        """A failure that ends one measurement, not the run."""
        with self._lock:
            self.results["failures"].append(
                {"what": what, "error": f"{type(error).__name__}: {error}"}
            )
        self.note(f"FAILED {what}: {type(error).__name__}: {str(error)[:1500]}")

    def save(self) -> None:
        """Write the document atomically."""
        with self._lock:
            text = render_json(build_envelope(self._command, self.results))
            atomic_write_text(self.path, text, force=True)


@dataclass(frozen=True, slots=True)
class Timing:
    """One comparison: servers that answer the same requests in turns.

    servers: name -> URL; the first is what the others are compared with. per: "tokens" or "steps".
    requests: at once. new_tokens: of each request. rounds: every server once a round, in turned
    order. every: tokens between two events of a stream.
    """

    name: str
    servers: dict[str, str]
    requests: int
    new_tokens: int
    rounds: int
    vocabulary: int
    per: str = "tokens"
    prompt_tokens: int = 128
    every: int = 8

    def warm(self) -> None:
        """Let every server meet these batch sizes once, so that nothing compiles while timed."""
        for url in self.servers.values():
            self._block(url, seed=-1, new_tokens=4 * self.every)

    def block(self, name: str, seed: int) -> dict[str, Any]:
        """One server's turn: its milliseconds per token or step and what it says itself."""
        streams = self._block(self.servers[name], seed=seed, new_tokens=self.new_tokens)
        state = get_json(self.servers[name], "/server_info")["internal_states"][0]
        return {
            "server": name,
            "ms": steady_ms(streams, per=self.per),
            "last_event_ms": 1e3 * (max(s.events[-1].at_s for s in streams)
                                    - min(s.events[0].at_s for s in streams)),
            "verify_steps": [s.events[-1].steps for s in streams],
            "server_tokens_per_s": state.get("last_gen_throughput"),
            "server_accept_length": state.get("avg_spec_accept_length"),
        }  # fmt: skip

    def _block(self, url: str, *, seed: int, new_tokens: int) -> Any:
        prompts = prompts_of(self.requests, self.prompt_tokens, self.vocabulary, seed=seed)
        return together(url, prompts, new_tokens, every=self.every)


def measure(book: Book, timing: Timing, *, reserve_s: float) -> None:
    """Time servers in turns; stop early, after three rounds, when only `reserve_s` are left."""
    names = list(timing.servers)
    timing.warm()
    rounds: list[dict[str, Any]] = []
    for number, order in enumerate(orders(names, timing.rounds)):
        if number >= LEAST_ROUNDS and book.clock.left_s < reserve_s:
            break
        blocks = [_block(book, timing, name, number) for name in order]
        rounds.append({"blocks": blocks, "gpu": gpu_state()})
        book.put("timings", timing.name, {
            "requests": timing.requests, "new_tokens": timing.new_tokens, "per": timing.per,
            "prompt_tokens": timing.prompt_tokens, "base": names[0],
            **summary(names, rounds), "rounds": rounds,
        })  # fmt: skip
    book.note(f"{timing.name}: {one_line(book.results['timings'][timing.name])}")


def _block(book: Book, timing: Timing, name: str, number: int) -> dict[str, Any]:
    """A block; once more, said aloud, if the first try cannot be timed."""
    try:
        return timing.block(name, seed=number)
    except BadAnswer as error:
        book.note(f"{timing.name}, {name}, round {number} again: {error}")
        return timing.block(name, seed=number)


def summary(names: Sequence[str], rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spread per server and, with two rounds or more, the ratio of every server to the first."""
    ms = {
        name: [b["ms"] for r in rounds for b in r["blocks"] if b["server"] == name]
        for name in names
    }
    found: dict[str, Any] = {"ms": {name: asdict(Spread.of(ms[name])) for name in names}}
    if len(rounds) > 1:
        found["base_over"] = {
            name: asdict(PairedRatio.of(ms[names[0]], ms[name])) for name in names[1:]
        }
    return found


def one_line(timing: dict[str, Any]) -> str:
    """A timing in words."""
    parts = [f"{name} {spread['median']:.3f} ms" for name, spread in timing["ms"].items()]
    for name, found in timing.get("base_over", {}).items():
        low, high = found["interval"]["low"], found["interval"]["high"]
        parts.append(f"{timing['base']}/{name} {found['ratio']:.4f} [{low:.4f}, {high:.4f}]")
    return ", ".join(parts)
