"""Serving the sessions of a paired benchmark: warm up, then run by run in interleaved order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from specpilot_cli.engines.base import EngineClient, Generation
from specpilot_cli.engines.launches import relaunched
from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.paired_bench.client import BlockCost, Clock, Lane, serve_block
from specpilot_cli.paired_bench.greedy import check_greedy
from specpilot_cli.paired_bench.journal import Journal, changed_keys
from specpilot_cli.paired_bench.machine import load_average_1min, recordable
from specpilot_cli.paired_bench.plan import Session, estimate_seconds
from specpilot_cli.paired_bench.schedule import Slot, run_schedule, together
from specpilot_cli.paired_bench.stage import Launched, ServerInfo, Stage
from specpilot_cli.paired_bench.types import (
    BASELINE,
    BASELINE_AGAIN,
    PairedBenchSettings,
    TimedRequest,
    TokenPrompt,
)
from specpilot_cli.schema.bench_run import BenchFailure, BenchLaunch, BenchRunEnd
from specpilot_cli.ui import Reporter
from specpilot_cli.units import format_seconds

Served = tuple[Slot, list[Generation], BlockCost]


def lanes_of(engines: Mapping[str, EngineClient]) -> dict[str, Lane]:
    """One lane per engine: two names of one server share its prefix cache knowingly."""
    by_engine: dict[int, Lane] = {}
    for engine in engines.values():
        by_engine.setdefault(id(engine), Lane(engine))
    return {name: by_engine[id(engine)] for name, engine in engines.items()}


@dataclass(slots=True)
class Measurement:
    """A measurement under way.

    rows and ends hold complete runs only; place says what was being served, for messages. infos:
    what each system said of itself when it was first started (fresh launches only).
    """

    stage: Stage
    settings: PairedBenchSettings
    warmup: Sequence[TokenPrompt]
    reporter: Reporter
    journal: Journal | None
    clock: Clock
    cpu_clock: Clock
    rows: list[TimedRequest] = field(default_factory=list)
    ends: list[BenchRunEnd] = field(default_factory=list)
    infos: ServerInfo = field(default_factory=dict)
    expected_s: float | None = None
    place: str = "warm-up"
    _lanes: dict[str, Lane] = field(default_factory=dict)
    _began: ServerInfo = field(default_factory=dict)
    _speeds: dict[str, float] = field(default_factory=dict)
    _all: Sequence[Session] = ()
    _session: str = "warmup"
    _run: int = 0
    _system: str = BASELINE

    def serve_all(self, sessions: Sequence[Session], on_noise: Callable[[], None]) -> None:
        """Warm up and serve every run of every session that the journal does not already hold.

        on_noise: called once, after the A/A sessions. Raises MeasurementInvalid for answers that
        cannot be compared.
        """
        if not self.stage.fresh:
            names = tuple(dict.fromkeys(name for s in sessions for name in s.systems))
            with self.stage.run(names, 0) as launched:
                self._lanes = lanes_of(launched.engines)
                self._began = {name: self._described(name) for name in names}
                self._warm_up(names)
                self._announce_time(sessions, self._speeds, each_run_s=0.0)
                self._serve_sessions(sessions, on_noise)
        else:
            self._serve_sessions(sessions, on_noise)

    def _serve_sessions(self, sessions: Sequence[Session], on_noise: Callable[[], None]) -> None:
        self._all = sessions
        for index, session in enumerate(sessions):
            for run in range(self.settings.runs):
                label = f"{_title(session.name, self.settings)} run {run + 1}/{self.settings.runs}"
                done = self.journal.finished.get((session.name, run)) if self.journal else None
                if done is not None:
                    self._check_complete(session, run, done.rows)
                    self.rows.extend(done.rows)
                    self.ends.append(done.end)
                    self.reporter.note(f"{label}: already in the journal")
                elif self.stage.fresh:
                    self._serve_fresh(session, run, label)
                else:
                    self._serve_run(session, run, label)
            check_greedy(row for row in self.rows if row.session == session.name)
            following = sessions[index + 1 : index + 2]
            if session.name != "ab" and (not following or following[0].name == "ab"):
                on_noise()

    def _check_complete(self, session: Session, run: int, rows: Sequence[TimedRequest]) -> None:
        """InputError unless a run of the journal holds every answer of every system once."""
        wanted = Counter(
            (system, prompt.request_id, batch)
            for system in session.systems
            for prompt in session.prompts
            for batch in self.settings.batches
        )
        if wanted != Counter((row.system, row.request_id, row.batch) for row in rows):
            raise InputError(
                f"run {run} of session `{session.name}` holds other answers than were asked for",
                where="the journal",
                hint="it was edited or damaged; start over with --force",
            )

    def record_failure(self, reason: str) -> None:
        """Mark the journal as invalid."""
        if self.journal is not None:
            self.journal.append(
                BenchFailure(
                    session=self._session, run=self._run, system=self._system, reason=reason
                )
            )

    def _warm_up(self, names: Sequence[str]) -> None:
        """Serve the warm-up prompts on each server, flush, and keep how fast it was."""
        requested = sum(prompt.max_new_tokens for prompt in self.warmup)
        seen: dict[int, float] = {}
        for done, name in enumerate(names):
            self.reporter.progress("warm-up", done, len(names))
            lane = self._lanes[name]
            if id(lane) not in seen:
                self._at("warmup", 0, name, f"warm-up of {name}")
                lane.flush()
                start_s = self.clock()
                for batch in self.settings.batches:
                    lane.prepare(self.warmup)
                    self._serve(name, self.warmup, batch)
                seen[id(lane)] = (self.clock() - start_s) / requested / len(self.settings.batches)
                lane.flush()
            self._speeds[name] = seen[id(lane)]
        self.reporter.progress("warm-up", len(names), len(names))

    def _announce_time(
        self, sessions: Sequence[Session], speeds: Mapping[str, float], *, each_run_s: float
    ) -> None:
        runs, levels = self.settings.runs, len(self.settings.batches)
        serving_s = estimate_seconds(
            sessions, dict(speeds), runs * levels, together=self.stage.concurrent
        )
        self.expected_s = serving_s + each_run_s * runs * len(sessions)
        self.reporter.note(f"expected time: about {format_seconds(self.expected_s)}")

    def _serve_fresh(self, session: Session, run: int, label: str) -> None:
        """Start the run's servers, look at what they are, warm them up, serve, end them."""
        self._at(session.name, run, session.systems[0], f"{label}, start")
        start_s = self.clock()
        with self.stage.run(session.systems, run) as launched:
            self._lanes = lanes_of(launched.engines)
            self._record_launch(session, run, launched)
            self._warm_up(session.systems)
            if self.expected_s is None:
                speeds = {**self._speeds}
                for name in {name for s in self._all for name in s.systems} - speeds.keys():
                    speeds[name] = self._speeds[BASELINE]  # not started yet: taken for alike
                self._announce_time(self._all, speeds, each_run_s=self.clock() - start_s)
            self._serve_run(session, run, label)
            self._lanes = {}

    def _record_launch(self, session: Session, run: int, launched: Launched) -> None:
        self._began = {name: self._described(name) for name in session.systems}
        for name, info in self._began.items():
            known = BASELINE if name == BASELINE_AGAIN else name
            changed = changed_keys(self.infos.setdefault(known, info), info)
            if changed:
                raise MeasurementInvalid(
                    f"{name} was started with other settings than before: {', '.join(changed[:5])}",
                    hint="launches of one system must be alike",
                )
            if self.journal is not None:
                self.journal.append(
                    BenchLaunch(
                        session=session.name, run=run, system=name,
                        device=launched.devices.get(name), server_info=info,
                    )
                )  # fmt: skip

    def _serve_run(self, session: Session, run: int, label: str) -> None:
        rows: list[TimedRequest] = []
        costs: list[BlockCost] = []
        start_s = self.clock()
        total = len(session.prompts) * len(session.systems) * len(self.settings.batches)
        for batch in self.settings.batches:
            for slots in self._steps(session, run, batch):
                for slot, answers, cost in self._serve_slots(session, run, label, slots, batch):
                    costs.append(cost)
                    rows += self._keep(session, run, slot, answers, batch)
                self.reporter.progress(label, len(rows), total)
        end = _run_end(session.name, run, len(rows), costs, self.clock() - start_s)
        self._check_servers(session, run, label)
        if self.journal is not None:
            self.journal.append(end)
        self.rows.extend(rows)
        self.ends.append(end)

    def _described(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = recordable(dict(self._lanes[name].engine.server_info()))
        return found

    def _check_servers(self, session: Session, run: int, label: str) -> None:
        """MeasurementInvalid for a server that was started anew since the measurement began."""
        for name in session.systems:
            self._at(session.name, run, name, f"{label}, {name}")
            changed = relaunched(self._began[name], self._described(name))
            if changed:
                raise MeasurementInvalid(
                    f"{name} was started anew during the measurement; changed: "
                    f"{', '.join(changed)}",
                    hint="measure again, keep the servers running until the end, and give each an "
                    "address of its own",
                )

    def _steps(self, session: Session, run: int, batch: int) -> list[list[Slot]]:
        """What is served one after the other; slots of one step at the same time."""
        if self.stage.concurrent:
            return [together(len(session.prompts), session.systems)]
        names = [prompt.benchmark for prompt in session.prompts]
        block = self.settings.requests_per_block(batch)
        slots = run_schedule(names, session.systems, run=run, block_requests=block)
        return [[slot] for slot in slots]

    def _serve_slots(
        self, session: Session, run: int, label: str, slots: Sequence[Slot], batch: int
    ) -> list[Served]:
        self._at(session.name, run, slots[0].system, f"{label}, {slots[0].system}")

        def serve(slot: Slot) -> Served:
            prompts = [session.prompts[i] for i in slot.requests]
            try:
                return slot, *self._serve(slot.system, prompts, batch)
            except MeasurementInvalid:
                self._at(session.name, run, slot.system, f"{label}, {slot.system}")
                raise

        for slot in slots:
            self._lanes[slot.system].prepare([session.prompts[i] for i in slot.requests])
        if len(slots) == 1:
            return [serve(slots[0])]
        with ThreadPoolExecutor(len(slots)) as pool:
            return list(pool.map(serve, slots))

    def _keep(
        self, session: Session, run: int, slot: Slot, answers: Sequence[Generation], batch: int
    ) -> list[TimedRequest]:
        rows = []
        for index, answer in zip(slot.requests, answers, strict=True):
            row = TimedRequest(
                session.name, run, slot.block, slot.position, slot.system,
                session.prompts[index].benchmark, answer, batch,
            )  # fmt: skip
            rows.append(row)
            if self.journal is not None:
                self.journal.append_request(row)
        return rows

    def _serve(
        self, name: str, prompts: Sequence[TokenPrompt], batch: int
    ) -> tuple[list[Generation], BlockCost]:
        return serve_block(
            self._lanes[name].engine,
            prompts,
            batch=batch,
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
        loop_lag_p99_s=[cost.loop_lag_p99_s for cost in costs if cost.loop_lag_p99_s is not None],
        client_cpu_s=sum(cost.cpu_s for cost in costs),
        served_s=sum(cost.served_s for cost in costs),
    )
