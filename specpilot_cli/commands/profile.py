"""`specpilot profile`: where a step's time goes, and how step time grows with rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specpilot_cli.commands import options
from specpilot_cli.commands.profile_trace import TraceOptions, profile_server, profile_traces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.profiler import Plan
    from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve

_STEP = "Step"
_MEASUREMENT = "Measurement"
_TRACE = "Real engine"
_PROMPT_TOKENS = 128
_NEW_TOKENS = 128
_BLOCK, _NODES = 8, 16

ProfileOutput = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the step profile, `.json`."),
]
StepTimesOutput = Annotated[
    Path | None,
    typer.Option("--step-times", metavar="FILE", help="Write step times against rows, `.json`."),
]
ModeOption = Annotated[
    Literal["ar", "chain", "tree"] | None,
    typer.Option(
        help="Step to take apart. Default: chain with a drafter, else ar.", rich_help_panel=_STEP
    ),
]
BlockOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Draft block of that step. Default: 8, or what the trace's spans say.",
        rich_help_panel=_STEP,
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Nodes of a tree step. Default: 16.", rich_help_panel=_STEP),
]
RowsOption = Annotated[
    str,
    typer.Option(
        metavar="LIST", help="Row counts of the step times: a comma list.", rich_help_panel=_STEP
    ),
]
TreeBlockOption = Annotated[
    int, typer.Option(min=2, help="Draft block of the step times.", rich_help_panel=_STEP)
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Decode these (JSONL). Default: random ids, which tell nothing about acceptance.",
        rich_help_panel=_MEASUREMENT,
    ),
]
ConcurrencyOption = Annotated[
    int, typer.Option(min=1, help="Requests in flight.", rich_help_panel=_MEASUREMENT)
]
StepsOption = Annotated[
    int, typer.Option(min=1, help="Steps a block.", rich_help_panel=_MEASUREMENT)
]
TargetOption = Annotated[
    Path | None,
    typer.Option(
        "--target",
        metavar="DIR|NAME",
        help="Target: its folder; for a trace also a config.json or a bundled model's name.",
    ),
]
DrafterOption = Annotated[
    Path | None,
    typer.Option("--drafter", metavar="DIR|NAME", help="Drafter, given like the target."),
]
TraceOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Read this torch.profiler trace of SGLang instead; repeatable.",
        rich_help_panel=_TRACE,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Profile the SGLang server there, on this host, instead.",
        rich_help_panel=_TRACE,
    ),
]
TraceFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--trace-dir",
        metavar="DIR",
        help="Where that server writes its trace. Default: a new temporary folder.",
        rich_help_panel=_TRACE,
    ),
]
ContextOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Committed tokens per request. Default: what the trace says.",
        rich_help_panel=_TRACE,
    ),
]
TauOption = Annotated[
    float | None,
    typer.Option(min=1, help="Tokens per step, if you counted them.", rich_help_panel=_TRACE),
]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Blocks.", rich_help_panel=_MEASUREMENT)]


def profile(
    target: TargetOption = None, drafter: DrafterOption = None,
    output: ProfileOutput = None, step_times: StepTimesOutput = None,
    trace: TraceOption = None, url: UrlOption = None, trace_dir: TraceFolderOption = None,
    context: ContextOption = None, tau: TauOption = None,
    mode: ModeOption = None, block: BlockOption = None, nodes: NodesOption = None,
    rows: RowsOption = "1,4,8,16,32,64", tree_block: TreeBlockOption = 16,
    prompts: PromptsOption = None, concurrency: ConcurrencyOption = 1, steps: StepsOption = 12,
    repeats: RepeatsOption = 7, threads: options.ThreadsOption = 1,
    dtype: options.DtypeOption = "float32", seed: options.SeedOption = 0,
    as_json: options.JsonFlag = False, force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:  # fmt: skip
    """Take one step apart by kernel class: of the reference engine, or of SGLang by its trace.

    Bytes and FLOPs are counted from shapes. The reference engine is also timed against verified
    rows, and its peaks are measured on this machine. Feed the files to `specpilot ceiling`.

    Examples:

        specpilot profile --target target/ --drafter drafter/ -o step.json

        specpilot profile --target target/ --drafter drafter/ --prompts dev.jsonl \\
          -o step.json --step-times times.json

        specpilot profile --trace df8.trace.json.gz --target qwen3.8-27b \\
          --drafter qwen3.8-27b-dflash2 --block 8 -o step.json

        specpilot profile --url http://localhost:30000 --target qwen3.8-27b -o step.json
    """
    if trace or url is not None:
        given = TraceOptions(
            target, drafter, mode, block, nodes, context, tau, output, as_json, force, quiet
        )
        _real_engine(trace, url, given, steps, trace_dir, prompts, step_times)
        return
    target = _required(target)
    block, nodes = block or _BLOCK, nodes or _NODES
    counts = _row_counts(rows, needed=step_times is not None, drafter=drafter)
    options.check_new_file(output, ".json", where="-o", force=force)
    options.check_new_file(step_times, ".json", where="--step-times", force=force)
    options.check_not_input({"-o": output, "--step-times": step_times}, (target, drafter, prompts))
    engine = _load(target, drafter, mode, block, nodes, dtype, threads)
    if engine.drafter is not None:
        engine.check_block(tree_block, "--tree-block")
    plan = _plan(engine, prompts, steps, repeats, concurrency, seed)
    step, curve = _measure(engine, plan, counts, tree_block, quiet=quiet)
    _write(step, output, curve, step_times, force=force)
    inputs = [path for path in (target, drafter, prompts) if path is not None]
    _emit(step, curve, inputs, seed, as_json=as_json)


def _real_engine(
    trace: list[Path] | None,
    url: str | None,
    given: TraceOptions,
    steps: int,
    trace_dir: Path | None,
    prompts: Path | None,
    step_times: Path | None,
) -> None:
    from specpilot_cli.errors import InputError

    if trace and url is not None:
        raise InputError("--trace and --url exclude each other", hint="give one of them")
    if step_times is not None:
        raise InputError(
            "a trace gives no step times: the profiler changes them",
            where="--step-times",
            hint="time the server without the profiler, for example with `specpilot paired-bench`",
        )
    if url is not None:
        profile_server(url, given, steps=steps, folder=trace_dir, prompts=prompts)
    else:
        profile_traces(trace or [], given)


def _required(target: Path | None) -> Path:
    from specpilot_cli.errors import InputError

    if target is None:
        raise InputError(
            "nothing to profile", where="--target", hint="give --target DIR, --trace FILE or --url"
        )
    return target


def _load(
    target: Path,
    drafter: Path | None,
    mode: Literal["ar", "chain", "tree"] | None,
    block: int,
    nodes: int,
    dtype: Literal["float32", "bfloat16"],
    threads: int,
) -> ReferenceEngine:
    from specpilot_cli.engines.reference.launch import require_engine
    from specpilot_cli.engines.reference.spec import SpecConfig

    spec = SpecConfig(mode or ("chain" if drafter else "ar"), block, nodes)
    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine

    return ReferenceEngine(target, drafter, spec, dtype=dtype, threads=threads)


def _measure(
    engine: ReferenceEngine,
    plan: Plan,
    rows: Sequence[int],
    tree_block: int,
    *,
    quiet: bool,
) -> tuple[StepProfile, StepTimeCurve | None]:
    from specpilot_cli.engines.reference.profiler import (
        describe_device,
        profile_steps,
        step_time_curve,
    )
    from specpilot_cli.ui import ConsoleReporter

    device = describe_device(engine)
    with ConsoleReporter(quiet=quiet) as reporter:
        step = profile_steps(engine, plan, device=device, reporter=reporter)
        if engine.drafter is None:
            return step, None
        curve = step_time_curve(
            engine, plan, rows, block=tree_block, device=device, reporter=reporter
        )
    return step, curve


def _write(
    step: StepProfile,
    output: Path | None,
    curve: StepTimeCurve | None,
    step_times: Path | None,
    *,
    force: bool,
) -> None:
    from specpilot_cli.io.json_file import write_json

    if output is not None:
        write_json(output, step, force=force)
    if step_times is not None and curve is not None:
        write_json(step_times, curve, force=force)


def _emit(
    step: StepProfile, curve: StepTimeCurve | None, inputs: list[Path], seed: int, *, as_json: bool
) -> None:
    from specpilot_cli.report.json_out import build_envelope

    envelope = build_envelope(
        "profile", {"step_profile": step, "step_times": curve}, inputs=inputs, seed=seed
    )
    options.emit(envelope, as_json=as_json, text=lambda: _print(step, curve))


def _print(step: StepProfile, curve: StepTimeCurve | None) -> None:
    from specpilot_cli.report.tables import print_line, print_table

    print_line(
        f"{step.mode}, {step.rows} rows: {step.step_s * 1e3:.2f} ms a step "
        f"({step.t_prof_s * 1e3:.2f} ms with timers, {step.unattributed_s * 1e3:.2f} ms of "
        "it outside every class)"
    )
    print_table(
        ["class", "ms", "share", "MB", "MFLOP", "calls"],
        [
            (
                entry.name,
                f"{entry.seconds * 1e3:.3f}",
                f"{entry.seconds / step.t_prof_s:.0%}",
                "-" if entry.bytes is None else f"{entry.bytes / 1e6:.2f}",
                "-" if entry.flops is None else f"{entry.flops / 1e6:.2f}",
                f"{entry.calls:.0f}",
            )
            for entry in step.classes
        ],
    )
    if curve is None:
        return
    times = [("1 (ar)", curve.ar_step_s)] + [(str(p.rows), p.step_s) for p in curve.points]
    print_table(
        ["rows", "ms", "c"],
        [(rows, f"{time * 1e3:.2f}", f"{time / curve.ar_step_s:.2f}") for rows, time in times],
    )


def _plan(
    engine: ReferenceEngine,
    prompts: Path | None,
    steps: int,
    repeats: int,
    concurrency: int,
    seed: int,
) -> Plan:
    import numpy as np

    from specpilot_cli.engines.reference.profiler import Plan
    from specpilot_cli.io.prompts_file import read_prompts

    new_tokens = min(_NEW_TOKENS, engine.context_length // 2)
    if prompts is not None:
        ids = [engine.encode(prompt.text) for prompt in read_prompts(prompts)]
    else:
        length = min(_PROMPT_TOKENS, engine.context_length - new_tokens)
        draws = np.random.default_rng(seed).integers(0, engine.vocab_size, size=(8, length))
        ids = [tuple(row) for row in draws.tolist()]
    return Plan(
        prompts=ids,
        steps=steps,
        repeats=repeats,
        concurrency=concurrency,
        new_tokens=new_tokens,
        real_prompts=prompts is not None,
    )


def _row_counts(text: str, *, needed: bool, drafter: Path | None) -> list[int]:
    from specpilot_cli.errors import InputError

    if needed and drafter is None:
        raise InputError(
            "step times need a drafter", where="--step-times", hint="give --drafter DIR"
        )

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"not a list of row counts: `{text}`", where="--rows", hint="write it as 1,8,16"
        ) from error
    if min(counts) < 1 or (drafter is not None and max(counts) < 2):
        raise InputError(
            "row counts start at 1, and one of them must be larger",
            where="--rows",
            hint="write them as 1,8,16",
        )
    return counts
