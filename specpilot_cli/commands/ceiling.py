"""`specpilot ceiling`: how far one recorded step is from its ceiling, and which factor leads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specpilot_cli.commands import options
from specpilot_cli.commands.ceiling_model import Device, ModelStep, model_ceiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specpilot_cli.ceiling.answer import CeilingAnswer
    from specpilot_cli.ceiling.floors import FloorRule
    from specpilot_cli.ceiling.what_if import WhatIf

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
ArOption = Annotated[
    Path | None,
    typer.Option(
        "--ar",
        metavar="PROFILE",
        help="A profile of plain decoding: the speedup over it, without step times.",
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
    int,
    typer.Option(min=1, max=4097, help="Verified rows per request.", rich_help_panel=_MODEL),
]
BlockOption = Annotated[
    int,
    typer.Option(
        min=0, max=4097, show_default=False, help="Draft block. Default: the rows.",
        rich_help_panel=_MODEL,
    ),
]  # fmt: skip
RequestsOption = Annotated[
    int,
    typer.Option(min=1, max=1_000_000, help="Requests in flight.", rich_help_panel=_MODEL),
]
ContextOption = Annotated[
    int,
    typer.Option(
        min=0, max=10**9, help="Committed tokens per request.", rich_help_panel=_MODEL
    ),
]
ListFlag = Annotated[
    bool, typer.Option("--list", help="List the known devices, models and step times, and stop.")
]


def ceiling(
    called: typer.Context,
    profile: ProfileArgument = None, list_known: ListFlag = False,
    lattices: LatticesOption = None, nodes: NodesOption = "8,16,32,63", tau: TauOption = None,
    tau_best: TauBestOption = None, step_times: StepTimesOption = None, ar: ArOption = None,
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

        specpilot ceiling step.json --lattices lattices.safetensors --ar plain.json

        specpilot ceiling df8.json --step-times h200-qwen3.8-27b-dflash2-bf16 -o ceiling.html

        specpilot ceiling step.json --what-if-gpu b200 --what-if-model llama-3.1-8b

        specpilot ceiling --target qwen3.8-27b --drafter qwen3.8-27b-dflash2 --gpu h200 \\
          --lattices lattices.safetensors

        specpilot ceiling --list
    """
    rule = _rule(floors)
    options.check_output(output, force, ".html", inputs=(profile, lattices, peaks, step_times, ar))
    if list_known:
        _finish_list(as_json=as_json, output=output, force=force)
    _refuse_unused(called)
    gpu = None if peaks is not None and _from_environment(called) else gpu
    if target is not None:
        model = ModelStep(
            target, drafter, rows, block, requests, context, _tau(tau, oracle=False), lattices,
            nodes,
        )  # fmt: skip
        device = Device(gpu, peaks, measured_peaks, rule)
        model_ceiling(model, device, as_json=as_json, output=output, force=force, quiet=quiet)
    path = _required(profile)
    asked = _Asked(
        lattices, nodes, tau, tau_best, step_times, gpu, peaks, measured_peaks, rule,
        what_if_gpu, what_if_model, ar,
    )  # fmt: skip
    answer = _answer(path, asked, quiet=quiet)
    _finish(answer, (path, lattices, peaks, ar), as_json=as_json, output=output, force=force)


def _rule(floors: Literal["paper", "full-peak"]) -> FloorRule:
    from specpilot_cli.ceiling.floors import FULL_PEAK, PAPER_RULE

    return FULL_PEAK if floors == "full-peak" else PAPER_RULE


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
    ar: Path | None


def _answer(path: Path, asked: _Asked, *, quiet: bool) -> CeilingAnswer:
    from specpilot_cli.ceiling.answer import answer_ceiling
    from specpilot_cli.ceiling.peaks import peaks_for, prefer
    from specpilot_cli.ceiling.step_times import load_step_times
    from specpilot_cli.commands.ceiling_replay import replay_taus
    from specpilot_cli.io.json_file import read_json_model
    from specpilot_cli.schema.step_profile import StepProfile

    step = read_json_model(path, StepProfile)
    curve = None if asked.step_times is None else load_step_times(asked.step_times)
    peaks = prefer(peaks_for(step, gpu=asked.gpu, file=asked.peaks), measured=asked.measured_peaks)
    answer = answer_ceiling(
        step, peaks, tau=_tau(asked.tau), tau_best=asked.tau_best, curve=curve, rule=asked.rule,
        oracle=asked.tau == _ORACLE,
        replayed=None
        if asked.lattices is None
        else replay_taus(asked.lattices, asked.nodes, step, quiet=quiet)[0],
        plain=None if asked.ar is None else read_json_model(asked.ar, StepProfile),
    )  # fmt: skip
    return replace(answer, what_if=_what_if(answer, asked))


def _what_if(answer: CeilingAnswer, asked: _Asked) -> WhatIf | None:
    if asked.what_if_gpu is None and asked.what_if_model is None:
        return None
    from specpilot_cli.ceiling.peaks import Peaks, load_gpu
    from specpilot_cli.ceiling.what_if import what_if
    from specpilot_cli.models.registry import load_target

    gpu = None if asked.what_if_gpu is None else load_gpu(asked.what_if_gpu)
    model = asked.what_if_model
    return what_if(
        answer.profile, answer.ceiling,
        peaks=None if gpu is None else Peaks(gpu.title, gpu.peaks, answer.ceiling.peaks.prefer),
        target=None if model is None else load_target(model, where="--what-if-model"),
    )  # fmt: skip


_OF_PROFILES = ("profile", "ar", "step_times", "tau_best", "what_if_gpu", "what_if_model")
_OF_MODELS = ("drafter", "rows", "block", "requests", "context")


def _refuse_unused(called: typer.Context) -> None:
    """An option that the asked-for answer does not read would be ignored without a word."""
    from specpilot_cli.errors import InputError

    model = called.params["target"] is not None
    for name in _OF_PROFILES if model else _OF_MODELS:
        source = called.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = "PROFILE" if name == "profile" else f"--{name.replace('_', '-')}"
        if model:
            raise InputError(
                f"{option} belongs to a profiled step, and --target asks for floors without one",
                where=option,
                hint="leave it out, or give a PROFILE in place of --target",
            )
        raise InputError(
            f"{option} gives the step of a model without a profile",
            where=option,
            hint="give --target MODEL with it; a profile holds its own shape",
        )


def _from_environment(called: typer.Context) -> bool:
    """Whether --gpu is only a standing default, which an explicit --peaks takes the place of."""
    source = called.get_parameter_source("gpu")
    return source is not None and source.name != "COMMANDLINE"


def _tau(text: str | None, *, oracle: bool = True) -> float | None:
    """Tokens per step as a number; None for none and, with `oracle`, for that word."""
    from specpilot_cli.errors import InputError

    if text is None or (oracle and text == _ORACLE):
        return None
    try:
        return float(text)
    except ValueError as error:
        hint = f"a number, or `{_ORACLE}`" if oracle else "a number; a profiled step has an oracle"
        raise InputError(f"not tokens per step: `{text}`", where="--tau", hint=hint) from error


def _required(profile: Path | None) -> Path:
    from specpilot_cli.errors import InputError

    if profile is None:
        raise InputError(
            "no step profile given",
            where="PROFILE",
            hint="make one with `specpilot profile`, or give --target MODEL --gpu NAME",
        )
    return profile


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
