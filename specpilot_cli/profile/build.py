"""From steps of traces to one step profile: robust averages, spreads, bytes and FLOPs.

Classes have to add up, so they are averages over one set of steps: the middle half by profiled
time, which leaves out the slow first steps after a prompt. Medians and quartiles of all steps stand
beside them.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.io.gpu_profiles import bundled_gpu
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.validation import first_in_words
from specpilot_cli.models.work import StepShape, Work, step_work
from specpilot_cli.profile.attribute import OUTSIDE, StepUsage, use_of_step
from specpilot_cli.profile.names import NameTable, load_kernel_classes, short_name
from specpilot_cli.profile.steps import Span, Window, find_steps
from specpilot_cli.profile.trace import GpuTrace, read_gpu_trace
from specpilot_cli.schema.model_profile import ModelProfile
from specpilot_cli.schema.step_profile import (
    DeviceInfo,
    EngineInfo,
    KernelClass,
    KernelClassName,
    KernelTime,
    ModelInfo,
    Spread,
    StepMode,
    StepProfile,
    StepSpan,
    TraceFacts,
)
from specpilot_cli.units import writable

# Bits per weight of the W12 format over those of BF16; the paper's checkpoints take 12.01-12.02.
W12_RATIO = 12.02 / 16
_COMMITTED = 4  # tokens a step, where nobody counted them: they decide FLOPs of the commit only
# Below this share of the class's time, plain products beside W12 are the few that stay BF16.
_MIXED_SHARE = 0.05
_ORDER: tuple[KernelClassName, ...] = (
    "target_gemm", "head", "recurrent", "attention", "drafter", "tree", "prefill", "rest",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a trace does not say: models, engine version, and the step's shape where unlabelled.

    block: drafted positions, anchor included. nodes: of a tree step; None = a chain of the block.
    context: committed tokens per request. tau: tokens per step, if somebody counted them.
    """

    target: ModelProfile | None = None
    drafter: ModelProfile | None = None
    engine_version: str = "unknown"
    block: int | None = None
    nodes: int | None = None
    context: float | None = None
    tau: float | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of one trace with its times."""

    trace: GpuTrace
    window: Window
    use: StepUsage


def profile_of_traces(paths: Sequence[Path], deployment: Deployment) -> StepProfile:
    """The step profile of all traces together; `t_step_s` stays open.

    Raises `InputError` for a trace that cannot be read or holds no whole step, one given twice,
    traces of different GPUs, and a drafting step whose block nobody says.
    """
    table = NameTable(load_kernel_classes())
    steps: list[_Step] = []
    prefills: list[Span] = []
    read: dict[tuple[float, ...], Path] = {}
    for path in paths:
        trace = read_gpu_trace(path)
        windows, spans = find_steps(trace, table)
        _refuse_same(path, windows, read)
        prefills += spans
        steps += [_Step(trace, window, use_of_step(trace, window, table)) for window in windows]
    steps = [step for step in steps if step.use.busy_s > 0]
    if not steps:
        raise InputError(
            "no kernel ran inside a whole step",
            where=str(paths[0]),
            hint="profile with activities CPU and GPU while a request decodes",
        )
    devices = {step.trace.device for step in steps}
    if len(devices) > 1:
        raise InputError(f"the traces are of different GPUs: {', '.join(sorted(devices))}")
    chosen, requests, notes = _same_requests(steps)
    try:
        return _profile(paths, chosen, requests, prefills, notes, table, deployment)
    except ValidationError as error:
        key, problem = first_in_words(error, "the step")
        raise InputError(
            f"these traces give a step that cannot be: `{key}`: {problem}",
            where=str(paths[0]),
            hint="a profiler writes its times in microseconds; give its file as it wrote it",
        ) from error


def _refuse_same(path: Path, windows: list[Window], read: dict[tuple[float, ...], Path]) -> None:
    """Raise `InputError` if the steps of `path` were read before: each would count twice.

    Known by when they began, so a copy or another compression of the file is found as well.
    """
    began = tuple(window.start_us for window in windows)
    if began and began in read:
        raise InputError(
            f"the same trace twice: `{read[began]}` and `{path}`",
            where="--trace",
            hint="give each trace once",
        )
    read[began] = path


def _same_requests(steps: list[_Step]) -> tuple[list[_Step], int, list[str]]:
    """Steps that served the most frequent number of requests, that number, and what was left."""
    counts = Counter(step.window.target.fact("bs") or 1 for step in steps)
    requests, n = counts.most_common(1)[0]
    if n == len(steps):
        return steps, requests, []
    kept = [step for step in steps if (step.window.target.fact("bs") or 1) == requests]
    return kept, requests, [f"{len(steps) - n} steps with another number of requests left out"]


def _profile(
    paths: Sequence[Path],
    steps: list[_Step],
    requests: int,
    prefills: list[Span],
    notes: list[str],
    table: NameTable,
    deployment: Deployment,
) -> StepProfile:
    drafts = any(step.window.drafts for step in steps)
    shape, mode = _shape(steps, requests, drafts, deployment)
    context, note = _context(steps, prefills, shape, deployment)
    notes += [note] if note else []
    w12 = steps[0].use.w12
    work = _work(deployment, shape, context, w12)
    notes += _mixed(steps, table)
    middle = _middle(steps)
    device = steps[0].trace.device
    known = bundled_gpu(device)
    return StepProfile(
        schema_version=1,
        engine=EngineInfo(name="sglang", version=deployment.engine_version),
        device=DeviceInfo(
            name=device, kind="gpu", gpu_profile=None if known is None else known.name
        ),
        target=_model(deployment.target, "unknown target") or ModelInfo(name="unknown target"),
        drafter=_model(deployment.drafter, "unknown drafter") if drafts else None,
        dtype="bfloat16",
        mode=mode,
        nodes=int(shape.rows) - 1,
        rows=int(shape.rows),
        draft_block=shape.block or None,
        requests=requests,
        context=context,
        weights="w12" if "target_gemm" in w12 else "plain",
        steps=len(middle),
        t_step_s=None,
        t_prof_s=_mean(middle, lambda use: use.prof_s),
        tau=deployment.tau,
        classes=_classes(middle, work),
        spans=_spans(middle),
        trace=_facts(paths, steps, middle, prefills, notes, table),
        source=f"torch.profiler trace of SGLang: {', '.join(_names(paths))}",
        source_sha256=sha256_file(paths[0]) if len(paths) == 1 else None,
    )


def _names(paths: Sequence[Path]) -> list[str]:
    return [writable(path.name) for path in paths]


def _model(profile: ModelProfile | None, unknown: str) -> ModelInfo | None:
    return ModelInfo(name=unknown if profile is None else profile.title)


def _shape(
    steps: list[_Step], requests: int, drafts: bool, deployment: Deployment
) -> tuple[StepShape, StepMode]:
    """Rows of one request and drafted block: from the spans' labels, else from the deployment."""
    if not drafts:
        return StepShape(requests, 1, 1), "ar"
    labelled = _queries((step.window.target for step in steps), requests)
    drafted = _queries((s for step in steps for s in step.window.spans if s.role == "drafter"),
                       requests)  # fmt: skip
    block = deployment.block or drafted or labelled
    if block is None:
        raise InputError(
            "the step drafts, but its spans do not say how many rows it verifies",
            where=str(steps[0].trace.path),
            hint="give the drafted block with --block N (SGLang: --speculative-num-draft-tokens), "
            "or profile with detailed_annotations",
        )
    nodes = deployment.nodes
    rows = labelled or (block if nodes is None else nodes + 1)
    # A chain verifies the block, and the anchor beside it where the block leaves it out (DSPARK).
    is_tree = nodes is not None or rows > block + 1
    committed = deployment.tau or min(_COMMITTED, rows)
    return StepShape(requests, rows, committed, 0, block), "tree" if is_tree else "chain"


def _queries(spans: Iterable[Span], requests: int) -> int | None:
    """Rows of one request by the spans' labels (`g_sq`), the most seen; None without labels."""
    labelled = [rows for span in spans if (rows := span.fact("g_sq")) is not None]
    return max(labelled) // requests if labelled else None


def _context(
    steps: list[_Step], prefills: list[Span], shape: StepShape, deployment: Deployment
) -> tuple[float | None, str | None]:
    """Committed tokens a request: given, labelled, or the prompts seen in the trace.

    A label's `g_sk` counts the keys that the pass ends with, its own rows among them.
    """
    requests = shape.requests
    if deployment.context is not None:
        return deployment.context, None
    seen = [step.window.target.fact("g_sk") for step in steps]
    labelled = [keys for keys in seen if keys is not None]
    if labelled:
        return max(0.0, statistics.fmean(labelled) / requests - shape.rows), None
    tokens = sum(span.fact("toks") or 0 for span in prefills)
    if tokens:
        return tokens / requests, (
            f"context taken from the trace's prompts, {tokens / requests:g} tokens a request; "
            "--context N counts the keys and values of a longer one"
        )
    return None, "context unknown: keys and values of earlier tokens are not counted (--context N)"


def _work(
    deployment: Deployment,
    shape: StepShape,
    context: float | None,
    w12: frozenset[KernelClassName],
) -> dict[KernelClassName, Work]:
    if deployment.target is None:
        return {}
    whole = StepShape(shape.requests, shape.rows, shape.committed, context or 0.0, shape.block)
    work = step_work(deployment.target, deployment.drafter, whole)
    for name in w12 & {"target_gemm", "head"}:
        work[name] = Work(work[name].bytes * W12_RATIO, work[name].flops)
    return work


def _mixed(steps: list[_Step], table: NameTable) -> list[str]:
    """A note where the target's products are partly W12: their bytes then count as if all were."""
    use, names = steps[0].use, steps[0].trace.names
    if "target_gemm" not in use.w12:
        return []
    plain = sum(
        used.seconds
        for (index, name), used in use.kernels.items()
        if name == "target_gemm" and not table.family(names[index]).w12
    )
    share = plain / use.classes["target_gemm"].seconds
    if share < _MIXED_SHARE:
        return []
    return [f"{share:.0%} of target_gemm's time reads plain weights; its floor takes all as W12"]


def _middle(steps: list[_Step]) -> list[StepUsage]:
    """The middle half by profiled time; all of fewer than four."""
    uses = sorted((step.use for step in steps), key=lambda use: use.prof_s)
    n = len(uses)
    return uses if n < 4 else uses[n // 4 : n - n // 4]


def _mean(uses: Sequence[StepUsage], of: Callable[[StepUsage], float]) -> float:
    return statistics.fmean(of(use) for use in uses)


def _seconds(use: StepUsage, name: KernelClassName) -> float:
    return use.classes[name].seconds if name in use.classes else 0.0


def _classes(
    uses: Sequence[StepUsage], work: dict[KernelClassName, Work]
) -> tuple[KernelClass, ...]:
    found = []
    for name in _ORDER:
        calls = statistics.fmean(u.classes[name].calls if name in u.classes else 0 for u in uses)
        if not calls:
            continue
        counted = work.get(name)
        found.append(
            KernelClass(
                name=name,
                seconds=statistics.fmean(_seconds(use, name) for use in uses),
                bytes=None if counted is None else counted.bytes,
                flops=None if counted is None else counted.flops,
                calls=calls,
            )
        )
    return tuple(found)


def _spans(uses: Sequence[StepUsage]) -> tuple[StepSpan, ...]:
    kinds = dict.fromkeys(kind for use in uses for kind in use.spans)
    ordered = sorted(kinds, key=lambda kind: kind == OUTSIDE)
    means = {kind: statistics.fmean(use.spans.get(kind, 0.0) for use in uses) for kind in ordered}
    return tuple(StepSpan(name=kind, seconds=max(0.0, mean)) for kind, mean in means.items())


def _facts(
    paths: Sequence[Path],
    steps: list[_Step],
    middle: Sequence[StepUsage],
    prefills: list[Span],
    notes: list[str],
    table: NameTable,
) -> TraceFacts:
    uses = [step.use for step in steps]
    names = [name for name in _ORDER if any(name in use.classes for use in uses)]
    spread = [_spread("profiled step", [use.prof_s for use in uses])]
    spread += [_spread("period", [use.period_s for use in uses])]
    for kind in dict.fromkeys(k for use in uses for k in use.spans):
        spread.append(_spread(kind, [use.spans.get(kind, 0.0) for use in uses]))
    spread += [_spread(name, [_seconds(use, name) for use in uses]) for name in names]
    return TraceFacts(
        files=tuple(_names(paths)),
        steps_seen=len(steps),
        period_s=statistics.median(use.period_s for use in uses),
        overlap_s=max(0.0, _mean(middle, lambda use: use.overlap_s)),
        spread=tuple(spread),
        kernels=_kernels(steps, table),
        prefill_spans=len(prefills),
        prefill_s=1e-6 * sum(span.end_us - span.start_us for span in prefills),
        notes=tuple(notes),
    )


def _spread(name: str, values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(name=name, q1_s=values[0], median_s=values[0], q3_s=values[0])
    q1, median, q3 = (max(0.0, v) for v in statistics.quantiles(values, n=4, method="inclusive"))
    return Spread(name=name, q1_s=q1, median_s=median, q3_s=q3)


def _kernels(steps: list[_Step], table: NameTable) -> tuple[KernelTime, ...]:
    """Every kernel name by class, averages over all steps, longest first."""
    seconds: defaultdict[tuple[str, KernelClassName, bool], float] = defaultdict(float)
    calls: Counter[tuple[str, KernelClassName, bool]] = Counter()
    for step in steps:
        for (index, name), used in step.use.kernels.items():
            full = step.trace.names[index]
            key = (short_name(full), name, table.family(full).known)
            seconds[key] += used.seconds
            calls[key] += used.calls
    n = len(steps)
    return tuple(
        KernelTime(
            name=key[0], kernel_class=key[1], known=key[2], seconds=total / n, calls=calls[key] / n
        )
        for key, total in sorted(seconds.items(), key=lambda item: -item[1])
    )
