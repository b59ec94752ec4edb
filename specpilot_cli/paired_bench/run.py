"""Runs a paired benchmark from systems and prompts to a verdict.

Everything that voids a measurement ends it at once with the verdict `invalid`: a run with a hole
in it is not repaired, and nothing is retried.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specpilot_cli import __version__
from specpilot_cli.engines.base import EngineClient
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.paired_bench.analysis import (
    Analysis,
    client_cost,
    noise_of,
    noise_remarks,
    remarks,
)
from specpilot_cli.paired_bench.announce import announce_plan, noise_sentence
from specpilot_cli.paired_bench.client import Clock
from specpilot_cli.paired_bench.gpu_watch import GpuWatch, gpu_remarks, summarise
from specpilot_cli.paired_bench.journal import Journal, changed_keys
from specpilot_cli.paired_bench.machine import (
    describe_machine,
    gpu_state,
    load_average_1min,
    mechanism_state,
)
from specpilot_cli.paired_bench.measure import Measurement
from specpilot_cli.paired_bench.plan import (
    Session,
    limit_per_benchmark,
    make_plan,
    split_warmup,
)
from specpilot_cli.paired_bench.stage import ResidentStage, ServerInfo, Stage
from specpilot_cli.paired_bench.types import (
    AR,
    BASELINE,
    BASELINE_AGAIN,
    CANDIDATE,
    KNOWN_SYSTEMS,
    Noise,
    PairedBenchResult,
    PairedBenchSettings,
    PairedBenchSummary,
    Plan,
    PromptForm,
    TokenPrompt,
)
from specpilot_cli.schema.bench_run import BenchHeader, BenchSettings, BenchSystem
from specpilot_cli.settings import available_cores
from specpilot_cli.ui import Reporter, SilentReporter


@dataclass(frozen=True, slots=True)
class JournalFile:
    """Where to keep the journal, and whether to continue or overwrite one that exists.

    redact: keep output ids out of it; their hashes stay.
    """

    path: Path
    resume: bool = False
    force: bool = False
    redact: bool = False


@dataclass(frozen=True, slots=True)
class Basis:
    """What a benchmark is told beside systems, prompts and settings.

    noise: A/A noise of an earlier calibration. form: how texts became token ids. calibrated: what
    the baseline of that calibration said of itself; ours must be the same.
    """

    noise: Noise | None = None
    form: PromptForm | None = None
    calibrated: Mapping[str, Any] | None = None


def run_paired_bench(
    systems: Mapping[str, EngineClient] | Stage,
    prompts: Sequence[TokenPrompt],
    *,
    settings: PairedBenchSettings | None = None,
    reporter: Reporter | None = None,
    journal: JournalFile | None = None,
    basis: Basis | None = None,
    clock: Clock = time.monotonic,
    cpu_clock: Clock = time.process_time,
) -> PairedBenchResult:
    """Time `candidate` against `baseline` and decide whether to promote it (paper §3.2).

    systems: engines by name, or a stage that starts them; `baseline` and `candidate` are needed.
    `ar` joins the comparison as a third interleaved system; `baseline_again`, a second launch of
    the baseline, is the partner of the A/A sessions (without it the baseline is timed against
    itself). Engines may share one device: one works at a time. They are not closed.

    Raises InputError for prompts or systems that cannot be compared, MachineError if a server is
    not there at the start. A failure after that gives a result with verdict `invalid`.
    """
    settings, basis = settings or PairedBenchSettings(), basis or Basis()
    if (settings.aa_sessions == 0) == (basis.noise is None):
        raise InputError(
            "the promotion bound needs the A/A noise: sessions here, or one calibration",
            hint="without the baseline timed against itself there is no noise to compare with",
        )
    reporter = reporter or SilentReporter()
    bench = _Bench(_stage_of(systems, reporter), settings, basis, reporter)
    return bench.run(prompts, journal, compare=True, clock=clock, cpu_clock=cpu_clock)


def run_calibration(
    systems: Mapping[str, EngineClient] | Stage,
    prompts: Sequence[TokenPrompt],
    *,
    settings: PairedBenchSettings,
    reporter: Reporter | None = None,
    journal: JournalFile | None = None,
    form: PromptForm | None = None,
    clock: Clock = time.monotonic,
    cpu_clock: Clock = time.process_time,
) -> PairedBenchResult:
    """Measure the A/A noise alone: `settings.aa_sessions` sessions of the baseline against itself.

    The result's verdict is `ok`, or `invalid` if a request failed; its noise serves later
    comparisons (`Basis.noise`). Raises as `run_paired_bench`.
    """
    if settings.aa_sessions < 1:
        raise InputError("a calibration needs at least one A/A session", where="calibrate")
    reporter = reporter or SilentReporter()
    bench = _Bench(_stage_of(systems, reporter), settings, Basis(form=form), reporter)
    return bench.run(prompts, journal, compare=False, clock=clock, cpu_clock=cpu_clock)


def _stage_of(systems: Mapping[str, EngineClient] | Stage, reporter: Reporter) -> Stage:
    if not isinstance(systems, Mapping):
        return systems
    if CANDIDATE in systems and systems.get(BASELINE) is systems[CANDIDATE]:
        reporter.warn("baseline and candidate are the same server: this is an A/A comparison")
    return ResidentStage(systems)


@dataclass(frozen=True, slots=True)
class _Bench:
    """One benchmark from its plan to its result."""

    stage: Stage
    settings: PairedBenchSettings
    basis: Basis
    reporter: Reporter

    def run(
        self, prompts: Sequence[TokenPrompt], journal: JournalFile | None, *, compare: bool,
        clock: Clock, cpu_clock: Clock,
    ) -> PairedBenchResult:  # fmt: skip
        settings, reporter = self.settings, self.reporter
        _check_systems(self.stage.names, compare=compare)
        warmup, timed = split_warmup(
            prompts, n_warmup=settings.warmup_requests, limit=settings.limit
        )
        sessions = _sessions(timed, settings, self.stage.names, compare=compare)
        nu_log = 0.0 if self.basis.noise is None else self.basis.noise.nu_log
        plan = make_plan(sessions, settings, nu_log=nu_log)
        announce_plan(plan, settings, reporter)
        if self.basis.noise is not None:
            reporter.note(noise_sentence(self.basis.noise, settings))
        info = self.stage.describe()
        self._check_calibrated(info)
        header = self._header(info, prompts)
        book = _open(journal, header)
        work = Measurement(self.stage, settings, warmup, reporter, book, clock, cpu_clock)
        if self.stage.fresh and self.basis.calibrated is not None:
            work.infos[BASELINE] = dict(self.basis.calibrated)  # the first launch must be alike
        reasons: tuple[str, ...] = ()
        try:
            with GpuWatch() as watch:
                work.serve_all(sessions, lambda: reporter.note(self._noise_sentence(work)))
        except (MeasurementInvalid, MachineError) as error:
            reasons = (f"{work.place}: {error.message}",)
            work.record_failure(reasons[0])
        finally:
            if book is not None:
                book.close()
        plan = replace(plan, estimated_s=work.expected_s)
        ab = [row for row in work.rows if row.session == "ab"]
        facts = _Facts(
            plan, header, {**info, **work.infos}, summarise(watch.samples, ab), reasons,
            info if self.stage.fresh else {},
        )  # fmt: skip
        summary = self._summary(work, facts, compare=compare)
        for remark in summary.warnings:
            reporter.warn(remark)
        return PairedBenchResult(summary, tuple(work.rows), timed, facts.info)

    def _check_calibrated(self, info: ServerInfo) -> None:
        if self.basis.calibrated is None or self.stage.fresh:
            return
        changed = changed_keys(self.basis.calibrated, info[BASELINE])
        if changed:
            raise InputError(
                f"the noise was calibrated on another baseline; changed: {', '.join(changed[:5])}",
                hint="calibrate again with this baseline",
            )

    def _noise(self, work: Measurement) -> Noise:
        if self.basis.noise is not None:
            return self.basis.noise
        same_launch = not self.stage.fresh and BASELINE_AGAIN not in self.stage.names
        return noise_of(work.rows, self.settings, same_launch=same_launch)

    def _noise_sentence(self, work: Measurement) -> str:
        return noise_sentence(self._noise(work), self.settings)

    def _header(self, info: ServerInfo, prompts: Sequence[TokenPrompt]) -> BenchHeader:
        settings = self.settings
        return BenchHeader(
            specpilot_version=__version__,
            started_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            prompts_sha256=prompts_digest(prompts),
            settings=BenchSettings(
                runs=settings.runs,
                batches=settings.batches,
                block_requests=settings.block_requests,
                aa_sessions=settings.aa_sessions,
                aa_limit=settings.aa_limit,
                limit=settings.limit,
                warmup=settings.warmup_requests,
                base_identical_ratio=settings.base_identical_ratio,
                base_diverging_ratio=settings.base_diverging_ratio,
            ),
            systems=[BenchSystem(name=name, server_info=found) for name, found in info.items()],
            environment=describe_machine(),
            noise_sha256=None if self.basis.noise is None else self.basis.noise.source,
        )

    def _summary(self, work: Measurement, facts: _Facts, *, compare: bool) -> PairedBenchSummary:
        environment = {
            **facts.header.environment,
            "load_average_1min_end": load_average_1min(),
            "gpus_end": gpu_state(),
            "gpus_while_serving": facts.gpus,
            "server_info": facts.info,
            "launch_plans": facts.launch_plans,
        }
        warnings = _machine_remarks(facts)
        paced = tuple(n for n, found in facts.info.items() if mechanism_state(found).get("paced"))
        invalid = PairedBenchSummary(
            verdict="invalid", reasons=facts.reasons, warnings=tuple(warnings),
            settings=self.settings, plan=facts.plan, decision=None, gain=None, benchmarks=(),
            systems=(), noise=None, over_ar=(), requests=(), client=None, paced=paced,
            prompts_sha256=facts.header.prompts_sha256, started_utc=facts.header.started_utc,
            wall_s=sum(end.wall_s for end in work.ends), environment=environment,
            prompt_form=self.basis.form,
        )  # fmt: skip
        if facts.reasons:
            return invalid
        noise, client = self._noise(work), client_cost(work.ends)
        if not compare:
            return replace(
                invalid, verdict="ok", reasons=(noise_sentence(noise, self.settings),),
                noise=noise,
                client=client, warnings=(*warnings, *noise_remarks(noise)),
            )  # fmt: skip
        analysis = Analysis(work.rows, self.settings, noise)
        systems = analysis.systems()
        return replace(
            invalid,
            verdict=analysis.decision.verdict,
            reasons=(analysis.decision.reason,),
            warnings=(*warnings, *remarks(analysis, systems, client)),
            decision=analysis.decision,
            gain=analysis.gain,
            benchmarks=analysis.benchmarks(),
            systems=systems,
            levels=analysis.levels(),
            noise=noise,
            over_ar=analysis.over_ar(),
            requests=analysis.requests(),
            client=client,
        )


@dataclass(frozen=True, slots=True)
class _Facts:
    """What stands around the numbers: the plan, the header, the servers, the GPUs, failures.

    launch_plans: how systems were started, where every run had its own.
    """

    plan: Plan
    header: BenchHeader
    info: ServerInfo
    gpus: list[dict[str, Any]]
    reasons: tuple[str, ...]
    launch_plans: ServerInfo


def _check_systems(names: Sequence[str], *, compare: bool) -> None:
    needed = (BASELINE, CANDIDATE) if compare else (BASELINE,)
    missing = [name for name in needed if name not in names]
    unknown = [name for name in names if name not in KNOWN_SYSTEMS]
    if missing or unknown:
        what = f"missing: {', '.join(missing)}" if missing else f"unknown: {', '.join(unknown)}"
        raise InputError(f"a paired benchmark takes the systems {', '.join(KNOWN_SYSTEMS)}; {what}")


def _open(journal: JournalFile | None, header: BenchHeader) -> Journal | None:
    if journal is None:
        return None
    return Journal.open(
        journal.path, header, resume=journal.resume, force=journal.force, redact=journal.redact
    )


def _sessions(
    timed: Sequence[TokenPrompt], settings: PairedBenchSettings, names: Sequence[str], *,
    compare: bool,
) -> list[Session]:  # fmt: skip
    """A/A sessions first, so that the noise is known, then the comparison."""
    aa_prompts = limit_per_benchmark(timed, settings.aa_limit)
    sessions = [
        Session(f"aa{k + 1}", (BASELINE, BASELINE_AGAIN), aa_prompts)
        for k in range(settings.aa_sessions)
    ]
    if not compare:
        return sessions
    compared = (BASELINE, CANDIDATE, AR) if AR in names else (BASELINE, CANDIDATE)
    return [*sessions, Session("ab", compared, tuple(timed))]


def prompts_digest(prompts: Sequence[TokenPrompt]) -> str:
    """SHA-256 over ids, benchmarks, limits and token ids of all prompts, in order."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(f"{p.request_id}\0{p.benchmark}\0{p.max_new_tokens}\0".encode())
        digest.update(f"{p.input_ids}\n".encode())
    return digest.hexdigest()


def _machine_remarks(facts: _Facts) -> list[str]:
    said = []
    load, processors = facts.header.environment["load_average_1min"], available_cores()
    if load is not None and load > processors:
        said.append(f"the machine was busy: load {load:.1f} on {processors} processors")
    for name, found in facts.info.items():
        if mechanism_state(found).get("fault"):
            said.append(f"{name} runs with an injected fault")
        slowed = mechanism_state(found).get("slowed_ratio")
        if isinstance(slowed, int | float) and slowed:
            said.append(f"{name} is made {slowed:.1%} slower on purpose")
    return [*said, *gpu_remarks(facts.gpus)]
