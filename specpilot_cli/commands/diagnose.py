"""`specpilot diagnose`: why is the accept length low?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.diagnose.outcome import Outcome
    from specpilot_cli.diagnose.run import Diagnosis, Given
    from specpilot_cli.ui import Reporter

_MORE = "What it may look at"

TargetOption = Annotated[
    Path | None,
    typer.Option(
        "--target", metavar="DIR", help="Target folder: tokenizer, template, configuration, hash.",
        rich_help_panel=_MORE,
    ),
]  # fmt: skip
DrafterOption = Annotated[
    Path | None,
    typer.Option(
        "--drafter", metavar="DIR", help="Drafter folder: configuration, hash.",
        rich_help_panel=_MORE,
    ),
]  # fmt: skip
AgainstOption = Annotated[
    Path | None,
    typer.Option(
        "--against", metavar="LATTICE", help="A recording of the same prompts known to be good.",
        rich_help_panel=_MORE,
    ),
]  # fmt: skip
ExpectOption = Annotated[
    float | None,
    typer.Option(
        "--expect", metavar="TAU", help="Accept length, bonus included, that others report.",
        rich_help_panel=_MORE,
    ),
]  # fmt: skip
NoHashFlag = Annotated[
    bool,
    typer.Option("--no-hash", help="Do not hash the folders given.", rich_help_panel=_MORE),
]


def diagnose(
    lattice: options.LatticePath,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    against: AgainstOption = None,
    expect: ExpectOption = None,
    no_hash: NoHashFlag = False,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    exit_zero: options.ExitZeroFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Say why a drafter's accept length is low, from a recording, and what to do next.

    Exit 0: nothing found. Exit 1: a fault, or a reason to distrust the number. Exit 4: too few
    requests to say.

    Examples:

        specpilot diagnose lattices.safetensors

        specpilot diagnose lattices.safetensors --target target/ --drafter drafter/ -o why.html

        specpilot diagnose int4.safetensors --against bf16.safetensors --json
    """
    from specpilot_cli.diagnose.document import diagnosis_document
    from specpilot_cli.diagnose.run import diagnose as run
    from specpilot_cli.io.lattice_file import read_lattice
    from specpilot_cli.report.diagnose_page import render_diagnose_page
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.ui import ConsoleReporter

    given_paths = (lattice, target, drafter, against)
    options.check_output(output, force, ".html", inputs=given_paths)
    with ConsoleReporter(quiet) as reporter:
        given = _given(target, drafter, against, expect, hashed=not no_hash, reporter=reporter)
        found = run(read_lattice(lattice), given, reporter=reporter)
    inputs = [path for path in (lattice, against) if path is not None]
    envelope = build_envelope(
        "diagnose", diagnosis_document(found), inputs=inputs, verdict=found.verdict
    )
    options.finish(
        envelope, as_json=as_json, output=output, force=force, exit_zero=exit_zero,
        text=lambda: _print(found),
        writers={".html": lambda: render_diagnose_page(found, envelope, str(lattice))},
    )  # fmt: skip


def _given(
    target: Path | None,
    drafter: Path | None,
    against: Path | None,
    expect: float | None,
    *,
    hashed: bool,
    reporter: Reporter,
) -> Given:
    from specpilot_cli.diagnose.facts import read_drafter, read_target
    from specpilot_cli.diagnose.run import Given
    from specpilot_cli.errors import InputError
    from specpilot_cli.io.hashing import sha256_folder
    from specpilot_cli.io.lattice_file import read_lattice

    if expect is not None and not 1 <= expect < 1000:
        raise InputError(f"--expect {expect:g} is no accept length", where="--expect")
    hashes: dict[str, str] = {}
    for name, folder in (("target", target), ("drafter", drafter)):
        if folder is not None and hashed:
            reporter.note(f"hashing {folder}")
            hashes[name] = sha256_folder(folder)
    return Given(
        target=None if target is None else read_target(target),
        drafter=None if drafter is None else read_drafter(drafter),
        hashes=hashes,
        other=None if against is None else read_lattice(against),
        expected_tau=expect,
    )


def _print(found: Diagnosis) -> None:
    from specpilot_cli.report.diagnose_text import (
        CHECK_COLUMNS,
        POSITION_COLUMNS,
        check_rows,
        headline,
        position_rows,
        tau_line,
    )
    from specpilot_cli.report.tables import Column, print_line, print_table

    print_line(tau_line(found))
    right = [Column(title, "right") for title in POSITION_COLUMNS]
    print_table(right, position_rows(found), title="by drafted position, after right drafts")
    print_table(list(CHECK_COLUMNS), check_rows(found), title="checks")
    for item in found.found:
        _print_finding(item)
    print_line(headline(found))


def _print_finding(item: Outcome) -> None:
    from specpilot_cli.report.tables import print_line

    print_line(f"{item.kind}: {item.title}. {item.detail}.")
    for step in item.next_steps:
        print_line(f"  next: {step}")
