"""`specpilot w12`: verify, restore and inspect W12 folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options
from specpilot_cli.commands.convert_w12 import (
    Device,
    Workers,
    default_workers,
    local_folder,
    resolved,
)

if TYPE_CHECKING:
    from specpilot_cli.convert_w12.verify import Verification
    from specpilot_cli.schema.result import Envelope

app = typer.Typer(
    no_args_is_help=True,
    help="""Verify, restore and inspect W12 folders.

    `specpilot convert-w12` makes them.

    Examples:

        specpilot w12 verify Qwen3.8-27B-W12 --against Qwen3.8-27B

        specpilot w12 restore Qwen3.8-27B-W12 -o Qwen3.8-27B

        specpilot w12 inspect Qwen3.8-27B-W12 --report weights.html
    """,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder made by convert-w12.")]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        "--output",
        "-o",
        metavar="FILE",
        help="Also write the result: `.html` is a page with a figure, `.json` and `-` are JSON.",
        rich_help_panel="Output",
    ),
]


@app.command()
def verify(
    folder: Folder,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="SRC", help="Compare bit by bit with this folder or hub id."
        ),
    ] = None,
    workers: Workers = None,
    device: Device = "cpu",
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    exit_zero: options.ExitZeroFlag = False,
) -> None:
    """Decode every tensor and compare it with the hash of the source's bits.

    Exit 0: identical. Exit 1: a tensor or file differs, named. Exit 2: not a sound W12 folder.

    Examples:

        specpilot w12 verify Qwen3.8-27B-W12

        specpilot w12 verify Qwen3.8-27B-W12 --against Qwen3.8-27B --json

        specpilot w12 verify Qwen3-4B-W12 --against Qwen/Qwen3-4B
    """
    from specpilot_cli.convert_w12.device import gpu_errors_said, open_codec
    from specpilot_cli.convert_w12.verify import verify_folder
    from specpilot_cli.ui import ConsoleReporter

    options.check_output(output, force, inputs=(folder, local_folder(against)))
    codec = open_codec(device)
    with ConsoleReporter(quiet) as reporter, gpu_errors_said():
        source = resolved(against, reporter, quiet=quiet) if against is not None else None
        found = verify_folder(
            folder, source, threads=workers or default_workers(), codec=codec, reporter=reporter
        )
        for name in found.unknown_files:
            reporter.note(f"not part of the conversion: `{name}`")
    options.finish(
        _verification_envelope(folder, source, found),
        as_json=as_json,
        output=output,
        force=force,
        text=lambda: _print_verification(found),
        exit_zero=exit_zero,
    )


@app.command()
def restore(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to create.")],
    workers: Workers = None,
    force: options.ForceFlag = False,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Give the original checkpoint back, every shard byte for byte.

    Each file's sha256 is compared with the source's before the folder appears.

    Examples:

        specpilot w12 restore Qwen3.8-27B-W12 -o Qwen3.8-27B
    """
    from specpilot_cli.convert_w12.restore import restore_folder
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.tables import Column, print_line, print_table
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(quiet) as reporter:
        done = restore_folder(
            folder, out, threads=workers or default_workers(), force=force, reporter=reporter
        )

    def text() -> None:
        columns = [Column("shard"), Column("sha256"), Column("bytes", "right")]
        print_table(columns, done.shards)
        print_line(f"{done.tensors} tensors and {done.files} other files restored to {out}")

    shards = [{"name": name, "sha256": sha, "size_bytes": size} for name, sha, size in done.shards]
    envelope = build_envelope(
        "w12 restore",
        {"out": out, "tensors": done.tensors, "files": done.files, "shards": shards},
        inputs=[folder / "w12_manifest.json"],
        verdict="identical",
    )
    options.finish(envelope, as_json=as_json, text=text)


@app.command()
def inspect(
    folder: Folder,
    as_json: options.JsonFlag = False,
    output: Report = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Show each tensor's bits per weight, escapes and windows, and the totals.

    Reads the manifest and the windows, not the weights: `w12 verify` checks those.

    Examples:

        specpilot w12 inspect Qwen3.8-27B-W12

        specpilot w12 inspect Qwen3.8-27B-W12 --json

        specpilot w12 inspect Qwen3.8-27B-W12 --report weights.html
    """
    from specpilot_cli.convert_w12.inspect import inspect_folder, totals
    from specpilot_cli.report import w12 as show
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.w12_page import render_w12_page

    options.check_output(output, force, ".html", where="--report", inputs=(folder,))
    outcomes, windows = inspect_folder(folder)

    def text() -> None:
        if not quiet:
            show.print_tensors(outcomes)
        show.print_totals(outcomes)

    envelope = build_envelope(
        "w12 inspect",
        {
            "folder": folder,
            "totals": show.totals_object(totals(outcomes)),
            "tensors": show.tensor_objects(outcomes, windows),
        },
        inputs=[folder / "w12_manifest.json"],
    )
    options.finish(
        envelope,
        as_json=as_json,
        output=output,
        force=force,
        text=text,
        writers={".html": lambda: render_w12_page(folder, outcomes, windows, envelope)},
    )


def _verification_envelope(folder: Path, source: Path | None, found: Verification) -> Envelope:
    from specpilot_cli.io.hub import hub_origin
    from specpilot_cli.report.json_out import build_envelope

    return build_envelope(
        "w12 verify",
        {
            "folder": folder,
            "against": source,
            "against_hub": hub_origin(source) if source is not None else None,
            "tensors": found.tensors,
            "converted_tensors": found.converted,
            "files": found.files,
            "compared_tensors": found.compared,
            "problems": found.problems,
            "unknown_files": found.unknown_files,
        },
        inputs=[folder / "w12_manifest.json"],
        verdict=found.verdict,
    )


def _print_verification(found: Verification) -> None:
    from specpilot_cli.report.tables import print_line

    for problem in found.problems:
        # A name with a line break in it must not look like the verdict.
        name = problem.name.replace("\n", "\\n")
        place = f" in `{problem.shard}`" if problem.shard is not None else ""
        print_line(f"{problem.kind} `{name}`{place}: {problem.what}")
    with_source = f", {found.compared} compared with the source" if found.compared else ""
    if not found.problems:
        print_line(
            f"{found.verdict}: {found.tensors} tensors ({found.converted} as W12), "
            f"{found.files} other files{with_source}"
        )
        return
    kinds = [problem.kind for problem in found.problems]
    sources = f", {kinds.count('source')} source files" if "source" in kinds else ""
    print_line(
        f"{found.verdict}: {kinds.count('tensor')} of {found.tensors} tensors, "
        f"{kinds.count('file')} of {found.files} other files{sources}{with_source}"
    )
