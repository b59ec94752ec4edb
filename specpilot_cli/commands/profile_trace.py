"""`specpilot profile --trace` and `--url`: a real engine's step, taken apart from its trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.profile.build import Deployment
    from specpilot_cli.schema.step_profile import StepProfile
    from specpilot_cli.ui import Reporter


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What both ways share; see the options of `specpilot profile`."""

    target: Path | None
    drafter: Path | None
    mode: Literal["ar", "chain", "tree"] | None
    block: int | None
    nodes: int | None
    context: float | None
    tau: float | None
    output: Path | None
    as_json: bool
    force: bool
    quiet: bool


def profile_traces(paths: Sequence[Path], given: TraceOptions) -> None:
    """Read traces that lie here."""
    from specpilot_cli.profile.build import profile_of_traces

    options.check_new_file(given.output, ".json", where="-o", force=given.force)
    options.check_not_input({"-o": given.output}, paths)
    step = profile_of_traces(paths, _deployment(given))
    _finish(step, list(paths), given)


def profile_server(
    url: str, given: TraceOptions, *, steps: int, folder: Path | None, prompts: Path | None
) -> None:
    """Profile a running server, then read what it wrote."""
    from specpilot_cli.profile.build import profile_of_traces
    from specpilot_cli.profile.live import drafted_block, record_trace
    from specpilot_cli.ui import ConsoleReporter

    options.check_new_file(given.output, ".json", where="-o", force=given.force)
    with ConsoleReporter(quiet=given.quiet) as reporter:
        paths, facts = record_trace(
            url, steps=steps, folder=folder, prompts=prompts, reporter=reporter
        )
        target = given.target or _readable(facts.model_path, reporter)
        drafter = given.drafter or _readable(facts.draft_model_path, reporter, drafts=True)
    known = replace(given, target=target, drafter=drafter)
    deployment = _deployment(known, facts.version or "unknown", drafted_block(facts))
    step = profile_of_traces(paths, deployment)
    _finish(step, list(paths), given)


def _readable(served: str | None, reporter: Reporter, *, drafts: bool = False) -> Path | None:
    """The folder of a model that the server runs, where it lies here and floors follow from it.

    drafts: it is the drafter. A model whose floors are not known (quantised, of an unknown family,
    a drafter of another kind) is left out with a warning.
    """
    from specpilot_cli.errors import InputError
    from specpilot_cli.models.registry import load_drafter, load_target
    from specpilot_cli.profile.live import model_folder

    folder = model_folder(served)
    if folder is None:
        return None
    try:
        if drafts:
            load_drafter(str(folder), None)
        else:
            load_target(str(folder), w12=True)
    except InputError as error:
        reporter.warn(f"no floors from `{folder}`: {error.message}")
        return None
    return folder


def _deployment(
    given: TraceOptions, version: str = "unknown", block: int | None = None
) -> Deployment:
    from specpilot_cli.errors import InputError
    from specpilot_cli.models.registry import load_drafter, load_target
    from specpilot_cli.profile.build import Deployment

    if given.mode == "tree" and given.nodes is None:
        raise InputError("a tree step needs its nodes", where="--mode", hint="add --nodes N")
    for option, value in (("--context", given.context), ("--tau", given.tau)):
        if value is not None and not math.isfinite(value):
            raise InputError(f"not a finite number: {value}", where=option)
    target = None if given.target is None else load_target(str(given.target), w12=True)
    return Deployment(
        target=target,
        drafter=None if given.drafter is None else load_drafter(str(given.drafter), target),
        engine_version=version,
        block=given.block or block,
        nodes=given.nodes if given.mode == "tree" else None,
        context=given.context,
        tau=given.tau,
    )


def _finish(step: StepProfile, inputs: list[Path], given: TraceOptions) -> None:
    from specpilot_cli.io.json_file import write_json
    from specpilot_cli.report.json_out import build_envelope

    if given.output is not None:
        write_json(given.output, step, force=given.force)
    envelope = build_envelope("profile", {"step_profile": step, "step_times": None}, inputs=inputs)
    options.emit(envelope, as_json=given.as_json, text=lambda: print_trace_profile(step))


def print_trace_profile(step: StepProfile) -> None:
    """Spans, classes, unknown kernels and notes of a profile that came from a trace."""
    from specpilot_cli.report.tables import Column, print_line, print_table
    from specpilot_cli.report.trace_tables import CLASS_COLUMNS, class_rows, span_rows, unknown_rows

    trace = step.trace
    assert trace is not None
    drafter = "" if step.drafter is None else f" with {step.drafter.name}"
    requests = "1 request" if step.requests == 1 else f"{step.requests} requests"
    print_line(
        f"{step.target.name}{drafter}, {step.engine.name} {step.engine.version}, "
        f"{step.device.name}: {step.mode}, {requests} of {step.rows} rows"
    )
    print_line(
        f"{trace.steps_seen} steps, {step.steps} of them averaged: {step.t_prof_s * 1e3:.3f} ms "
        f"profiled; {trace.overlap_s * 1e3:.3f} ms of kernels ran beside others, counted once"
    )
    print_table(
        ["span", Column("ms", "right"), Column("median", "right"), Column("IQR", "right")],
        span_rows(step), title="where the step's time is",
    )  # fmt: skip
    right = [Column(title, "right") for title in CLASS_COLUMNS[1:]]
    print_table([CLASS_COLUMNS[0], *right], class_rows(step), title="kernel classes of one step")
    unknown = unknown_rows(step)
    if unknown:
        print_table(
            ["unknown kernel", "counted in", Column("µs", "right"), Column("of the step", "right")],
            unknown, title="kernels that no pattern names",
        )  # fmt: skip
    else:
        print_line("unknown kernels: none")
    for note in trace.notes:
        print_line(f"note: {note}")
    print_line(
        "next: `specpilot ceiling` with this file and --step-times, the step timed unprofiled"
    )
