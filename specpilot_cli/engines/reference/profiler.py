"""Where a step of the reference engine spends its time, and how step time grows with rows.

The profile times the engine's own functions, nested scopes exclusively, by wrapping them for the
length of one block of steps; blocks without wrappers alternate with them and give the true step
time. The curve interleaves all row counts, so a machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli import __version__
from specpilot_cli.engines.reference.accounting import StepShape, step_work
from specpilot_cli.engines.reference.peaks import measure_peaks
from specpilot_cli.engines.reference.scopes import ScopeTimer, cost_of_one_scope, instrument
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.engines.reference.stepping import BlockStats, StepRunner
from specpilot_cli.errors import InputError
from specpilot_cli.io.cpu_info import cpu_name
from specpilot_cli.schema.gpu_profile import ComputeType
from specpilot_cli.schema.step_profile import (
    DeviceInfo,
    EngineInfo,
    KernelClass,
    ModelInfo,
    StepProfile,
    StepSpan,
    StepTimeCurve,
    StepTimePoint,
)
from specpilot_cli.ui import Reporter, SilentReporter

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine

ENGINE = EngineInfo(name="specpilot-reference", version=__version__)
# Key of the stock chain among interleaved row counts: no tree has no row.
_CHAIN = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure: `repeats` blocks of `steps` steps, `concurrency` requests at once.

    `prompts` are token ids; `new_tokens` is how far each is decoded before the next one starts.
    """

    prompts: Sequence[Sequence[int]]
    steps: int = 12
    repeats: int = 5
    concurrency: int = 1
    new_tokens: int = 128
    real_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.prompts:
            raise InputError(
                "profiling needs at least one prompt", hint="give --prompts FILE with prompts in it"
            )
        if min(self.steps, self.repeats, self.concurrency, self.new_tokens) < 1:
            raise InputError("steps, repeats, concurrency and new tokens must be at least 1")


def profile_steps(
    engine: ReferenceEngine,
    plan: Plan,
    *,
    device: DeviceInfo | None = None,
    reporter: Reporter = SilentReporter(),
) -> StepProfile:
    """One step of the engine's own mode by kernel class.

    `t_step_s` is the median of the blocks without timers, `t_prof_s` and all classes come from
    the median block with timers, the timers' own cost taken out. No `tau`: the few steps of a
    profile see the start of a few requests, while tokens per step belong to a whole request set.
    """
    runner = StepRunner(engine, engine.spec, plan)
    runner.block(plan.steps)
    per_call_s = cost_of_one_scope()
    plain: list[BlockStats] = []
    timed: list[tuple[BlockStats, ScopeTimer]] = []
    for repeat in range(plan.repeats):
        plain.append(runner.block(plan.steps))
        timer = ScopeTimer(per_call_s)
        with instrument(engine, runner.core, timer):
            timed.append((runner.block(plan.steps, before=timer.start, after=timer.stop), timer))
        reporter.progress("profiling steps", repeat + 1, plan.repeats)
    stats, timer = sorted(timed, key=lambda entry: entry[0].mean_s)[len(timed) // 2]
    steps = stats.steps
    overhead_s = timer.overhead_s() / steps
    shape = _shape(stats, engine.spec)
    return StepProfile(
        schema_version=1,
        engine=ENGINE,
        device=device or describe_device(engine),
        target=ModelInfo(name=engine.target_path.name, sha256=engine.hashes["target"]),
        drafter=_drafter_info(engine),
        dtype=_dtype(engine),
        mode=engine.spec.mode,
        nodes=engine.spec.drafts,
        rows=engine.spec.rows,
        draft_block=engine.spec.block if engine.spec.mode != "ar" else None,
        steps=steps,
        t_step_s=statistics.median(block.mean_s for block in plain),
        t_prof_s=stats.mean_s - overhead_s,
        tau=None,
        classes=_classes(engine, timer, shape, steps),
        spans=tuple(
            StepSpan(name=name, seconds=seconds / steps) for name, seconds in timer.spans.items()
        ),
        source=_source(plan, stats),
    )


def step_time_curve(
    engine: ReferenceEngine,
    plan: Plan,
    rows: Sequence[int],
    *,
    block: int = 16,
    device: DeviceInfo | None = None,
    reporter: Reporter = SilentReporter(),
) -> StepTimeCurve:
    """Step time of best-first trees against rows (nodes + 1), drafting included; one AR step.

    A row count of 1 is plain decoding and is covered by `ar_step_s`. Raises `InputError` without
    a drafter or without a row count above 1.
    """
    specs = _curve_specs(engine, rows, block)
    times = _interleaved_times(engine, specs, plan, reporter)
    return _curve(engine, plan, times, block=block, device=device)


def step_times_beside_chain(
    engine: ReferenceEngine,
    plan: Plan,
    rows: Sequence[int],
    *,
    block: int,
    chain_block: int,
    device: DeviceInfo | None = None,
    reporter: Reporter = SilentReporter(),
) -> tuple[StepTimeCurve, float]:
    """`step_time_curve`, and the seconds of a stock chain's step timed in the same rounds.

    Times from different minutes of a busy machine do not compare; these do.
    """
    chain = {_CHAIN: SpecConfig("chain", chain_block)}
    specs = chain | _curve_specs(engine, rows, block)
    times = _interleaved_times(engine, specs, plan, reporter)
    curve = _curve(engine, plan, times, block=block, device=device)
    return curve, statistics.median(times[_CHAIN])


def _curve_specs(engine: ReferenceEngine, rows: Sequence[int], block: int) -> dict[int, SpecConfig]:
    """Plain decoding under 1, and a tree for every other row count."""
    if engine.drafter is None:
        raise InputError("a step-time curve needs a drafter", hint="give --drafter DIR")
    engine.check_block(block, "--tree-block")
    wanted = sorted({count for count in rows if count > 1})
    if not wanted:
        raise InputError(
            "a step-time curve needs a row count above 1",
            where="--rows",
            hint="write them as 1,8,16",
        )
    return {1: SpecConfig(mode="ar")} | {
        count: SpecConfig(mode="tree", block=block, n_nodes=count - 1) for count in wanted
    }


def _curve(
    engine: ReferenceEngine,
    plan: Plan,
    times: Mapping[int, Sequence[float]],
    *,
    block: int,
    device: DeviceInfo | None,
) -> StepTimeCurve:
    return StepTimeCurve(
        schema_version=1,
        name="specpilot-reference-cpu",
        engine=ENGINE,
        device=device or describe_device(engine),
        target=ModelInfo(name=engine.target_path.name, sha256=engine.hashes["target"]),
        drafter=_drafter_info(engine) or ModelInfo(name="drafter"),
        dtype=_dtype(engine),
        ar_step_s=statistics.median(times[1]),
        ar_range_s=(min(times[1]), max(times[1])),
        includes_drafting=True,
        points=tuple(
            StepTimePoint(
                rows=count,
                step_s=statistics.median(seconds),
                draft_block=block,
                range_s=(min(seconds), max(seconds)),
            )
            for count, seconds in times.items()
            if count > 1
        ),
        source=f"specpilot profile: medians of {plan.repeats} interleaved blocks of {plan.steps} "
        f"steps, {plan.concurrency} requests in flight, best-first trees",
    )


def _interleaved_times(
    engine: ReferenceEngine, specs: Mapping[int, SpecConfig], plan: Plan, reporter: Reporter
) -> dict[int, list[float]]:
    """Seconds per step of every block, by row count; one block of each in every round."""
    runners = {count: StepRunner(engine, spec, plan) for count, spec in specs.items()}
    for runner in runners.values():
        runner.block(2)
    times: dict[int, list[float]] = {count: [] for count in specs}
    for repeat in range(plan.repeats):
        for count, runner in runners.items():
            times[count].append(runner.block(plan.steps).mean_s)
        reporter.progress("step times", repeat + 1, plan.repeats)
    return times


def describe_device(engine: ReferenceEngine) -> DeviceInfo:
    """This CPU with its measured peaks, on a working set as large as the weights."""
    peaks = measure_peaks(engine.model.embed_tokens.weight.dtype, engine.weight_bytes)
    return DeviceInfo(name=cpu_name(), kind="cpu", threads=engine.threads, peaks=peaks)


def _classes(
    engine: ReferenceEngine, timer: ScopeTimer, shape: StepShape, steps: int
) -> tuple[KernelClass, ...]:
    drafter = engine.drafter if engine.spec.mode != "ar" else None
    work = step_work(engine.model, drafter, shape)
    classes = []
    for name, seconds in timer.class_seconds().items():
        counted = work.get(name)
        classes.append(
            KernelClass(
                name=name,
                seconds=seconds / steps,
                bytes=counted.bytes if counted else None,
                flops=counted.flops if counted else None,
                calls=timer.calls[name] / steps,
            )
        )
    return tuple(classes)


def _shape(stats: BlockStats, spec: SpecConfig) -> StepShape:
    return StepShape(
        requests=stats.requests,
        rows=spec.rows,
        committed=stats.tau,
        context=stats.context,
        block=spec.block if spec.mode != "ar" else 0,
    )


def _source(plan: Plan, stats: BlockStats) -> str:
    kind = "given" if plan.real_prompts else "random"
    return (
        f"specpilot profile: {plan.repeats} blocks of {plan.steps} steps with timers, as many "
        f"without, {plan.concurrency} requests in flight, {kind} prompts, mean context "
        f"{stats.context:.0f} tokens"
    )


def _drafter_info(engine: ReferenceEngine) -> ModelInfo | None:
    if engine.drafter_path is None:
        return None
    return ModelInfo(name=engine.drafter_path.name, sha256=engine.hashes["drafter"])


def _dtype(engine: ReferenceEngine) -> ComputeType:
    return engine.dtype
