"""Options that several commands share, and the one way a command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from specpilot_cli.errors import InputError, MachineError

if TYPE_CHECKING:
    from specpilot_cli.schema.result import Envelope

_OUTPUT = "Output"

JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=_OUTPUT),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write the result; the suffix picks the form, `-` is JSON on stdout.",
        rich_help_panel=_OUTPUT,
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.json",
        help="Also write the result as JSON; `-` is stdout.",
        rich_help_panel=_OUTPUT,
    ),
]
"""The result file of commands whose `-o` is the folder they create."""
ForceFlag = Annotated[
    bool,
    typer.Option("--force", help="Overwrite existing output.", rich_help_panel=_OUTPUT),
]
QuietFlag = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="No progress and no notes; warnings, errors and the answer stay.",
        rich_help_panel=_OUTPUT,
    ),
]
ExitZeroFlag = Annotated[
    bool,
    typer.Option(
        "--exit-zero",
        help="Exit 0 even when the verdict is no; errors keep their codes.",
        rich_help_panel=_OUTPUT,
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of every random choice.", min=0)]

TargetFolder = Annotated[
    Path, typer.Option("--target", metavar="DIR", help="Target model folder (BF16 or W12).")
]
OptionalDrafterFolder = Annotated[
    Path | None, typer.Option("--drafter", metavar="DIR", help="DFlash2 drafter folder.")
]
LatticePath = Annotated[
    Path, typer.Argument(metavar="LATTICE", help="A lattice file, or a folder with its shards.")
]
OptionalLatticePath = Annotated[
    Path | None,
    typer.Argument(metavar="LATTICE", help="A lattice file, or a folder with its shards."),
]
LatticeOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Lattice file, `.safetensors`.")
]
DtypeOption = Annotated[
    Literal["float32", "bfloat16"], typer.Option("--dtype", help="Arithmetic of both models.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, max=1024, help="CPU threads.")]

# Every verdict word, so that a misspelt one cannot pass for acceptance.
_EXIT_CODES = {
    "accept": 0, "ok": 0, "pass": 0, "identical": 0, "lossless": 0, "promote": 0,
    "reject": 1, "no": 1, "fail": 1, "mismatch": 1,
    "invalid": 4,
}  # fmt: skip


_READER_LEFT = 128 + 13


def exit_code(verdict: str | None) -> int:
    """0 for a yes or no verdict at all, 1 for a no, 4 for a measurement that carries none.

    Raises `ValueError` for an unknown word.
    """
    if verdict is None:
        return 0
    if verdict not in _EXIT_CODES:
        raise ValueError(f"unknown verdict {verdict!r}; known: {', '.join(_EXIT_CODES)}")
    return _EXIT_CODES[verdict]


def check_output(
    output: Path | None,
    force: bool,
    *suffixes: str,
    where: str = "--output",
    inputs: Iterable[Path | str | None] = (),
) -> None:
    """Refuse a bad `--output` (or `where`) before any work is done.

    `.json` and `-` are always possible; `suffixes` lists what else the command can write. `inputs`
    as in `check_not_input`.
    """
    if output is None or str(output) == "-":
        return
    known = (".json", *suffixes)
    if output.suffix not in known:
        raise InputError(
            f"cannot write `{output}`: unknown format `{output.suffix or 'without a suffix'}`",
            where=where,
            hint=f"use one of {', '.join(known)}, or `-` for JSON on stdout",
        )
    check_not_input({where: output}, inputs)
    _check_place(output, force, where)


def check_not_input(
    outputs: Mapping[str, Path | None], inputs: Iterable[Path | str | None]
) -> None:
    """Refuse outputs that would touch an input: `--force` must never cost a source.

    `outputs` by option name. An output may not be an input file, lie inside an input folder, or
    be another output. Raises `InputError`.
    """
    sources = [Path(path).resolve() for path in inputs if path is not None]
    taken: dict[Path, str] = {}
    for name, given in outputs.items():
        if given is None or str(given) == "-":
            continue
        path = given.resolve()
        for source in sources:
            if source in (path, *path.parents):
                raise InputError(
                    f"`{given}` would overwrite or lie inside an input: `{source}`",
                    where=name,
                    hint="inputs are never changed; name another file",
                )
        if path in taken:
            raise InputError(
                f"`{given}` is also the output of {taken[path]}",
                where=name,
                hint="name another file",
            )
        taken[path] = name


def check_new_file(path: Path | None, suffix: str, *, where: str, force: bool) -> None:
    """Refuse a file name that cannot be written later, before any work is done."""
    if path is None:
        return
    if path.suffix != suffix:
        raise InputError(
            f"`{path}` must end in `{suffix}`", where=where, hint=f"name it `{path.name}{suffix}`"
        )
    _check_place(path, force, where)


def answer_files(folder: Path | None, systems: Iterable[str], *, force: bool) -> dict[str, Path]:
    """The files of `--save-outputs`, by what to call them; each is checked as any output."""
    if folder is None:
        return {}
    files = {f"--save-outputs ({name})": folder / f"{name}.jsonl" for name in systems}
    for path in files.values():
        _check_place(path, force, "--save-outputs")
    return files


def _check_place(path: Path, force: bool, where: str) -> None:
    from specpilot_cli.io.atomic import check_can_write

    if path.is_dir():
        raise InputError(f"`{path}` is a folder", where=where, hint="give a file name")
    if path.exists() and not force:
        raise InputError(
            f"`{path}` already exists", where=where, hint="use --force to overwrite it"
        )
    check_can_write(path, where=where)


def emit(
    envelope: Envelope,
    *,
    as_json: bool,
    text: Callable[[], None],
    output: Path | None = None,
    force: bool = False,
    writers: Mapping[str, Callable[[], str]] | None = None,
) -> None:
    """Print the answer and write `output`.

    `text` prints the human form and runs only without JSON on stdout. `writers` maps further
    suffixes (`.html`, `.md`) to functions that return the file's text.
    """
    from specpilot_cli.io.atomic import atomic_write_text
    from specpilot_cli.report.json_out import render_json
    from specpilot_cli.ui import drop_stdout

    check_output(output, force, *(writers or {}))
    document = render_json(envelope)
    to_stdout = as_json or (output is not None and str(output) == "-")
    if output is not None and str(output) != "-":
        content = document if output.suffix == ".json" else (writers or {})[output.suffix]()
        atomic_write_text(output, content, force=force)
    try:
        if to_stdout:
            sys.stdout.write(document)
        else:
            text()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader left. Exit code 1 would read as a verdict, so end as SIGPIPE would.
        drop_stdout()
        raise typer.Exit(_READER_LEFT) from None
    except OSError as error:
        drop_stdout()
        raise MachineError(
            f"cannot write the answer: {error.strerror}",
            where="standard output",
            hint="is there space where it goes? `-o FILE` also writes it to a file",
        ) from error


def finish(
    envelope: Envelope,
    *,
    as_json: bool,
    output: Path | None = None,
    force: bool = False,
    text: Callable[[], None],
    exit_zero: bool = False,
    writers: Mapping[str, Callable[[], str]] | None = None,
) -> NoReturn:
    """`emit`, then raise `typer.Exit` with the verdict's code; `exit_zero` turns a no into 0."""
    code = exit_code(envelope.verdict)
    emit(envelope, as_json=as_json, text=text, output=output, force=force, writers=writers)
    raise typer.Exit(0 if exit_zero and code == 1 else code)
