"""`specpilot convert-w12`: store a BF16 checkpoint in 12 bits per weight, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specpilot_cli.commands import options
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.convert_w12.convert import Conversion
    from specpilot_cli.convert_w12.plan import Selection
    from specpilot_cli.schema.result import Envelope
    from specpilot_cli.ui import Reporter
    from specpilot_kernels.w12.stripes import StripeCodec

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="Folder with BF16 safetensors, or hub id `owner/name[@revision]`."
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="The folder to create.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Read every tensor, show what would happen, write nothing."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include", metavar="GLOB", help="Convert only these: tensor or module names; repeatable."
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="GLOB", help="Never convert these, as `*.down_proj`; repeatable."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=1024,
        help="Worker threads. Default: the processors, at most 8; beyond 16 they find no work.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue an interrupted run; what is there is compared."),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-size", metavar="SIZE", help="New shards of at most SIZE of BF16, as in 5GB."
    ),
]
Device = Annotated[
    Literal["cpu", "cuda"],
    typer.Option("--device", help="Where to encode and decode; same bytes from both."),
]


def resolved(source: str, reporter: Reporter, *, quiet: bool) -> Path:
    """The folder that `source`, a folder or a hub id, names."""
    import os
    import sys

    from specpilot_cli.io.hub import resolve_source

    hidden = quiet or os.environ.get("SPECPILOT_NO_PROGRESS") or not sys.stderr.isatty()
    return resolve_source(source, bars=not hidden, reporter=reporter)


def local_folder(source: str | None) -> Path | None:
    """`source` if it is a folder here; a hub id cannot be written to."""
    return Path(source) if source is not None and Path(source).is_dir() else None


def default_workers() -> int:
    """The processors this process may use, at most 8: beyond that the disk decides."""
    from specpilot_cli.settings import available_cores

    return min(8, available_cores())


def convert_w12(
    source: Source,
    out: Out = None,
    dry_run: DryRun = False,
    include: Include = None,
    exclude: Exclude = None,
    workers: Workers = None,
    device: Device = "cpu",
    shard_size: ShardSize = None,
    resume: Resume = False,
    force: options.ForceFlag = False,
    as_json: options.JsonFlag = False,
    report: options.ReportFile = None,
    quiet: options.QuietFlag = False,
) -> None:
    """Store a BF16 checkpoint in 12 bits per weight, bit for bit.

    Linear weights convert; embedding tables, norms, convolutions, other dtypes and tensors that
    would not shrink stay as they are, each with its reason. Every tensor is decoded again and
    compared before it is written. The source is never changed.

    Examples:

        specpilot convert-w12 Qwen3.8-27B --dry-run

        specpilot convert-w12 Qwen3.8-27B -o Qwen3.8-27B-W12

        specpilot convert-w12 Qwen/Qwen3-4B@main -o Qwen3-4B-W12 --shard-size 5GB --resume

        specpilot convert-w12 model -o model-w12 --exclude '*.down_proj' --json
    """
    from specpilot_cli.convert_w12.device import gpu_errors_said, open_codec
    from specpilot_cli.convert_w12.plan import Selection
    from specpilot_cli.ui import ConsoleReporter

    _check_usage(source, out, report, dry_run=dry_run, force=force)
    codec = open_codec(device)
    selection = Selection(tuple(include or ()), tuple(exclude or ()))
    with ConsoleReporter(quiet) as reporter, gpu_errors_said():
        folder = resolved(source, reporter, quiet=quiet)
        done = _convert(
            folder, out, selection, reporter, dry_run=dry_run,
            shard_bytes=_shard_bytes(shard_size), codec=codec,
            threads=workers or default_workers(), force=force, resume=resume,
        )  # fmt: skip
    options.finish(
        _envelope(folder, out, done), as_json=as_json, output=report, force=force,
        text=lambda: _print(done, out, quiet=quiet),
    )  # fmt: skip


def _shard_bytes(text: str | None) -> int | None:
    from specpilot_cli.units import parse_bytes

    size = parse_bytes(text, where="--shard-size") if text is not None else None
    if size is not None and size < 1:
        raise InputError("a shard needs room", where="--shard-size", hint="for example `5GB`")
    return size


def _check_usage(
    source: str, out: Path | None, report: Path | None, *, dry_run: bool, force: bool
) -> None:
    from specpilot_cli.io.atomic import partial_path, retired_path

    if out is not None and out.name in ("", ".."):
        raise InputError(f"`{out}` is no name for a new folder", where="--out", hint="name it")
    # The report is written last: none of the conversion's folders may hold it.
    folders = (out, partial_path(out), retired_path(out)) if out is not None else ()
    inputs = (local_folder(source), *folders)
    options.check_output(report, force, where="--report", inputs=inputs)
    options.check_not_input({"--out": out}, inputs[:1])
    if out is None and not dry_run:
        raise InputError(
            "where to? `-o DST` is missing", where="--out", hint="or look first with --dry-run"
        )


def _convert(
    source: Path,
    target: Path | None,
    selection: Selection,
    reporter: Reporter,
    *,
    dry_run: bool,
    shard_bytes: int | None,
    codec: StripeCodec,
    threads: int,
    force: bool,
    resume: bool,
) -> Conversion:
    from specpilot_cli.convert_w12.convert import convert_folder, survey_folder
    from specpilot_cli.convert_w12.leftovers import foreseen
    from specpilot_cli.convert_w12.shards import plan_shards
    from specpilot_cli.io.hf_folder import open_hf_folder, why_left_out

    folder = open_hf_folder(source)
    for name in folder.left_out:
        reporter.note(f"not carried over: `{name}` ({why_left_out(name)})")
    if dry_run or target is None:
        done = survey_folder(
            folder, selection, threads=threads, shard_bytes=shard_bytes, codec=codec,
            reporter=reporter,
        )  # fmt: skip
        shards = plan_shards(folder, selection, shard_bytes)
        for what in foreseen(folder, target, shards, force=force, resume=resume) if target else ():
            reporter.warn(what)
        return done
    return convert_folder(
        folder, target, selection, threads=threads, force=force, resume=resume,
        shard_bytes=shard_bytes, codec=codec, reporter=reporter,
    )  # fmt: skip


def _envelope(source: Path, target: Path | None, done: Conversion) -> Envelope:
    from specpilot_cli.convert_w12.inspect import totals
    from specpilot_cli.io.hub import hub_origin
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.w12 import tensor_objects, totals_object
    from specpilot_cli.schema.result import InputFile

    dry_run = done.manifest is None
    envelope = build_envelope(
        "convert-w12",
        {
            "source_hub": hub_origin(source),
            "out": target,
            "dry_run": dry_run,
            "found_finished": done.found_finished,
            "totals": totals_object(totals(done.outcomes)),
            "carried_bytes": done.carried_bytes,
            "folder_bytes": done.folder_bytes,
            "disk_needed_bytes": done.need.total_bytes,
            "disk_free_bytes": _free_bytes(target),
            "left_out": done.left_out,
            "tensors": tensor_objects(done.outcomes),
        },
        inputs=[source / "config.json"],
        verdict=None if dry_run else "identical",
    )
    sources = done.manifest.sources if done.manifest is not None else []
    # The conversion hashed every shard already; reading a large model again would take minutes.
    hashed = [InputFile(path=str(source / s.name), sha256=s.sha256) for s in sources]
    return envelope.model_copy(update={"inputs": [*envelope.inputs, *hashed]})


def _free_bytes(target: Path | None) -> int | None:
    from specpilot_cli.convert_w12.target import free_disk_bytes

    return free_disk_bytes(target) if target is not None else None


def _print(done: Conversion, target: Path | None, *, quiet: bool) -> None:
    from specpilot_cli.report.tables import print_line, print_pairs
    from specpilot_cli.report.w12 import print_kept, print_tensors, print_totals
    from specpilot_cli.units import format_bytes

    if done.manifest is None and not quiet:
        print_tensors(done.outcomes)
    print_kept(done.outcomes)
    print_totals(done.outcomes)
    if done.manifest is None:
        free = _free_bytes(target)
        where = "" if free is None else f", {format_bytes(free)} free at {target}"
        content, reserve = done.need.content_bytes, done.need.reserve_bytes
        needed = f"{format_bytes(content)} at most + {format_bytes(reserve)} reserve{where}"
        print_pairs([("folder", format_bytes(done.folder_bytes)), ("disk needed", needed)])
        print_line("nothing was written")
    elif done.found_finished:
        print_line(f"nothing was left to do, checked bit for bit: {target}")
    else:
        print_line(f"written, checked bit for bit: {target}")
