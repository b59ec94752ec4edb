"""`specpilot replay`: tokens per step of other trees, from a recording."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from specpilot_cli.replay.anchors import ReplayOptions, StepCost
    from specpilot_cli.replay.modes import Mode
    from specpilot_cli.schema.result import Envelope

    Writers = dict[str, Callable[[], str]]
    Answer = tuple[Envelope, Callable[[], None], Writers]


_CHOICE = "What to replay"
_CHAIN_NODES = 63  # longer than any chain that a drafter proposes
_DRAFTER = "Change the recorded drafter"


class ModeName(StrEnum):
    """The ways to choose the anchors at which a policy is judged."""

    TRAJECTORY = "trajectory"
    ANCHORED = "anchored"
    DENSE_MEAN = "dense-mean"


NodesOption = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Node budgets, the root not counted: a comma list; `1-32` is a range.",
        rich_help_panel=_CHOICE,
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="POLICY",
        help="A policy of `--list`; repeatable. Default: all that add rows.",
        rich_help_panel=_CHOICE,
    ),
]
ModeOption = Annotated[
    ModeName | None,
    typer.Option(
        help="Where policies are judged. Default: trajectory on a dense recording.",
        rich_help_panel=_CHOICE,
    ),
]
PositionsOption = Annotated[
    int | None,
    typer.Option(help="Use only the first N drafted positions.", rich_help_panel=_DRAFTER),
]
DepthOption = Annotated[
    int | None, typer.Option(help="Cap on the depth of a tree.", rich_help_panel=_DRAFTER)
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        help="Divide the conditional scores by this before they are normalised.",
        rich_help_panel=_DRAFTER,
    ),
]
TopKOption = Annotated[
    int,
    typer.Option(help="Paths that `eagle-2` expands per level.", rich_help_panel=_DRAFTER),
]
StepTimesOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Step times against rows: speedups, and the policy `cost-aware`.",
        rich_help_panel=_CHOICE,
    ),
]
CalibrateFlag = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Fit recall and temperature on half of the requests; report on the other half.",
        rich_help_panel=_DRAFTER,
    ),
]
ListFlag = Annotated[
    bool, typer.Option("--list", help="List the policies, and stop.", rich_help_panel=_CHOICE)
]


def replay(
    lattice: options.OptionalLatticePath = None,
    nodes: NodesOption = "8,16,32,63",
    policy: PolicyOption = None,
    mode: ModeOption = None,
    positions: PositionsOption = None,
    depth: DepthOption = None,
    temperature: TemperatureOption = 1.0,
    top_k: TopKOption = 4,
    step_times: StepTimesOption = None,
    calibrate: CalibrateFlag = False,
    list_policies: ListFlag = False,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Tell how many tokens per step other draft trees would accept, without an engine.

    Trees are built from the recorded scores and judged by the tokens that followed.

    Examples:

        specpilot replay lattices.safetensors

        specpilot replay lattices.safetensors --policy best-first --nodes 1-64 --json

        specpilot replay lattices.safetensors --positions 7 -o replay.html

        specpilot replay lattices.safetensors --step-times h200-qwen3.8-27b-dflash2-bf16

        specpilot replay lattices.safetensors --calibrate

        specpilot replay --list
    """
    pages = () if list_policies or calibrate else (".html",)
    options.check_output(output, force, *pages, inputs=(lattice, step_times))
    if list_policies:
        envelope, text, writers = _policy_list()
    else:
        budgets = parse_nodes(nodes)
        changed = _options(positions, depth, temperature, top_k, step_times, budgets)
        if calibrate:
            _check_calibrate(policy, temperature, step_times)
        answer = _calibrate_file if calibrate else _replay_file
        mode_name: Mode | None = None if mode is None else mode.value
        envelope, text, writers = answer(lattice, budgets, policy, mode_name, changed, quiet=quiet)
    options.finish(
        envelope, as_json=as_json, output=output, force=force, text=text, writers=writers
    )


def _options(
    positions: int | None,
    depth: int | None,
    temperature: float,
    top_k: int,
    step_times: str | None,
    budgets: list[int],
) -> ReplayOptions:
    from specpilot_cli.replay.anchors import ReplayOptions

    cost = None if step_times is None else _step_cost(step_times, budgets)
    return ReplayOptions(
        positions=positions, depth=depth, temperature=temperature, top_k=top_k, step_cost=cost
    )


def _replay_file(
    lattice: Path | None,
    budgets: list[int],
    policies: list[str] | None,
    mode: Mode | None,
    replay_options: ReplayOptions,
    *,
    quiet: bool,
) -> Answer:
    from specpilot_cli.io.lattice_file import LatticeFiles, lattice_files
    from specpilot_cli.io.tree_file import is_tree_file
    from specpilot_cli.replay.document import replay_document
    from specpilot_cli.replay.run import replay as run_replay
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.replay_page import render_replay_page
    from specpilot_cli.report.replay_text import print_replay, recording_line
    from specpilot_cli.ui import ConsoleReporter

    path = _required(lattice)
    if is_tree_file(path):
        return _replay_trees(path, budgets, policies, mode, replay_options)
    recording = LatticeFiles(path)
    with ConsoleReporter(quiet) as reporter:
        result = run_replay(
            recording,
            policies or None,
            nodes=budgets,
            mode=mode,
            options=replay_options,
            reporter=reporter,
        )
    document = replay_document(result, recording)
    envelope = build_envelope("replay", document, inputs=lattice_files(path))
    about = recording_line(result, recording)
    page: Writers = {".html": lambda: render_replay_page(result, about, envelope)}
    return envelope, lambda: print_replay(result, about), page


def _replay_trees(
    path: Path,
    budgets: list[int],
    policies: list[str] | None,
    mode: Mode | None,
    replay_options: ReplayOptions,
) -> Answer:
    """Replay of a sequential drafter's recorded trees."""
    from specpilot_cli.io.tree_file import read_trees
    from specpilot_cli.replay.document import trees_document
    from specpilot_cli.replay.sequential import replay_trees
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.replay_page import render_replay_page
    from specpilot_cli.report.replay_text import print_replay

    recording = read_trees(path)
    result = replay_trees(
        recording, policies or None, nodes=budgets, mode=mode, options=replay_options
    )
    envelope = build_envelope("replay", trees_document(result, recording), inputs=[path])
    about = (
        f"{result.n_requests} requests, {result.n_anchors} steps, eagle, trees up to depth "
        f"{recording.metadata.block - 1}, {recording.node_token.size / recording.n_steps:.1f} "
        f"nodes each, by {recording.metadata.engine}"
    )
    page: Writers = {".html": lambda: render_replay_page(result, about, envelope)}
    return envelope, lambda: print_replay(result, about), page


def _calibrate_file(
    lattice: Path | None,
    budgets: list[int],
    policies: list[str] | None,
    mode: Mode | None,
    replay_options: ReplayOptions,
    *,
    quiet: bool,
) -> Answer:
    from specpilot_cli.errors import InputError
    from specpilot_cli.io.lattice_file import LatticeFiles, lattice_files
    from specpilot_cli.io.tree_file import is_tree_file
    from specpilot_cli.replay.calibration import calibrate
    from specpilot_cli.replay.document import calibration_document
    from specpilot_cli.report.calibration_text import print_calibration
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.ui import ConsoleReporter

    path = _required(lattice)
    if is_tree_file(path):
        raise InputError(
            "calibration needs the scores of all candidates, and recorded trees hold their own",
            where="--calibrate",
            hint="leave --calibrate out: `drafter expects` is set beside τ anyway",
        )
    recording = LatticeFiles(path)
    with ConsoleReporter(quiet) as reporter:
        found = calibrate(
            recording, nodes=budgets, mode=mode, options=replay_options, reporter=reporter
        )
    document = calibration_document(found, recording)
    envelope = build_envelope("replay", document, inputs=lattice_files(path))
    return envelope, lambda: print_calibration(found), {}


def _check_calibrate(policies: list[str] | None, temperature: float, times: str | None) -> None:
    from specpilot_cli.errors import InputError

    if policies or temperature != 1.0 or times is not None:
        raise InputError(
            "--calibrate excludes --policy, --temperature and --step-times",
            where="--calibrate",
            hint="it fits the temperature itself and reports best-first trees",
        )


def _required(lattice: Path | None) -> Path:
    from specpilot_cli.errors import InputError

    if lattice is None:
        raise InputError(
            "no lattice given",
            where="LATTICE",
            hint="make one with `specpilot record`, or see the policies with --list",
        )
    return lattice


def _step_cost(name: str, budgets: list[int]) -> StepCost:
    """Seconds per step for every node count a tree may have, the chain's up to 63 included."""
    from specpilot_cli.ceiling.speedup import step_time
    from specpilot_cli.ceiling.step_times import load_step_times
    from specpilot_cli.replay.anchors import StepCost
    from specpilot_cli.replay.run import check_nodes
    from specpilot_cli.schema.deployment import of_curve

    curve = load_step_times(name)
    most = max([*check_nodes(budgets), _CHAIN_NODES])
    times = [step_time(curve, n + 1) for n in range(most + 1)]
    return StepCost(
        tuple(time.seconds for time in times),
        curve.ar_step_s,
        f"{curve.name}: {curve.source}",
        tuple(time.basis for time in times),
        of_curve(curve),
    )


def _policy_list() -> Answer:
    from specpilot_cli.replay.policies import POLICIES
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import print_table

    rows = [[policy.name, policy.summary] for policy in POLICIES.values()]
    document = {"policies": [{"name": name, "summary": text} for name, text in rows]}
    return build_envelope("replay", document), lambda: print_table(["policy", "verifies"], rows), {}


def parse_nodes(text: str) -> list[int]:
    """Node budgets of `8,16` or `1-32`; InputError on anything else."""
    from specpilot_cli.errors import InputError

    found: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", item.strip())
        if match is None:
            raise InputError(
                f"not a node budget: `{item.strip()}`",
                where="--nodes",
                hint="give whole numbers such as `8,16,32`, or a range such as `1-32`",
            )
        first, last = match.group(1), match.group(2) or match.group(1)
        found.extend(range(int(first), int(last) + 1))
    return found
