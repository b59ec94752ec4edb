"""`specpilot ceiling --target`: floors of a model on a device, without any profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.ceiling.floors import FloorRule
    from specpilot_cli.ceiling.peaks import Peaks
    from specpilot_cli.ceiling.plain import FloorSpeedups
    from specpilot_cli.ceiling.replayed import ReplayedTaus


@dataclass(frozen=True, slots=True)
class ModelStep:
    """Models and shape of the step; see the options of `specpilot ceiling`. Block 0 = the rows,
    or what was recorded.
    """

    target: str
    drafter: str | None
    rows: int
    block: int
    requests: int
    context: int
    tau: float | None
    lattices: Path | None
    nodes: str


@dataclass(frozen=True, slots=True)
class Device:
    """Whose peaks, and which share of them."""

    gpu: str | None
    peaks: Path | None
    measured: bool
    rule: FloorRule


def model_ceiling(
    step: ModelStep,
    device: Device,
    *,
    as_json: bool,
    output: Path | None,
    force: bool,
    quiet: bool,
) -> NoReturn:
    """Print the floors and end the command."""
    from specpilot_cli.ceiling.factors import check_tau
    from specpilot_cli.ceiling.model_floors import model_floors, model_floors_document
    from specpilot_cli.ceiling.plain import floor_speedups, floor_speedups_document
    from specpilot_cli.models.registry import load_drafter, load_target
    from specpilot_cli.models.work import StepShape
    from specpilot_cli.report.json_out import build_envelope

    options.check_output(output, force)
    chosen = _peaks(device.gpu, device.peaks, measured=device.measured)
    target = load_target(step.target)
    drafter = None if step.drafter is None else load_drafter(step.drafter, target)
    replayed, recorded = _replayed(step, quiet=quiet)
    block = 0 if drafter is None else step.block or recorded or step.rows
    check_tau(step.tau, "--tau", most=min(step.rows, block + 1 if block else step.rows))
    shape = StepShape(step.requests, step.rows, 1, step.context, block)
    asked = model_floors(target, drafter, shape, chosen, rule=device.rule)
    over = floor_speedups(asked, step.tau, () if replayed is None else replayed.trees)
    source = None if replayed is None else replayed.source
    document = model_floors_document(over.floors) | floor_speedups_document(over)
    document["tau_source"] = source
    inputs = [path for path in (step.lattices, device.peaks) if path is not None]
    options.finish(
        build_envelope("ceiling", document, inputs=inputs),
        as_json=as_json, output=output, force=force, text=lambda: _print(over, source),
    )  # fmt: skip


def _replayed(step: ModelStep, *, quiet: bool) -> tuple[ReplayedTaus | None, int]:
    """Replayed trees and the recorded block; None and 0 without lattices."""
    from specpilot_cli.commands.ceiling_replay import replay_taus
    from specpilot_cli.errors import InputError

    if step.lattices is None:
        return None, 0
    if step.rows != 1 or step.tau is not None:
        raise InputError(
            "rows and tokens per step follow from the recorded lattices and --nodes",
            where="--lattices",
            hint="leave --rows and --tau out",
        )
    return replay_taus(step.lattices, step.nodes, None, quiet=quiet)


def _peaks(gpu: str | None, file: Path | None, *, measured: bool) -> Peaks:
    from specpilot_cli.ceiling.peaks import Peaks, gpu_names, load_gpu, load_peaks_file, prefer
    from specpilot_cli.errors import InputError

    if gpu is not None and file is not None:
        raise InputError("--gpu and --peaks exclude each other", hint="give one of them")
    if gpu is None and file is None:
        raise InputError(
            "floors of a model need a device",
            where="--gpu",
            hint=f"give --gpu NAME ({', '.join(gpu_names())}) or --peaks FILE",
        )
    if file is not None:
        return prefer(load_peaks_file(file), measured=measured)
    known = load_gpu(gpu or "")
    return prefer(Peaks(known.title, known.peaks), measured=measured)


def _print(over: FloorSpeedups, source: str | None) -> None:
    from specpilot_cli.report.tables import Column, print_line, print_table
    from specpilot_cli.units import format_bandwidth, format_bytes, format_percent, format_seconds

    floors = over.floors
    bandwidth = floors.peaks.bandwidth()
    shape = floors.shape
    print_line(
        f"{floors.target.title} on {floors.peaks.title}: "
        f"{shape.requests:g} {'request' if shape.requests == 1 else 'requests'} of "
        f"{shape.rows:g} {'row' if shape.rows == 1 else 'rows'}, "
        f"{shape.context:g} tokens of context"
    )
    print_table(
        ["class", *(Column(title, "right") for title in ("bytes", "GFLOP", "floor")), "bound by"],
        [
            (work.name, format_bytes(work.bytes or 0), f"{(work.flops or 0) / 1e9:.2f}",
             format_seconds(floor.floor_s), floor.bound)
            for work, floor in zip(floors.work, floors.classes, strict=True)
        ],
        title=f"floors at {format_percent(floors.rule.byte_fraction, digits=0)} of "
        f"{format_bandwidth(bandwidth.value)} ({bandwidth.kind})",
    )  # fmt: skip
    print_table(
        ["matrix", *(Column(title, "right") for title in ("count", "out", "in", "bytes"))],
        [
            (m.name, str(m.count * m.experts), str(m.out_features), str(m.in_features),
             format_bytes(floors.target.weight_bytes.value * m.weights))
            for m in floors.matrices
        ],
    )  # fmt: skip
    print_line(
        f"weights: {floors.weight_bytes / 1e9:.2f} GB, read in {1e3 * floors.weight_s:.2f} ms; "
        f"whole step at its floors: {format_seconds(floors.floor_s)}"
    )
    _print_speedups(over, source)


def _print_speedups(over: FloorSpeedups, source: str | None) -> None:
    from specpilot_cli.report.adapters import SPEEDUP_COLUMNS, speedup_rows
    from specpilot_cli.report.tables import Column, print_line, print_table

    if over.step is not None:
        print_line(f"over plain decoding: {over.step.text}")
    if source is not None:
        print_table(
            [Column(title, "right") for title in SPEEDUP_COLUMNS], speedup_rows(over.points),
            title=f"speedup over plain decoding if both run at their floors; τ: {source}",
        )  # fmt: skip
        if not over.floors.shape.block:
            print_line("note: no --drafter was given, so drafting costs nothing here")
