"""`specpilot ceiling`: how far one recorded step is from its ceiling, and which factor leads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specpilot_cli.commands import options
from specpilot_cli.commands.ceiling_model import ModelStep, model_ceiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specpilot_cli.ceiling.answer import CeilingAnswer, ReplayedTaus
    from specpilot_cli.ceiling.floors import FloorRule
    from specpilot_cli.ceiling.what_if import WhatIf
    from specpilot_cli.schema.step_profile import StepProfile

_ORACLE = "oracle"
_TOKENS = "Tokens per step"
_DEVICE = "Peak rates"
_MODEL = "Floors without a profile"

ProfileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="PROFILE", help="A step profile made by `specpilot profile`."),
]
LatticesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="LATTICE", help="Recorded lattices: replay them for the best tree.",
        rich_help_panel=_TOKENS,
    ),
]  # fmt: skip
NodesOption = Annotated[
    str,
    typer.Option(
        metavar="LIST", help="Node budgets to replay, as in `replay`.", rich_help_panel=_TOKENS
    ),
]
TauOption = Annotated[
    str | None,
    typer.Option(
        metavar="X|oracle",
        help="Tokens per step now; `oracle` compares with the oracle's tokens, not the best "
        "tree's. Default: what the profile measured.",
        rich_help_panel=_TOKENS,
    ),
]
TauBestOption = Annotated[
    float | None, typer.Option(help="Tokens per step of the best tree.", rich_help_panel=_TOKENS)
]
StepTimesOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Step times without profiler: the step's own, and the cost of each node budget.",
        rich_help_panel=_TOKENS,
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Use the peaks of this device.",
        envvar="SPECPILOT_GPU",
        rich_help_panel=_DEVICE,
    ),
]
PeaksOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Use the peaks in this file.", rich_help_panel=_DEVICE),
]
WhatIfGpuOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Also project the step on this device.", rich_help_panel=_DEVICE
    ),
]
WhatIfModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME", help="Also project it with this target.", rich_help_panel=_DEVICE
    ),
]
MeasuredPeaksFlag = Annotated[
    bool,
    typer.Option(
        "--measured-peaks",
        help="Prefer measured peaks to the data sheet's.",
        rich_help_panel=_DEVICE,
    ),
]
FloorsOption = Annotated[
    Literal["paper", "full-peak"],
    typer.Option(
        help="Floors at 60 % of peak FLOP/s and 90 % of bytes/s, or at whole peaks.",
        rich_help_panel=_DEVICE,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help="No profile: the floors of this model, bundled or any config.json.",
        rich_help_panel=_MODEL,
    ),
]
DrafterOption = Annotated[
    str | None, typer.Option(metavar="DIR|NAME", help="Its drafter.", rich_help_panel=_MODEL)
]
RowsOption = Annotated[
    int, typer.Option(min=1, help="Verified rows per request.", rich_help_panel=_MODEL)
]
BlockOption = Annotated[
    int,
    typer.Option(
        min=0, show_default=False, help="Draft block. Default: the rows.", rich_help_panel=_MODEL
    ),
]
RequestsOption = Annotated[
    int, typer.Option(min=1, help="Requests in flight.", rich_help_panel=_MODEL)
]
ContextOption = Annotated[
    int, typer.Option(min=0, help="Committed tokens per request.", rich_help_panel=_MODEL)
]
ListFlag = Annotated[
    bool, typer.Option("--list", help="List the known devices, models and step times, and stop.")
]


def ceiling(
    profile: ProfileArgument = None, list_known: ListFlag = False,
    lattices: LatticesOption = None, nodes: NodesOption = "8,16,32,63", tau: TauOption = None,
    tau_best: TauBestOption = None, step_times: StepTimesOption = None,
    gpu: GpuOption = None, peaks: PeaksOption = None, measured_peaks: MeasuredPeaksFlag = False,
    floors: FloorsOption = "paper",
    what_if_gpu: WhatIfGpuOption = None, what_if_model: WhatIfModelOption = None,
    target: TargetOption = None, drafter: DrafterOption = None, rows: RowsOption = 1,
    block: BlockOption = 0, requests: RequestsOption = 1, context: ContextOption = 0,
    as_json: options.JsonFlag = False, output: options.OutputFile = None,
    force: options.ForceFlag = False, quiet: options.QuietFlag = False,
) -> None:  # fmt: skip
    """Split the speed that a step leaves unused into tokens, kernels and overhead.

    The largest of the three says what to work on. No GPU is needed.

    Examples:

        specpilot ceiling step.json --lattices lattices.safetensors

        specpilot ceiling df8.json --step-times h200-qwen3.8-27b-dflash2-bf16 -o ceiling.html

        specpilot ceiling step.json --what-if-gpu b200 --what-if-model llama-3.1-8b

        specpilot ceiling --target qwen3.8-27b --gpu h100-sxm5 --rows 8

        specpilot ceiling --list
    """
    from specpilot_cli.ceiling.floors import FULL_PEAK, PAPER_RULE

    rule = FULL_PEAK if floors == "full-peak" else PAPER_RULE
    given = (profile, lattices, peaks, step_times)
    options.check_output(output, force, ".html", inputs=given)
    if list_known:
        _finish_list(as_json=as_json, output=output, force=force)
    if target is not None:
        _alone(profile, what_if_gpu or what_if_model)
        model = ModelStep(target, drafter, rows, block, requests, context)
        model_ceiling(
            model, gpu=gpu, peaks=peaks, measured=measured_peaks, rule=rule, as_json=as_json,
            output=output, force=force,
        )  # fmt: skip
    path = _required(profile)
    asked = _Asked(
        lattices, nodes, tau, tau_best, step_times, gpu, peaks, measured_peaks, rule,
        what_if_gpu, what_if_model,
    )  # fmt: skip
    answer = _answer(path, asked, quiet=quiet)
    _finish(answer, (path, lattices, peaks), as_json=as_json, output=output, force=force)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options that the answer depends on."""

    lattices: Path | None
    nodes: str
    tau: str | None
    tau_best: float | None
    step_times: str | None
    gpu: str | None
    peaks: Path | None
    measured_peaks: bool
    rule: FloorRule
    what_if_gpu: str | None
    what_if_model: str | None


def _answer(path: Path, asked: _Asked, *, quiet: bool) -> CeilingAnswer:
    from specpilot_cli.ceiling.answer import answer_ceiling
    from specpilot_cli.ceiling.peaks import peaks_for, prefer
    from specpilot_cli.ceiling.step_times import load_step_times
    from specpilot_cli.io.json_file import read_json_model
    from specpilot_cli.schema.step_profile import StepProfile

    step = read_json_model(path, StepProfile)
    curve = None if asked.step_times is None else load_step_times(asked.step_times)
    peaks = prefer(peaks_for(step, gpu=asked.gpu, file=asked.peaks), measured=asked.measured_peaks)
    answer = answer_ceiling(
        step, peaks, tau=_tau(asked.tau), tau_best=asked.tau_best, curve=curve, rule=asked.rule,
        oracle=asked.tau == _ORACLE,
        replayed=_replay(asked.lattices, asked.nodes, step, quiet=quiet),
    )  # fmt: skip
    return replace(answer, what_if=_what_if(answer, asked))


def _what_if(answer: CeilingAnswer, asked: _Asked) -> WhatIf | None:
    if asked.what_if_gpu is None and asked.what_if_model is None:
        return None
    from specpilot_cli.ceiling.peaks import Peaks, load_gpu
    from specpilot_cli.ceiling.what_if import what_if
    from specpilot_cli.models.registry import load_model

    gpu = None if asked.what_if_gpu is None else load_gpu(asked.what_if_gpu)
    return what_if(
        answer.profile, answer.ceiling,
        peaks=None if gpu is None else Peaks(gpu.title, gpu.peaks, answer.ceiling.peaks.prefer),
        target=None if asked.what_if_model is None else load_model(asked.what_if_model),
    )  # fmt: skip


def _alone(profile: Path | None, what_if: str | None) -> None:
    """Refuse what floors without a profile have no use for."""
    from specpilot_cli.errors import InputError

    if what_if is not None:
        raise InputError(
            "--what-if-gpu and --what-if-model change a profiled step",
            where="--target",
            hint="give a PROFILE, or name the other device or model with --gpu and --target",
        )

    if profile is not None:
        raise InputError("PROFILE and --target exclude each other", hint="give one of them")


def _tau(text: str | None) -> float | None:
    """Tokens per step as a number; None for none and for the oracle's word."""
    from specpilot_cli.errors import InputError

    if text is None or text == _ORACLE:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise InputError(
            f"not tokens per step: `{text}`", where="--tau", hint=f"a number, or `{_ORACLE}`"
        ) from error


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
    lattices: Path | None, nodes: str, step: StepProfile, *, quiet: bool
) -> ReplayedTaus | None:
    """Best-first trees at every budget, and the profile's own policy at its own budget."""
    if lattices is None:
        return None
    from specpilot_cli.ceiling.answer import ReplayedTaus
    from specpilot_cli.ceiling.speedup import TauPoint
    from specpilot_cli.commands.replay import parse_nodes
    from specpilot_cli.io.lattice_file import LatticeFiles
    from specpilot_cli.replay.policies import best_tree
    from specpilot_cli.replay.run import check_nodes
    from specpilot_cli.replay.run import replay as run_replay
    from specpilot_cli.ui import ConsoleReporter

    budgets = check_nodes(parse_nodes(nodes))
    recording = LatticeFiles(lattices)
    tree = best_tree(recording.metadata.drafter_kind)
    own = {"chain": "chain", "tree": tree}.get(step.mode)
    with ConsoleReporter(quiet) as reporter:
        result = run_replay(
            recording,
            ["chain", tree, "oracle"],
            nodes=sorted({*budgets, max(step.nodes, 1)}),
            reporter=reporter,
        )
    trees = result.curve(tree)
    now = None if own is None else result.curve(own).get(step.nodes)
    return ReplayedTaus(
        trees=tuple(TauPoint(n, trees[n]) for n in budgets),
        current=None if now is None else TauPoint(step.nodes, now),
        source=f"{result.mode} replay of {lattices}",
        oracle=result.row("oracle", None).tau.value,
    )


def _finish(
    answer: CeilingAnswer,
    inputs: Sequence[Path | None],
    *,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    from specpilot_cli.ceiling.document import ceiling_document
    from specpilot_cli.report.ceiling_page import render_ceiling_page
    from specpilot_cli.report.ceiling_text import print_answer
    from specpilot_cli.report.json_out import build_envelope

    given = [item for item in inputs if item is not None]
    envelope = build_envelope("ceiling", ceiling_document(answer), inputs=given)
    options.finish(
        envelope,
        as_json=as_json,
        output=output,
        force=force,
        text=lambda: print_answer(answer),
        writers={".html": lambda: render_ceiling_page(answer, envelope)},
    )


def _finish_list(*, as_json: bool, output: Path | None, force: bool) -> None:
    from specpilot_cli.ceiling.peaks import Peaks, gpu_names, load_gpu
    from specpilot_cli.ceiling.step_times import load_step_times, step_time_names
    from specpilot_cli.models.registry import bundled_model, model_names
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_table
    from specpilot_cli.units import format_bandwidth

    known = [load_gpu(name) for name in gpu_names()]
    devices = [
        [gpu.name, gpu.title, format_bandwidth(Peaks(gpu.title, gpu.peaks).bandwidth().value)]
        for gpu in known
    ]
    curves = [load_step_times(name) for name in step_time_names()]
    models = [bundled_model(name) for name in model_names()]

    def text() -> None:
        print_table(["device", "what it is", "read bandwidth"], devices)
        print_table(["model", "what it is"], [[model.name, model.title] for model in models])
        print_table(["step times", "source"], [[curve.name, curve.source] for curve in curves])

    options.finish(
        build_envelope("ceiling", {"devices": known, "models": models, "step_times": curves}),
        as_json=as_json, output=output, force=force, text=text,
    )  # fmt: skip
