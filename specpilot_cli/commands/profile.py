"""`specpilot profile`: where a step's time goes, and how step time grows with rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.profiler import Plan
    from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve

_STEP = "Step"
_MEASUREMENT = "Measurement"
_PROMPT_TOKENS = 128


def profile(
    target: Annotated[
        Path, typer.Option("--target", metavar="DIR", help="Target model folder (BF16 or W12).")
    ],
    drafter: Annotated[
        Path | None, typer.Option("--drafter", metavar="DIR", help="DFlash2 drafter folder.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the step profile, `.json`."),
    ] = None,
    step_times: Annotated[
        Path | None,
        typer.Option(
            "--step-times", metavar="FILE", help="Write step times against rows, `.json`."
        ),
    ] = None,
    mode: Annotated[
        Literal["ar", "chain", "tree"] | None,
        typer.Option(
            "--mode",
            help="Step to take apart; default chain with a drafter, else ar.",
            rich_help_panel=_STEP,
        ),
    ] = None,
    block: Annotated[
        int,
        typer.Option("--block", min=2, help="Draft block of that step.", rich_help_panel=_STEP),
    ] = 8,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="Nodes of a tree step.", rich_help_panel=_STEP)
    ] = 16,
    rows: Annotated[
        str,
        typer.Option(
            "--rows", help="Row counts of the step times, with commas.", rich_help_panel=_STEP
        ),
    ] = "1,4,8,16,32,64",
    tree_block: Annotated[
        int,
        typer.Option(
            "--tree-block", min=2, help="Draft block of the step times.", rich_help_panel=_STEP
        ),
    ] = 16,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Decode these; default random ids, which tell nothing about acceptance.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", min=1, help="Requests in flight.", rich_help_panel=_MEASUREMENT
        ),
    ] = 1,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps a block.", rich_help_panel=_MEASUREMENT)
    ] = 12,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Blocks.", rich_help_panel=_MEASUREMENT)
    ] = 7,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="CPU threads.", rich_help_panel=_MEASUREMENT)
    ] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option("--dtype", help="Arithmetic of both models.", rich_help_panel=_MEASUREMENT),
    ] = "float32",
    seed: options.SeedOption = 0,
    as_json: options.JsonFlag = False,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    verbose: options.VerboseFlag = 0,
) -> None:
    """Take one step of the reference engine apart and time steps against verified rows.

    Bytes and FLOPs are counted from shapes, peaks are measured on this machine. Feed the files to
    `specpilot ceiling`.

    Examples:

        specpilot profile --target target/ --drafter drafter/ -o step.json

        specpilot profile --target target/ --drafter drafter/ --prompts dev.jsonl
        -o step.json --step-times times.json

        specpilot profile --target target/ --mode ar --json
    """
    from specpilot_cli.engines.reference.launch import require_engine
    from specpilot_cli.engines.reference.spec import SpecConfig
    from specpilot_cli.ui import ConsoleReporter

    counts = _row_counts(rows)
    for path, option in ((output, "-o"), (step_times, "--step-times")):
        _check_target(path, option, force)
    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.profiler import (
        describe_device,
        profile_steps,
        step_time_curve,
    )
    from specpilot_cli.io.json_file import write_json

    spec = SpecConfig(mode or ("chain" if drafter else "ar"), block, nodes)
    engine = ReferenceEngine(target, drafter, spec, dtype=dtype, threads=threads)
    plan = _plan(engine, prompts, steps, repeats, concurrency, seed)
    with ConsoleReporter(quiet=quiet, verbose=verbose) as reporter:
        device = describe_device(engine)
        step = profile_steps(engine, plan, device=device, reporter=reporter)
        curve = None
        if step_times is not None or drafter is not None:
            curve = step_time_curve(
                engine, plan, counts, block=tree_block, device=device, reporter=reporter
            )
    if output is not None:
        write_json(output, step, force=force)
    if step_times is not None and curve is not None:
        write_json(step_times, curve, force=force)
    inputs = [path for path in (target, drafter, prompts) if path is not None]
    _emit(step, curve, inputs, seed, as_json=as_json)


def _emit(
    step: StepProfile, curve: StepTimeCurve | None, inputs: list[Path], seed: int, *, as_json: bool
) -> None:
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_line, print_table

    def text() -> None:
        print_line(
            f"{step.mode}, {step.rows} rows: {step.t_step_s * 1e3:.2f} ms a step "
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
        if curve is not None:
            print_table(
                ["rows", "ms", "c"],
                [("1 (ar)", f"{curve.ar_step_s * 1e3:.2f}", "1.00")]
                + [
                    (
                        str(point.rows),
                        f"{point.step_s * 1e3:.2f}",
                        f"{point.step_s / curve.ar_step_s:.2f}",
                    )
                    for point in curve.points
                ],
            )

    envelope = build_envelope(
        "profile", {"step_profile": step, "step_times": curve}, inputs=inputs, seed=seed
    )
    options.emit(envelope, as_json=as_json, text=text)


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

    new_tokens = min(128, engine.context_length // 2)
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


def _row_counts(text: str) -> list[int]:
    from specpilot_cli.errors import InputError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"not a list of row counts: `{text}`", where="--rows") from error
    if min(counts) < 1:
        raise InputError("row counts start at 1", where="--rows")
    return counts


def _check_target(path: Path | None, option: str, force: bool) -> None:
    from specpilot_cli.errors import InputError

    if path is None:
        return
    if path.suffix != ".json":
        raise InputError(f"`{path}` must end in `.json`", where=option)
    if path.exists() and not force:
        raise InputError(
            f"`{path}` already exists", where=option, hint="use --force to overwrite it"
        )
