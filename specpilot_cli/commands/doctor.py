"""`specpilot doctor`: what this machine can do."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.doctor.checks import Check
    from specpilot_cli.doctor.kernels import KernelReport
    from specpilot_cli.doctor.measure import Measured
    from specpilot_cli.settings import ConfigFile
    from specpilot_cli.simulate.plateaus import Plateau


class Requirement(StrEnum):
    """What `--require` may name."""

    TORCH = "torch"
    GPU = "gpu"
    SGLANG = "sglang"


Require = Annotated[
    list[Requirement] | None,
    typer.Option("--require", help="Exit 3 if what this needs is missing; repeatable."),
]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Check and time the W12 product on this GPU instead.")
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure", help="Measure this GPU's read bandwidth and GEMM rate; keep them instead."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME",
        help="With --kernels or --measure: the model whose shapes are tried.",
    ),
]  # fmt: skip
Tune = Annotated[
    bool,
    typer.Option("--tune", help="With --kernels: store which way is fastest for each shape, too."),
]


def doctor(
    require: Require = None,
    kernels: Kernels = False,
    model: Model = "Qwen3.8-27B",
    tune: Tune = False,
    measure: Measure = False,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Show what this machine can do and what each missing piece would enable.

    Exit 3 only if something that `--require` names is missing.

    Examples:

        specpilot doctor

        specpilot doctor --require torch

        specpilot doctor --require gpu --require sglang --json

        specpilot doctor --kernels

        specpilot doctor --measure
    """
    from specpilot_cli.errors import InputError

    options.check_output(output, force)
    if measure and kernels:
        raise InputError("--measure and --kernels exclude each other", hint="run one, then other")
    if measure:
        _finish_measure(model, as_json, output, force, quiet)
    if kernels:
        _finish_kernels(model, tune, as_json, output, force, quiet)
    if tune:
        raise InputError("--tune goes with --kernels", where="--tune")
    _show_checks([item.value for item in require or []], as_json, output, force)


def _show_checks(required: list[str], as_json: bool, output: Path | None, force: bool) -> None:
    from specpilot_cli.doctor.checks import missing_for, run_checks
    from specpilot_cli.errors import MachineError
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.settings import KNOWN_VARIABLES, read_config

    checks = run_checks()
    files = read_config(os.environ, Path.cwd())
    missing = missing_for(checks, required)
    envelope = build_envelope(
        "doctor",
        {
            "checks": checks,
            "required": required,
            "missing": [check.name for check in missing],
            "config_files": files,
            "variables": {name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ},
        },
    )
    options.emit(
        envelope, as_json=as_json, output=output, force=force, text=lambda: _print(checks, files)
    )
    if missing:
        raise MachineError(
            f"{' and '.join(required)} required, but missing: "
            f"{', '.join(check.name for check in missing)}",
            hint=next((check.fix for check in missing if check.fix), None),
        )


def _print(checks: list[Check], files: list[ConfigFile]) -> None:
    from specpilot_cli.report.tables import print_line, print_table

    rows = [(c.name, "ok" if c.ok else "missing", c.detail, c.enables) for c in checks]
    print_table(["check", "state", "found", "enables"], rows)
    for check in checks:
        if check.fix and not check.ok:
            print_line(f"{check.name}: {check.fix}")
    for file in files:
        print_line(f"defaults from {file.path}")


def _finish_kernels(
    model: str, tune: bool, as_json: bool, output: Path | None, force: bool, quiet: bool
) -> NoReturn:
    from specpilot_cli.doctor.kernels import check_kernels
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(quiet=quiet) as reporter:
        report = check_kernels(model, tune=tune, reporter=reporter)
    envelope = build_envelope("doctor", {"kernels": report}, verdict=report.verdict)
    options.finish(
        envelope, as_json=as_json, output=output, force=force, text=lambda: _print_kernels(report)
    )


def _print_kernels(report: KernelReport) -> None:
    from specpilot_cli.doctor.kernels import ROWS
    from specpilot_cli.report.tables import print_line, print_table

    print_line(f"{report.gpu}, {report.model}: W12 against cuBLAS with BF16 weights, cold L2")
    head = ["projection", "shape", "results", *(f"{rows} rows" for rows in ROWS), "plan"]
    print_table(
        head,
        [
            (
                row.projection,
                f"{row.out_features} x {row.in_features}",
                row.skipped or ("WRONG" if row.errors else "right"),
                *(f"{row.ratios[rows]:.2f}x" if row.ratios else "" for rows in ROWS),
                f"kernel to {row.kernel_rows} rows, passes to {row.passes_rows}",
            )
            for row in report.rows
        ],
    )
    for row in report.rows:
        for error in row.errors:
            print_line(f"{row.projection}: {error}")


def _finish_measure(
    model: str, as_json: bool, output: Path | None, force: bool, quiet: bool
) -> NoReturn:
    from specpilot_cli.doctor.measure import keep, local_profile, measure
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(quiet=quiet) as reporter:
        measured = measure(model, reporter=reporter)
    profile = local_profile(measured)
    path = keep(profile)
    plateaus = _plateaus(measured)
    results = {
        "measured": measured,
        "plateaus": plateaus,
        "profile": profile,
        "profile_file": str(path),
    }

    def text() -> None:
        _print_measured(measured, plateaus, profile.name, path)

    options.finish(
        build_envelope("doctor", results), as_json=as_json, output=output, force=force, text=text
    )


def _plateaus(measured: Measured) -> tuple[Plateau, ...]:
    from specpilot_cli.simulate.plateaus import RowSamples, find_plateaus

    samples = [RowSamples(row.rows, row.seconds) for row in measured.skinny]
    return find_plateaus(samples) if samples else ()


def _print_measured(
    measured: Measured, plateaus: tuple[Plateau, ...], name: str, path: Path
) -> None:
    from specpilot_cli.report.tables import Column, print_line, print_table
    from specpilot_cli.units import format_bandwidth, format_flops, format_percent, format_seconds

    read, square = measured.read, measured.square
    print_line(f"{measured.device.name}: medians over replays of CUDA graphs, L2 cold")
    print_table(
        ["measured", Column("rate", "right"), Column("spread", "right")],
        [
            ("reads", format_bandwidth(read.value), format_percent(read.spread_ratio)),
            (
                f"BF16 product of {measured.square_size} x {measured.square_size}",
                format_flops(square.value),
                format_percent(square.spread_ratio),
            ),
        ],
    )
    head = ["rows", "time", "of the reads' rate", "arithmetic"]
    print_table(
        [Column(title, "right") for title in head],
        [
            (
                str(row.rows),
                format_seconds(row.median_s),
                format_percent(row.bytes / row.median_s / read.value),
                format_flops(row.flops / row.median_s),
            )
            for row in measured.skinny
        ],
        title=f"one of each projection of {measured.model}, BF16, by rows",
    )
    for plateau in plateaus:
        end = "or more" if plateau.next_rows is None else f"(next measured: {plateau.next_rows})"
        print_line(
            f"flat from {plateau.first_rows} to {plateau.last_rows} rows {end}: "
            f"{format_seconds(plateau.seconds)}"
        )
    print_line(f"kept as `{name}` in {path}; `specpilot ceiling --gpu {name}` uses it")
