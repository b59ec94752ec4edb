"""Serving the sessions of a paired benchmark: warm up, then run by run in interleaved order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specpilot_cli.engines.base import EngineClient, Generation
from specpilot_cli.paired_bench.client import BlockCost, Clock, Lane, serve_block
from specpilot_cli.paired_bench.journal import Journal
from specpilot_cli.paired_bench.machine import load_average_1min
from specpilot_cli.paired_bench.plan import Session, estimate_seconds
from specpilot_cli.paired_bench.schedule import run_schedule
from specpilot_cli.paired_bench.types import (
    BASELINE,
    BASELINE_AGAIN,
    KNOWN_SYSTEMS,
    PairedBenchSettings,
    TimedRequest,
    TokenPrompt,
)
from specpilot_cli.schema.bench_run import BenchFailure, BenchRunEnd
from specpilot_cli.ui import Reporter
from specpilot_cli.units import format_seconds


def lanes_of(systems: Mapping[str, EngineClient]) -> dict[str, Lane]:
    """One lane per engine; the A/A partner is the baseline itself unless a second one is given."""
    by_engine: dict[int, Lane] = {}
    for engine in systems.values():
        by_engine.setdefault(id(engine), Lane(engine))
    lanes = {name: by_engine[id(engine)] for name, engine in systems.items()}
    lanes.setdefault(BASELINE_AGAIN, lanes[BASELINE])
    return lanes


@dataclass(slots=True)
class Measurement:
    """A measurement under way.

    rows and ends hold complete runs only; place says what was being served, for messages.
    """

    lanes: Mapping[str, Lane]
    settings: PairedBenchSettings
    reporter: Reporter
    journal: Journal | None
    clock: Clock
    cpu_clock: Clock
    rows: list[TimedRequest] = field(default_factory=list)
    ends: list[BenchRunEnd] = field(default_factory=list)
    place: str = "warm-up"
    _session: str = "warmup"
    _run: int = 0
    _system: str = BASELINE

    def warm_up(self, prompts: Sequence[TokenPrompt], sessions: Sequence[Session]) -> float:
        """Serve the warm-up prompts on each server, flush, and return the expected time in s."""
        names = [n for n in KNOWN_SYSTEMS if any(n in session.systems for session in sessions)]
        requested = sum(prompt.max_new_tokens for prompt in prompts)
        s_per_token: dict[int, float] = {}
        for done, name in enumerate(names):
            self.reporter.progress("warm-up", done, len(names))
            lane = self.lanes[name]
            if id(lane) in s_per_token:
                continue
            self._at("warmup", 0, name, f"warm-up of {name}")
            lane.flush()
            start_s = self.clock()
            self._serve(name, prompts)
            s_per_token[id(lane)] = (self.clock() - start_s) / requested
            lane.flush()
        self.reporter.progress("warm-up", len(names), len(names))
        speed = {name: s_per_token[id(self.lanes[name])] for name in names}
        expected_s = estimate_seconds(sessions, speed, self.settings.runs)
        self.reporter.note(f"expected time: about {format_seconds(expected_s)}")
        return expected_s

    def serve(self, sessions: Sequence[Session]) -> None:
        """Serve every run of every session that the journal does not already hold."""
        for session in sessions:
            for run in range(self.settings.runs):
                label = f"{_title(session.name, self.settings)} run {run + 1}/{self.settings.runs}"
                done = self.journal.finished.get((session.name, run)) if self.journal else None
                if done is not None:
                    self.rows.extend(done.rows)
                    self.ends.append(done.end)
                    self.reporter.note(f"{label}: already in the journal")
                else:
                    self._serve_run(session, run, label)

    def record_failure(self, reason: str) -> None:
        """Mark the journal as invalid."""
        if self.journal is not None:
            self.journal.append(
                BenchFailure(
                    session=self._session, run=self._run, system=self._system, reason=reason
                )
            )

    def _serve_run(self, session: Session, run: int, label: str) -> None:
        names = [prompt.benchmark for prompt in session.prompts]
        block = self.settings.requests_per_block
        rows: list[TimedRequest] = []
        costs: list[BlockCost] = []
        start_s, total = self.clock(), len(names) * len(session.systems)
        for slot in run_schedule(names, session.systems, run=run, block_requests=block):
            self._at(session.name, run, slot.system, f"{label}, {slot.system}")
            prompts = [session.prompts[i] for i in slot.requests]
            self.lanes[slot.system].prepare(prompts)
            answers, cost = self._serve(slot.system, prompts)
            costs.append(cost)
            for prompt, answer in zip(prompts, answers, strict=True):
                row = TimedRequest(
                    session.name, run, slot.block, slot.position, slot.system, prompt.benchmark,
                    answer,
                )  # fmt: skip
                rows.append(row)
                if self.journal is not None:
                    self.journal.append_request(row)
            self.reporter.progress(label, len(rows), total)
        end = _run_end(session.name, run, len(rows), costs, self.clock() - start_s)
        if self.journal is not None:
            self.journal.append(end)
        self.rows.extend(rows)
        self.ends.append(end)

    def _serve(
        self, name: str, prompts: Sequence[TokenPrompt]
    ) -> tuple[list[Generation], BlockCost]:
        return serve_block(
            self.lanes[name].engine,
            prompts,
            batch=self.settings.batch,
            clock=self.clock,
            cpu_clock=self.cpu_clock,
        )

    def _at(self, session: str, run: int, system: str, place: str) -> None:
        self._session, self._run, self._system, self.place = session, run, system, place


def _title(session: str, settings: PairedBenchSettings) -> str:
    if session == "ab":
        return "comparison"
    return f"A/A {session.removeprefix('aa')}/{settings.aa_sessions}"


def _run_end(
    session: str, run: int, n_requests: int, costs: Sequence[BlockCost], wall_s: float
) -> BenchRunEnd:
    return BenchRunEnd(
        session=session,
        run=run,
        n_requests=n_requests,
        wall_s=wall_s,
        load_average_1min=load_average_1min(),
        call_overhead_s=[cost.call_overhead_s for cost in costs],
        refill_gaps_s=[gap for cost in costs for gap in cost.refill_gaps_s],
        client_cpu_s=sum(cost.cpu_s for cost in costs),
        served_s=sum(cost.served_s for cost in costs),
    )
