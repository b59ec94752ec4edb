"""How `specpilot paired-bench` ends: its result, a sweep, or saved results shown again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specpilot_cli.commands import bench_parts, options
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.paired_bench.types import (
        PairedBenchResult,
        PairedBenchSettings,
        PairedBenchSummary,
    )
    from specpilot_cli.schema.result import Envelope

SAVED_SYSTEMS = ("baseline", "candidate", "ar")


def check_outputs(kept: bench_parts.OutputOptions) -> None:
    """The result, its journal, answers and table: all can be written, and none is an input."""
    from specpilot_cli.report.paired_bench_export import check_export

    options.check_output(kept.output, kept.force, ".html")
    check_export(kept.export)
    if kept.export is not None:
        options.check_new_file(kept.export, kept.export.suffix, where="--export", force=kept.force)
    if kept.redact and kept.save_outputs is not None:
        raise InputError(
            "--redact and --save-outputs contradict each other",
            hint="answers that are kept for token-force hold prompts and outputs",
        )
    if kept.resume and kept.journal is None:
        raise InputError("--resume needs --output", hint="the journal lies beside the result file")
    answers = options.answer_files(kept.save_outputs, SAVED_SYSTEMS, force=kept.force)
    named = {"-o": kept.output, "the journal of -o": kept.journal, "--export": kept.export}
    options.check_not_input({**named, **answers}, kept.inputs)


def keep(result: PairedBenchResult, kept: bench_parts.OutputOptions) -> None:
    """The answers of the first run for token-force, and the table of all of them."""
    from specpilot_cli.io.jsonl import write_jsonl
    from specpilot_cli.paired_bench.outputs import output_records
    from specpilot_cli.report.paired_bench_export import export_rows

    if kept.save_outputs is not None:
        for system in SAVED_SYSTEMS:
            records = output_records(result, system)
            if records:
                path = kept.save_outputs / f"{system}.jsonl"
                write_jsonl(path, records, force=kept.force)
    if kept.export is not None:
        export_rows(result.rows, kept.export, force=kept.force)


def show_saved(saved: list[Path], kept: bench_parts.OutputOptions, *, alone: bool) -> None:
    """One saved result as if it had just been measured, or several beside each other.

    alone: nothing else was asked for; InputError otherwise.
    """
    from specpilot_cli.paired_bench.saved import read_saved, saved_rows
    from specpilot_cli.report.paired_bench_compare import Saved, compare_table
    from specpilot_cli.report.paired_bench_export import export_rows
    from specpilot_cli.report.paired_bench_text import print_tables

    if not alone:
        raise InputError(
            "--from measures nothing, so it takes no server and no prompts",
            hint="leave out the other options to see the saved result",
        )
    if len(saved) > 1:
        if kept.as_json or kept.output is not None or kept.export is not None:
            raise InputError("several results are only shown", hint="give one --from FILE")
        print_tables(compare_table([Saved(path, read_saved(path)[1]) for path in saved]))
        return
    envelope, summary = read_saved(saved[0])
    if kept.export is not None:
        export_rows(saved_rows(saved[0], summary), kept.export, force=kept.force)
    finish(envelope, summary, kept)


def finish_sweep(
    path: Path, request: bench_parts.PromptOptions, settings: PairedBenchSettings,
    kept: bench_parts.OutputOptions,
) -> NoReturn:  # fmt: skip
    """Time every variant of a launch file; print and keep the sweep."""
    from specpilot_cli.commands.bench_sweep import sweep_stock
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.paired_bench_text import print_tables, sweep_table
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(kept.quiet) as reporter, kept.work_folder() as work:
        found = sweep_stock(path, request, settings, work, reporter)
    envelope = build_envelope(
        "paired-bench", found.model_dump(mode="json"), inputs=[path, *request.inputs()]
    )
    options.finish(
        envelope, as_json=kept.as_json, output=kept.output, force=kept.force,
        text=lambda: print_tables(sweep_table(found)),
    )  # fmt: skip


def finish(
    envelope: Envelope, summary: PairedBenchSummary, kept: bench_parts.OutputOptions
) -> NoReturn:
    """Print and write the result, and end with its exit code."""
    from specpilot_cli.report.paired_bench_text import print_summary

    def page() -> str:
        from specpilot_cli.report.paired_bench_page import render_bench_page

        return render_bench_page(summary, envelope)

    options.finish(
        envelope, as_json=kept.as_json, output=kept.output, force=kept.force,
        exit_zero=kept.exit_zero,
        text=lambda: print_summary(summary), writers={".html": page},
    )  # fmt: skip
