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
from specpilot_cli.paired_bench.analysis import Analysis, client_cost, noise_of, remarks
from specpilot_cli.paired_bench.client import Clock
from specpilot_cli.paired_bench.journal import Journal, changed_keys
from specpilot_cli.paired_bench.machine import (
    describe_machine,
    gpu_state,
    load_average_1min,
    mechanism_state,
    recordable,
)
from specpilot_cli.paired_bench.measure import Measurement, lanes_of
from specpilot_cli.paired_bench.plan import (
    Session,
    limit_per_benchmark,
    make_plan,
    split_warmup,
)
from specpilot_cli.paired_bench.promotion import promotion_bound
from specpilot_cli.paired_bench.types import (
    AR,
    BASELINE,
    BASELINE_AGAIN,
    CANDIDATE,
    KNOWN_SYSTEMS,
    PairedBenchResult,
    PairedBenchSettings,
    PairedBenchSummary,
    Plan,
    TokenPrompt,
)
from specpilot_cli.schema.bench_run import BenchHeader, BenchSettings, BenchSystem
from specpilot_cli.settings import available_cores
from specpilot_cli.ui import Reporter, SilentReporter

ServerInfo = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class JournalFile:
    """Where to keep the journal, and whether to continue or overwrite one that exists."""

    path: Path
    resume: bool = False
    force: bool = False


def run_paired_bench(
    systems: Mapping[str, EngineClient],
    prompts: Sequence[TokenPrompt],
    *,
    settings: PairedBenchSettings | None = None,
    reporter: Reporter | None = None,
    journal: JournalFile | None = None,
    clock: Clock = time.monotonic,
    cpu_clock: Clock = time.process_time,
) -> PairedBenchResult:
    """Time `candidate` against `baseline` and decide whether to promote it (paper §3.2).

    systems: engines by name; `baseline` and `candidate` are needed. `ar` joins the comparison as a
    third interleaved system; `baseline_again`, a second launch of the baseline, is the partner of
    the A/A sessions (without it the baseline is timed against itself). All may share one device:
    one works at a time. The engines are not closed.

    Raises InputError for prompts or systems that cannot be compared, MachineError if a server is
    not there at the start. A failure after that gives a result with verdict `invalid`.
    """
    settings, reporter = settings or PairedBenchSettings(), reporter or SilentReporter()
    _check_systems(systems)
    warmup, timed = split_warmup(prompts, n_warmup=settings.warmup_requests, limit=settings.limit)
    sessions = _sessions(timed, settings, with_ar=AR in systems)
    plan = make_plan(sessions, settings)
    _announce(plan, settings, reporter)
    info = _describe_servers(systems, reporter)
    header = _header(info, settings, prompts)
    book = _open(journal, header)
    work = Measurement(lanes_of(systems), settings, reporter, book, clock, cpu_clock)
    reasons: tuple[str, ...] = ()
    try:
        plan = replace(plan, estimated_s=work.warm_up(warmup, sessions))
        work.serve(sessions[:-1])
        _announce_noise(work, reporter)
        work.serve(sessions[-1:])
    except (MeasurementInvalid, MachineError) as error:
        reasons = (f"{work.place}: {error.message}",)
        work.record_failure(reasons[0])
    finally:
        if book is not None:
            book.close()
    same_launch = BASELINE_AGAIN not in systems
    summary = _summary(work, plan, header, info, reasons, same_launch=same_launch)
    for remark in summary.warnings:
        reporter.warn(remark)
    return PairedBenchResult(summary, tuple(work.rows), timed, info)


def _check_systems(systems: Mapping[str, EngineClient]) -> None:
    missing = [name for name in (BASELINE, CANDIDATE) if name not in systems]
    unknown = [name for name in systems if name not in KNOWN_SYSTEMS]
    if missing or unknown:
        what = f"missing: {', '.join(missing)}" if missing else f"unknown: {', '.join(unknown)}"
        raise InputError(f"a paired benchmark takes the systems {', '.join(KNOWN_SYSTEMS)}; {what}")


def _open(journal: JournalFile | None, header: BenchHeader) -> Journal | None:
    if journal is None:
        return None
    return Journal.open(journal.path, header, resume=journal.resume, force=journal.force)


def _sessions(
    timed: Sequence[TokenPrompt], settings: PairedBenchSettings, *, with_ar: bool
) -> list[Session]:
    """A/A sessions first, so that the noise is known, then the comparison."""
    aa_prompts = limit_per_benchmark(timed, settings.aa_limit)
    sessions = [
        Session(f"aa{k + 1}", (BASELINE, BASELINE_AGAIN), aa_prompts)
        for k in range(settings.aa_sessions)
    ]
    compared = (BASELINE, CANDIDATE, AR) if with_ar else (BASELINE, CANDIDATE)
    return [*sessions, Session("ab", compared, tuple(timed))]


def _announce(plan: Plan, settings: PairedBenchSettings, reporter: Reporter) -> None:
    counts = ", ".join(f"{name} {n}" for name, n in plan.n_requests.items())
    reporter.note(
        f"{sum(plan.n_requests.values())} timed requests ({counts}), {settings.runs} runs, "
        f"{settings.aa_sessions} A/A session(s): {plan.n_answers} answers"
    )
    reporter.note(
        f"smallest gain found with {plan.power:.0%} power: "
        f"{plan.detectable_identical_ratio - 1:+.1%} if the outputs are identical "
        f"(assuming {plan.sigma_identical_log:.0%} request noise), "
        f"{plan.detectable_diverging_ratio - 1:+.1%} if they differ "
        f"(assuming {plan.sigma_diverging_log:.0%}); A/A noise adds twice itself"
    )


def _announce_noise(work: Measurement, reporter: Reporter) -> None:
    """Say what the comparison has to beat, now that the A/A sessions are done."""
    noise = noise_of(work.rows, work.settings, same_launch=True)
    low, high = (
        promotion_bound(base, noise.nu_log)
        for base in (work.settings.base_identical_ratio, work.settings.base_diverging_ratio)
    )
    reporter.note(
        f"A/A noise {noise.nu_log:.2%}: to be promoted, the lower bound has to exceed {low:.4f}× "
        f"({high:.4f}× if any output token differs)"
    )


def _describe_servers(systems: Mapping[str, EngineClient], reporter: Reporter) -> ServerInfo:
    """Check that each server answers and ask what it runs."""
    info: ServerInfo = {}
    for name, engine in systems.items():
        engine.health()
        info[name] = recordable(dict(engine.server_info()))
    if BASELINE_AGAIN in info:
        changed = changed_keys(info[BASELINE], info[BASELINE_AGAIN])
        if changed:
            raise InputError(
                f"the second baseline runs with other settings: {', '.join(changed[:5])}",
                hint="the A/A sessions need two launches of the very same system",
            )
    if systems[BASELINE] is systems[CANDIDATE]:
        reporter.warn("baseline and candidate are the same server: this is an A/A comparison")
    return info


def _header(
    info: ServerInfo, settings: PairedBenchSettings, prompts: Sequence[TokenPrompt]
) -> BenchHeader:
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(f"{p.request_id}\0{p.benchmark}\0{p.max_new_tokens}\0".encode())
        digest.update(f"{p.input_ids}\n".encode())
    return BenchHeader(
        specpilot_version=__version__,
        started_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        prompts_sha256=digest.hexdigest(),
        settings=BenchSettings(
            runs=settings.runs,
            batch=settings.batch,
            block_requests=settings.requests_per_block,
            aa_sessions=settings.aa_sessions,
            aa_limit=settings.aa_limit,
            limit=settings.limit,
            warmup=settings.warmup_requests,
            base_identical_ratio=settings.base_identical_ratio,
            base_diverging_ratio=settings.base_diverging_ratio,
        ),
        systems=[BenchSystem(name=name, server_info=found) for name, found in info.items()],
        environment=describe_machine(),
    )


def _summary(
    work: Measurement, plan: Plan, header: BenchHeader, info: ServerInfo,
    reasons: tuple[str, ...], *, same_launch: bool,
) -> PairedBenchSummary:  # fmt: skip
    environment = {
        **header.environment,
        "load_average_1min_end": load_average_1min(),
        "gpus_end": gpu_state(),
        "server_info": info,
    }
    warnings = _machine_remarks(header.environment, info)
    paced = tuple(name for name, found in info.items() if mechanism_state(found).get("paced"))
    invalid = PairedBenchSummary(
        verdict="invalid", reasons=reasons, warnings=tuple(warnings), settings=work.settings,
        plan=plan, decision=None, gain=None, benchmarks=(), systems=(), noise=None, over_ar=(),
        requests=(), client=None, paced=paced, prompts_sha256=header.prompts_sha256,
        started_utc=header.started_utc, wall_s=sum(end.wall_s for end in work.ends),
        environment=environment,
    )  # fmt: skip
    if reasons:
        return invalid
    analysis = Analysis(work.rows, work.settings, same_launch=same_launch)
    systems, client = analysis.systems(), client_cost(work.ends)
    return replace(
        invalid,
        verdict=analysis.decision.verdict,
        reasons=(analysis.decision.reason,),
        warnings=(*warnings, *remarks(analysis, systems, client)),
        decision=analysis.decision,
        gain=analysis.gain,
        benchmarks=analysis.benchmarks(),
        systems=systems,
        noise=analysis.noise,
        over_ar=analysis.over_ar(),
        requests=analysis.requests(),
        client=client,
    )


def _machine_remarks(environment: Mapping[str, Any], info: ServerInfo) -> list[str]:
    said = []
    load, processors = environment["load_average_1min"], available_cores()
    if load is not None and load > processors:
        said.append(f"the machine was busy: load {load:.1f} on {processors} processors")
    for name, found in info.items():
        if mechanism_state(found).get("fault"):
            said.append(f"{name} runs with an injected fault")
    return said
