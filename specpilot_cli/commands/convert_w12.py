"""`specpilot convert-w12`: store a BF16 checkpoint in 12 bits per weight, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specpilot_cli.commands import options
from specpilot_cli.errors import InputError, MachineError

if TYPE_CHECKING:
    from specpilot_cli.convert_w12.convert import Conversion
    from specpilot_cli.convert_w12.plan import Selection
    from specpilot_cli.schema.result import Envelope
    from specpilot_cli.ui import Reporter

Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="Hugging Face folder with BF16 safetensors.")
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DST", help="The folder to create.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Read every tensor, show what would happen, write nothing."),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Convert only matching names; repeatable."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Never convert these; repeatable."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=1024, help="Worker threads; default: the processors, at most 8."
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue an interrupted run; finished shards are re-hashed."),
]
Device = Annotated[
    Literal["cpu", "cuda"], typer.Option("--device", help="Where to encode; same bytes from both.")
]


def default_workers() -> int:
    """The processors this process may use, at most 8: beyond that the disk decides."""
    import os

    return min(8, len(os.sched_getaffinity(0)))


def convert_w12(
    source: Source,
    out: Out = None,
    dry_run: DryRun = False,
    include: Include = None,
    exclude: Exclude = None,
    workers: Workers = None,
    device: Device = "cpu",
    resume: Resume = False,
    force: options.ForceFlag = False,
    as_json: options.JsonFlag = False,
    report: options.ReportFile = None,
    quiet: options.QuietFlag = False,
    verbose: options.VerboseFlag = 0,
) -> None:
    """Store a BF16 checkpoint in 12 bits per weight, bit for bit.

    Linear weights convert; embedding tables, norms, convolutions, other dtypes and tensors that
    would not shrink stay as they are, each with its reason. Every tensor is decoded again and
    compared before it is written. The source is never changed.

    Examples:

        specpilot convert-w12 Qwen3.8-27B --dry-run

        specpilot convert-w12 Qwen3.8-27B -o Qwen3.8-27B-W12

        specpilot convert-w12 Qwen3.8-27B -o Qwen3.8-27B-W12 --resume

        specpilot convert-w12 model -o model-w12 --exclude 'lm_head.*' --json
    """
    from specpilot_cli.convert_w12.plan import Selection
    from specpilot_cli.ui import ConsoleReporter

    options.check_output(report, force, where="--report", inputs=(source, out))
    _check_usage(source, device, out, dry_run)
    target = None if dry_run else out
    selection = Selection(tuple(include or ()), tuple(exclude or ()))
    with ConsoleReporter(quiet, verbose) as reporter:
        done = _convert(
            source, target, selection, reporter,
            threads=workers or default_workers(), force=force, resume=resume,
        )  # fmt: skip
    options.finish(
        _envelope(source, target, done),
        as_json=as_json,
        output=report,
        force=force,
        text=lambda: _print(done, target),
    )


def _check_usage(source: Path, device: str, out: Path | None, dry_run: bool) -> None:
    options.check_not_input({"--out": out}, (source,))
    if out is None and not dry_run:
        raise InputError("where to? `-o DST` is missing", hint="or look first with --dry-run")
    if device == "cuda":
        raise MachineError(
            "no W12 encoder for the GPU: this version encodes on the CPU only",
            where="--device",
            hint="use `--device cpu`; the format leaves an encoder no choice, so the bytes are "
            "those a GPU would give",
        )


def _convert(
    source: Path,
    target: Path | None,
    selection: Selection,
    reporter: Reporter,
    *,
    threads: int,
    force: bool,
    resume: bool,
) -> Conversion:
    from specpilot_cli.convert_w12.convert import convert_folder, survey_folder
    from specpilot_cli.io.hf_folder import open_hf_folder

    folder = open_hf_folder(source)
    for name in folder.left_out:
        reporter.note(f"not carried over: `{name}` (weights that are not part of the checkpoint)")
    if target is None:
        return survey_folder(folder, selection, threads=threads, reporter=reporter)
    return convert_folder(
        folder, target, selection, threads=threads, force=force, resume=resume, reporter=reporter
    )


def _envelope(source: Path, target: Path | None, done: Conversion) -> Envelope:
    from specpilot_cli.convert_w12.inspect import totals
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.w12 import tensor_objects, totals_object
    from specpilot_cli.schema.result import InputFile

    envelope = build_envelope(
        "convert-w12",
        {
            "out": target,
            "dry_run": target is None,
            "totals": totals_object(totals(done.outcomes)),
            "carried_bytes": done.carried_bytes,
            "left_out": done.left_out,
            "tensors": tensor_objects(done.outcomes),
        },
        inputs=[source / "config.json"],
        verdict=None if target is None else "identical",
    )
    shards = done.manifest.shards if done.manifest is not None else []
    # The conversion hashed every shard already; reading a large model again would take minutes.
    hashed = [InputFile(path=str(source / s.name), sha256=s.source_sha256) for s in shards]
    return envelope.model_copy(update={"inputs": [*envelope.inputs, *hashed]})


def _print(done: Conversion, target: Path | None) -> None:
    from specpilot_cli.report.tables import print_line
    from specpilot_cli.report.w12 import print_kept, print_tensors, print_totals

    if target is None:
        print_tensors(done.outcomes)
    print_kept(done.outcomes)
    print_totals(done.outcomes)
    print_line(
        "nothing was written" if target is None else f"written, checked bit for bit: {target}"
    )
