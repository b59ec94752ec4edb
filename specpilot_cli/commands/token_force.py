"""`specpilot token-force`: is this server lossless against stock?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specpilot_cli.commands import options

if TYPE_CHECKING:
    from specpilot_cli.schema.result import Envelope
    from specpilot_cli.token_force import TokenForceSettings
    from specpilot_cli.token_force.sources import Sources
    from specpilot_cli.ui import Reporter


def _system(help_text: str, metavar: str = "URL|FILE") -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel="Systems")


def _rule(help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Rules", **more)


def _request(help_text: str, metavar: str = "N", **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel="Requests", **more)


System = Annotated[
    str | None, _system("The system to judge: a server, or its recorded answers (JSONL).")
]
Stock = Annotated[str, _system("Stock, untouched; a server also lets the audit probe it.")]
Scorer = Annotated[
    str,
    _system(
        "Exact weights, no speculation, float32 LM head: stock's engine as a server, or a model "
        "folder in this process: `reference:DIR`, `transformers:DIR`.",
        "URL|ENGINE:DIR",
    ),
]
Ar = Annotated[str | None, _system("Stock's engine without speculation, to calibrate delta.")]
Probe = Annotated[str | None, _system("Live stock for the audit, where --stock is a file.", "URL")]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Only measure delta and stock's own mismatch rate; `-o` keeps them for --delta.",
        rich_help_panel="Rules",
    ),
]
Delta = Annotated[
    str | None,
    _rule("Near-tie threshold, or a file of --calibrate, instead of --ar.", metavar="NATS|FILE"),
]
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
MaxNewTokens = Annotated[
    int | None, _request("Longest answer, instead of each prompt's own: 4096 for a final.", min=1)
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Decode to the limit, past stop tokens.",
        rich_help_panel="Requests",
    ),
]
Concurrency = Annotated[int, _request("Requests in flight: use the number you serve with.", min=1)]
Timeout = Annotated[float, _request("Limit of one request, seconds.", "SECONDS", min=1.0)]
SaveOutputs = Annotated[
    Path | None, _request("Keep the collected answers, one JSONL per system.", "DIR")
]


def token_force(
    stock: Stock,
    scorer: Scorer,
    system: System = None,
    ar: Ar = None,
    probe: Probe = None,
    calibrate: Calibrate = False,
    delta: Delta = None,
    strata: Strata = True,
    split: Split = None,
    audit_limit: AuditLimit = 200,
    prompts: Prompts = None,
    tokenizer: TokenizerFolder = None,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = None,
    ignore_eos: IgnoreEos = False,
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

        specpilot token-force --calibrate --stock URL --ar URL --scorer URL --prompts P -o d.json

        specpilot token-force --system URL --stock stock.jsonl --probe URL \
          --scorer transformers:target/ --delta delta.json -o audit.html
    """
    from specpilot_cli.token_force.sources import Sources, delta_option

    sources = Sources(
        system, stock, scorer, ar, probe, delta_option(delta), calibrate, prompts, tokenizer, limit,
        max_new_tokens, ignore_eos, concurrency, timeout, save_outputs, overwrite=force,
    )  # fmt: skip
    _check_outputs(sources, output)
    settings = _settings(sources.delta, strata, split, audit_limit, concurrency, seed)
    envelope, text, writers = (_calibrate if calibrate else _judge)(sources, settings, quiet)
    options.finish(envelope, as_json=as_json, output=output, force=force, exit_zero=exit_zero,
                   text=text, writers=writers)  # fmt: skip


def _check_outputs(sources: Sources, output: Path | None) -> None:
    """Refuse files that could not be written, before any work is done."""
    force = sources.overwrite
    options.check_output(output, force, *(() if sources.calibrate else (".html",)))
    answers = options.answer_files(sources.save_outputs, sources.live(), force=force)
    options.check_not_input({"-o": output, **answers}, (*sources.files(), sources.tokenizer))


def _settings(
    delta: float | Path | None,
    strata: bool,
    split: int | None,
    audit_limit: int,
    concurrency: int,
    seed: int,
) -> TokenForceSettings:
    from specpilot_cli.token_force import TokenForceSettings

    return TokenForceSettings(
        delta_nats=delta if isinstance(delta, float) else None,
        strata=strata,
        split_position=split,
        audit_limit=audit_limit,
        probe_concurrency=concurrency,
        seed=seed,
    )


_Answer = tuple["Envelope", Callable[[], None], dict[str, Callable[[], str]]]


def _judge(sources: Sources, settings: TokenForceSettings, quiet: bool) -> _Answer:
    from specpilot_cli.report.token_force_page import render_page
    from specpilot_cli.report.token_force_text import print_result
    from specpilot_cli.token_force.session import run_session

    with _reporter(quiet) as reporter:
        result, engines = run_session(sources, settings, reporter=reporter)
    envelope = _envelope(sources, settings, result.to_json(), engines, result.verdict)
    return (
        envelope,
        lambda: print_result(result),
        {".html": lambda: render_page(result, envelope)},
    )


def _calibrate(sources: Sources, settings: TokenForceSettings, quiet: bool) -> _Answer:
    from specpilot_cli.report.token_force_text import print_calibration
    from specpilot_cli.token_force.session import run_calibration_session

    with _reporter(quiet) as reporter:
        found, engines = run_calibration_session(sources, reporter=reporter)
    envelope = _envelope(sources, settings, found.to_json(), engines, None)
    return envelope, lambda: print_calibration(found), {}


def _reporter(quiet: bool) -> AbstractContextManager[Reporter]:
    from specpilot_cli.ui import ConsoleReporter

    return ConsoleReporter(quiet)


def _envelope(
    sources: Sources,
    settings: TokenForceSettings,
    results: dict[str, Any],
    engines: dict[str, Any],
    verdict: str | None,
) -> Envelope:
    from specpilot_cli.report.json_out import build_envelope

    return build_envelope(
        "token-force",
        results,
        inputs=sources.files(),
        seed=settings.seed,
        verdict=verdict,
        environment={"engines": engines, "concurrency": sources.concurrency},
    )
