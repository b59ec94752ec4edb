"""`specpilot token-force`: is this server lossless against stock?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.schema.result import Envelope
    from specpilot_cli.token_force import TokenForceResult, TokenForceSettings
    from specpilot_cli.token_force.session import Sources


def _system(help_text: str, metavar: str = "URL|FILE") -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel="Systems")


def _rule(help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Rules", **more)


def _request(help_text: str, metavar: str = "N", **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel="Requests", **more)


System = Annotated[str, _system("The system to judge: a server, or its recorded answers (JSONL).")]
Stock = Annotated[str, _system("Stock, untouched; a server also lets the audit probe it.")]
Scorer = Annotated[
    str, _system("Stock's engine: exact weights, no speculation, float32 LM head.", "URL")
]
Ar = Annotated[str | None, _system("Stock's engine without speculation, to calibrate delta.")]
Delta = Annotated[float | None, _rule("Near-tie threshold instead of --ar.", metavar="NATS")]
Strata = Annotated[bool, _rule("Also test early and late positions.")]
Split = Annotated[
    int | None, _rule("First late position. Default: 2048 or mid-way.", metavar="N", min=1)
]
AuditLimit = Annotated[int, _rule("Audited events per system.", metavar="N", min=1)]
Prompts = Annotated[
    Path | None, _request("Prompts (JSONL). Default: those of the recorded answers.", "FILE")
]
TokenizerFolder = Annotated[
    Path | None,
    _request("Folder with tokenizer.json: tokenises prompts, shows events as text.", "DIR"),
]
Limit = Annotated[int | None, _request("Use only the first N prompts.", min=1)]
Concurrency = Annotated[int, _request("Requests in flight: use the number you serve with.", min=1)]
Timeout = Annotated[float, _request("Limit of one request, seconds.", "SECONDS", min=1.0)]
SaveOutputs = Annotated[
    Path | None, _request("Keep the collected answers, one JSONL per system.", "DIR")
]


def token_force(
    system: System,
    stock: Stock,
    scorer: Scorer,
    ar: Ar = None,
    delta: Delta = None,
    strata: Strata = True,
    split: Split = None,
    audit_limit: AuditLimit = 200,
    prompts: Prompts = None,
    tokenizer: TokenizerFolder = None,
    limit: Limit = None,
    concurrency: Concurrency = 8,
    timeout: Timeout = 600.0,
    save_outputs: SaveOutputs = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    exit_zero: options.ExitZeroFlag = False,
) -> None:
    """Judge whether a server's output is stock's, up to rounding: accept (0) or reject (1).

    Every output token goes through the exact model again; its mismatches are held against stock's.

    Examples:

        specpilot token-force --system URL --stock URL --scorer URL --ar URL --prompts dev.jsonl

        specpilot token-force --system tuned.jsonl --stock stock.jsonl --scorer URL --ar ar.jsonl

        specpilot token-force --system URL --stock stock.jsonl --scorer URL --delta 0.25 --json
    """
    from specpilot_cli.report.token_force_text import print_result
    from specpilot_cli.token_force.session import Sources

    options.check_output(output, force)
    sources = Sources(
        system, stock, scorer, ar, prompts, tokenizer, limit, concurrency, timeout, save_outputs,
        overwrite=force,
    )  # fmt: skip
    answers = options.answer_files(save_outputs, sources.live(), force=force)
    options.check_not_input({"-o": output, **answers}, (*_input_files(sources), tokenizer))
    settings = _settings(delta, strata, split, audit_limit, concurrency, seed)
    result, envelope = _run(sources, settings, quiet)
    options.finish(envelope, as_json=as_json, output=output, force=force, exit_zero=exit_zero,
                   text=lambda: print_result(result))  # fmt: skip


def _settings(
    delta: float | None,
    strata: bool,
    split: int | None,
    audit_limit: int,
    concurrency: int,
    seed: int,
) -> TokenForceSettings:
    from specpilot_cli.token_force import TokenForceSettings

    return TokenForceSettings(
        delta_nats=delta,
        strata=strata,
        split_position=split,
        audit_limit=audit_limit,
        probe_concurrency=concurrency,
        seed=seed,
    )


def _run(
    sources: Sources, settings: TokenForceSettings, quiet: bool
) -> tuple[TokenForceResult, Envelope]:
    from specpilot_cli.report.json_out import build_envelope
    from specpilot_cli.token_force.session import run_session
    from specpilot_cli.ui import ConsoleReporter

    with ConsoleReporter(quiet) as reporter:
        result, engines = run_session(sources, settings, reporter=reporter)
    envelope = build_envelope(
        "token-force",
        result.to_json(),
        inputs=_input_files(sources),
        seed=settings.seed,
        verdict=result.verdict,
        environment={"engines": engines},
    )
    return result, envelope


def _input_files(sources: Sources) -> list[Path]:
    from specpilot_cli.token_force.collect import is_url

    named = (sources.system, sources.stock, sources.ar)
    files = [Path(name) for name in named if name is not None and not is_url(name)]
    return files if sources.prompts is None else [*files, sources.prompts]
