"""`specpilot token-force`: is this server lossless against stock?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.token_force.session import Sources

_SYSTEMS = "Systems"
_RULES = "Rules"
_REQUESTS = "Requests"


def token_force(
    system: Annotated[
        str,
        typer.Option(
            metavar="URL|FILE",
            help="The system to judge: a server, or its recorded answers (JSONL).",
            rich_help_panel=_SYSTEMS,
        ),
    ],
    stock: Annotated[
        str,
        typer.Option(
            metavar="URL|FILE",
            help="Stock, untouched; a server also lets the audit probe it.",
            rich_help_panel=_SYSTEMS,
        ),
    ],
    scorer: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Stock's engine with exact weights, no speculation, float32 LM head.",
            rich_help_panel=_SYSTEMS,
        ),
    ],
    ar: Annotated[
        str | None,
        typer.Option(
            metavar="URL|FILE",
            help="Stock's engine without speculation, to calibrate delta.",
            rich_help_panel=_SYSTEMS,
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            metavar="NATS", help="Near-tie threshold instead of --ar.", rich_help_panel=_RULES
        ),
    ] = None,
    strata: Annotated[
        bool,
        typer.Option(help="Also test early and late positions.", rich_help_panel=_RULES),
    ] = True,
    split: Annotated[
        int | None,
        typer.Option(
            min=1, help="First late position. Default: 2048 or mid-way.", rich_help_panel=_RULES
        ),
    ] = None,
    audit_limit: Annotated[
        int, typer.Option(min=1, help="Audited events per system.", rich_help_panel=_RULES)
    ] = 200,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts (JSONL). Default: those of the recorded answers.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with tokenizer.json: tokenises prompts, shows events as text.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Use only the first N prompts.", rich_help_panel=_REQUESTS),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests in flight: use the number you serve with.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 8,
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0, metavar="S", help="Limit of one request, seconds.", rich_help_panel=_REQUESTS
        ),
    ] = 600.0,
    save_outputs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the collected answers, one JSONL per system.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    verbose: options.VerboseFlag = 0,
    exit_zero: options.ExitZeroFlag = False,
) -> None:
    """Judge whether a server's output is stock's, up to rounding: accept (0) or reject (1).

    Examples:

        specpilot token-force --system http://localhost:30001 --stock http://localhost:30000
        --scorer http://localhost:30002 --ar http://localhost:30003 --prompts prompts.jsonl

        specpilot token-force --system tuned.jsonl --stock stock.jsonl --ar ar.jsonl
        --scorer http://localhost:30002 --tokenizer models/target

        specpilot token-force --system http://localhost:30001 --stock stock.jsonl
        --scorer http://localhost:30002 --delta 0.25 --limit 50 --json
    """
    from specpilot_cli.token_force import TokenForceSettings
    from specpilot_cli.token_force.session import Sources

    options.check_output(output, force)
    sources = Sources(
        system=system,
        stock=stock,
        scorer=scorer,
        ar=ar,
        prompts=prompts,
        tokenizer=tokenizer,
        limit=limit,
        concurrency=concurrency,
        timeout_s=timeout,
        save_outputs=save_outputs,
        overwrite=force,
    )
    settings = TokenForceSettings(
        delta_nats=delta,
        strata=strata,
        split_position=split,
        audit_limit=audit_limit,
        probe_concurrency=concurrency,
        seed=seed,
    )
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.report.token_force_text import print_result
    from specpilot_cli.token_force.session import run_session
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(quiet, verbose) as reporter:
        result, engines = run_session(sources, settings, reporter=reporter)
    envelope = build_envelope(
        "token-force",
        result.to_json(),
        inputs=_input_files(sources),
        seed=seed,
        verdict=result.verdict,
        environment={"engines": engines},
    )
    options.finish(
        envelope,
        as_json=as_json,
        output=output,
        force=force,
        text=lambda: print_result(result),
        exit_zero=exit_zero,
    )


def _input_files(sources: Sources) -> list[Path]:
    from specpilot_cli.token_force.collect import is_url

    named = (sources.system, sources.stock, sources.ar)
    files = [Path(name) for name in named if name is not None and not is_url(name)]
    return files if sources.prompts is None else [*files, sources.prompts]
