"""`specpilot ceiling`: how far one recorded step is from its ceiling, and which factor leads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specpilot_cli.ceiling.answer import CeilingAnswer, ReplayedTaus
    from specpilot_cli.schema.step_profile import StepProfile

_TOKENS = "Tokens per step"
_DEVICE = "Peak rates"

ProfileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="PROFILE", help="A step profile made by `specpilot profile`."),
]
LatticesOption = Annotated[
    Path | None,
    typer.Option(help="Recorded lattices: replay them for the best tree.", rich_help_panel=_TOKENS),
]
NodesOption = Annotated[
    str, typer.Option(help="Node budgets to replay, as in `replay`.", rich_help_panel=_TOKENS)
]
TauOption = Annotated[
    float | None,
    typer.Option(
        help="Tokens per step now; default: what the profile measured.", rich_help_panel=_TOKENS
    ),
]
TauBestOption = Annotated[
    float | None, typer.Option(help="Tokens per step of the best tree.", rich_help_panel=_TOKENS)
]
StepTimesOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Step times against rows: weigh each node budget by its cost.",
        rich_help_panel=_TOKENS,
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        help="Use the peaks of this bundled device.",
        envvar="SPECPILOT_GPU",
        rich_help_panel=_DEVICE,
    ),
]
PeaksOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Use the peaks in this file.", rich_help_panel=_DEVICE),
]
FullPeakFlag = Annotated[
    bool,
    typer.Option(
        "--full-peak",
        help="Floors at full peaks instead of 60 % of FLOP/s and 90 % of bytes/s.",
        rich_help_panel=_DEVICE,
    ),
]
ListFlag = Annotated[
    bool, typer.Option("--list", help="List the bundled devices and step times, and stop.")
]


def ceiling(
    profile: ProfileArgument = None,
    lattices: LatticesOption = None,
    nodes: NodesOption = "8,16,32,63",
    tau: TauOption = None,
    tau_best: TauBestOption = None,
    step_times: StepTimesOption = None,
    gpu: GpuOption = None,
    peaks: PeaksOption = None,
    full_peak: FullPeakFlag = False,
    list_known: ListFlag = False,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    verbose: options.VerboseFlag = 0,
) -> None:
    """Split the speed that a step leaves unused into tokens, kernels and overhead.

    Examples:

        specpilot ceiling step.json --lattices lattices.safetensors

        specpilot ceiling step.json --tau-best 6.2 --gpu h200 --json

        specpilot ceiling step.json --tau-best 8.2 --full-peak -o ceiling.html

        specpilot ceiling --list
    """
    from specpilot_cli.ceiling.answer import answer_ceiling
    from specpilot_cli.ceiling.peaks import peaks_for
    from specpilot_cli.ceiling.step_times import load_step_times
    from specpilot_cli.io.json_file import read_json_model
    from specpilot_cli.schema.step_profile import StepProfile

    given = (profile, lattices, peaks, step_times)
    options.check_output(output, force, ".html", inputs=given)
    if list_known:
        _finish_list(as_json=as_json, output=output, force=force)
    step = read_json_model(_required(profile), StepProfile)
    curve = None if step_times is None else load_step_times(step_times)
    chosen = peaks_for(step, gpu=gpu, file=peaks)
    answer = answer_ceiling(
        step, chosen, tau=tau, tau_best=tau_best, curve=curve, full_peak=full_peak,
        replayed=_replay(lattices, nodes, step, quiet=quiet, verbose=verbose),
    )  # fmt: skip
    inputs = [path for path in (profile, lattices, peaks) if path is not None]
    _finish(answer, inputs, as_json=as_json, output=output, force=force)


def _required(profile: Path | None) -> Path:
    from specpilot_cli.errors import InputError

    if profile is None:
        raise InputError(
            "no step profile given",
            where="PROFILE",
            hint="make one with `specpilot profile`, or see the known devices with --list",
        )
    return profile


def _replay(
    lattices: Path | None, nodes: str, step: StepProfile, *, quiet: bool, verbose: int
) -> ReplayedTaus | None:
    """Best-first trees at every budget, and the profile's own policy at its own budget."""
    if lattices is None:
        return None
    from specpilot_cli.ceiling.answer import ReplayedTaus
    from specpilot_cli.ceiling.speedup import TauPoint
    from specpilot_cli.commands.replay import parse_nodes
    from specpilot_cli.io.lattice_file import read_lattice
    from specpilot_cli.replay.run import check_nodes
    from specpilot_cli.replay.run import replay as run_replay
    from specpilot_cli.ui import ConsoleReporter

    budgets = check_nodes(parse_nodes(nodes))
    own = {"chain": "chain", "tree": "best-first"}.get(step.mode)
    with ConsoleReporter(quiet, verbose) as reporter:
        result = run_replay(
            read_lattice(lattices),
            ["chain", "best-first"],
            nodes=sorted({*budgets, max(step.nodes, 1)}),
            reporter=reporter,
        )
    trees = result.curve("best-first")
    now = None if own is None else result.curve(own).get(step.nodes)
    return ReplayedTaus(
        trees=tuple(TauPoint(n, trees[n]) for n in budgets),
        current=None if now is None else TauPoint(step.nodes, now),
        source=f"{result.mode} replay of {lattices}",
    )


def _finish(
    answer: CeilingAnswer,
    inputs: Sequence[Path],
    *,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    from specpilot_cli.ceiling.document import ceiling_document
    from specpilot_cli.report.ceiling_page import render_ceiling_page
    from specpilot_cli.report.json_out import build_envelope

    envelope = build_envelope("ceiling", ceiling_document(answer), inputs=inputs)
    options.finish(
        envelope,
        as_json=as_json,
        output=output,
        force=force,
        text=lambda: _print_answer(answer),
        writers={".html": lambda: render_ceiling_page(answer, envelope)},
    )


def _print_answer(answer: CeilingAnswer) -> None:
    from specpilot_cli.report import adapters
    from specpilot_cli.report.tables import Column, print_line, print_table

    step, tokens = answer.profile, answer.tokens
    drafter = "no drafter" if step.drafter is None else step.drafter.name
    print_line(
        f"{step.target.name} with {drafter}, {step.engine.name} {step.engine.version}, "
        f"{step.device.name}, {step.dtype}, {step.mode}: {step.nodes} nodes, {step.rows} rows"
    )
    print_table(
        ["factor", Column("ratio", "right"), "from"], adapters.factor_rows(answer.ceiling),
        title=f"ceiling, {adapters.peaks_text(answer.ceiling, step.dtype)}",
    )  # fmt: skip
    right = [Column(title, "right") for title in adapters.CLASS_COLUMNS[1:5]]
    print_table(
        [adapters.CLASS_COLUMNS[0], *right, adapters.CLASS_COLUMNS[5],
         Column(adapters.CLASS_COLUMNS[6], "right")],
        adapters.class_rows(answer.ceiling), title="kernel classes of one step",
    )  # fmt: skip
    if answer.curve is not None:
        print_table(
            [Column(title, "right") for title in adapters.SPEEDUP_COLUMNS],
            adapters.speedup_rows(answer.speedups),
            title=f"speedup over plain decoding at the step times of {answer.curve.name}",
        )
    if answer.measured is not None:
        factors = answer.measured.factors
        print_line(
            f"with measured peaks: kernels {factors.kernel:.3f}×, ceiling {factors.product:.3f}× "
            f"({adapters.peaks_text(answer.measured, step.dtype)})"
        )
    print_line(f"τ now: {tokens.tau_source}; best τ: {tokens.tau_best_source}")
    for note in answer.advice.notes:
        print_line(f"note: {note}")
    print_line(f"leading: {answer.advice.headline}")
    print_line(f"next: {answer.advice.next_step}")


def _finish_list(*, as_json: bool, output: Path | None, force: bool) -> None:
    from specpilot_cli.ceiling.peaks import Peaks, gpu_names, load_gpu
    from specpilot_cli.ceiling.step_times import load_step_times, step_time_names
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_table
    from specpilot_cli.units import format_bandwidth

    known = [load_gpu(name) for name in gpu_names()]
    devices = [
        [gpu.name, gpu.title, format_bandwidth(Peaks(gpu.title, gpu.peaks).bandwidth().value)]
        for gpu in known
    ]
    curves = [load_step_times(name) for name in step_time_names()]

    def text() -> None:
        print_table(["device", "what it is", "read bandwidth"], devices)
        print_table(["step times", "source"], [[curve.name, curve.source] for curve in curves])

    options.finish(
        build_envelope("ceiling", {"devices": known, "step_times": curves}),
        as_json=as_json, output=output, force=force, text=text,
    )  # fmt: skip
