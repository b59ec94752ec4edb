"""`specpilot paired-bench`: is the candidate faster than the baseline, beyond noise?"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specpilot_cli.commands import options
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.engines.base import EngineClient
    from specpilot_cli.paired_bench.run import JournalFile
    from specpilot_cli.paired_bench.types import (
        PairedBenchResult,
        PairedBenchSettings,
        PairedBenchSummary,
        TokenPrompt,
    )
    from specpilot_cli.schema.prompts import Prompt
    from specpilot_cli.schema.result import Envelope
    from specpilot_cli.ui import Reporter

_SYSTEMS, _MEASURE, _JOURNAL = "Systems", "Measurement", "Journal"
_SAVED_SYSTEMS = ("baseline", "candidate", "ar")


def _system(help_text: str) -> Any:
    return typer.Option(metavar="URL", help=help_text, rich_help_panel=_SYSTEMS)


def _measure_option(help_text: str, metavar: str = "N", **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=_MEASURE, **more)


Baseline = Annotated[str | None, _system("The system to beat.")]
Candidate = Annotated[str | None, _system("The system to judge.")]
Ar = Annotated[str | None, _system("Plain decoding as a third system: gives speedups of both.")]
BaselineAgain = Annotated[
    str | None, _system("A second launch of the baseline, for the A/A sessions.")
]
Prompts = Annotated[Path | None, _measure_option("Prompts (JSONL).", "FILE")]
Runs = Annotated[int, _measure_option("Passes over all prompts; even.")]
Batch = Annotated[int, _measure_option("Requests in flight.")]
Aa = Annotated[int, _measure_option("Sessions of the baseline against itself.")]
AaLimit = Annotated[
    int | None, _measure_option("Prompts per benchmark in A/A; fewer measure more noise.")
]
Warmup = Annotated[int | None, _measure_option("Untimed prompts first. Default: one batch.")]
Limit = Annotated[int | None, _measure_option("Timed prompts per benchmark.")]
Block = Annotated[
    int | None,
    _measure_option("Requests until the other system takes over. Default: 1, or 4 batches."),
]
TokenizerFolder = Annotated[
    Path | None,
    _measure_option("Folder with tokenizer.json. Default: the baseline tokenises.", "DIR"),
]
Timeout = Annotated[float, _measure_option("Limit of one request, seconds.", "SECONDS", min=1.0)]
SaveOutputs = Annotated[
    Path | None,
    _measure_option("Keep the answers, one JSONL per system, for token-force.", "DIR"),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the journal beside --output.", rich_help_panel=_JOURNAL
    ),
]
Saved = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FILE", help="Show a saved result again.", rich_help_panel=_JOURNAL
    ),
]


def paired_bench(
    baseline: Baseline = None,
    candidate: Candidate = None,
    ar: Ar = None,
    baseline_again: BaselineAgain = None,
    prompts: Prompts = None,
    runs: Runs = 2,
    batch: Batch = 1,
    aa: Aa = 3,
    aa_limit: AaLimit = None,
    warmup: Warmup = None,
    limit: Limit = None,
    block: Block = None,
    tokenizer: TokenizerFolder = None,
    timeout: Timeout = 600.0,
    save_outputs: SaveOutputs = None,
    resume: Resume = False,
    saved: Saved = None,
    as_json: options.JsonFlag = False,
    output: options.OutputFile = None,
    force: options.ForceFlag = False,
    quiet: options.QuietFlag = False,
    exit_zero: options.ExitZeroFlag = False,
) -> None:
    """Time two servers on the same requests, interleaved: promote (0), no (1), invalid (4).

    Promoted is what gains more than 1 % (3 % if any output token differs) plus twice the A/A noise,
    with 95 % confidence. `-o FILE.json` also keeps a journal, from which `--resume` continues.

    Examples:

        specpilot paired-bench --baseline URL --candidate URL --prompts unseen.jsonl -o bench.json

        specpilot paired-bench --baseline URL --candidate URL --ar URL --prompts unseen.jsonl \\
          --batch 16 --limit 50 --json

        specpilot paired-bench --from bench.json
    """
    _check_outputs(output, save_outputs, (prompts, tokenizer, saved), force=force)
    urls = _named(baseline=baseline, candidate=candidate, ar=ar, baseline_again=baseline_again)
    if saved is not None:
        envelope, summary = _read_saved(saved, with_work=bool(urls) or prompts is not None)
    else:
        settings = _settings(runs, batch, block, aa, aa_limit, warmup, limit)
        journal = _journal(output, resume=resume, force=force)
        source = _Source(urls, prompts, tokenizer, timeout, save_outputs, force)
        envelope, summary = _measure(source, settings, journal, quiet=quiet)
    _finish(envelope, summary, as_json, output, force, exit_zero)


def _check_outputs(
    output: Path | None, save_outputs: Path | None, inputs: Iterable[Path | None], *, force: bool
) -> None:
    """The result, its journal and the answers: all can be written, and none is an input."""
    options.check_output(output, force)
    answers = options.answer_files(save_outputs, _SAVED_SYSTEMS, force=force)
    journal = _journal_path(output)
    options.check_not_input({"-o": output, "the journal of -o": journal, **answers}, inputs)


@dataclass(frozen=True, slots=True)
class _Source:
    """What to measure: servers by name, the prompt file, who tokenizes, the time limit.

    save_outputs: folder for the answers, overwritten only with `force`.
    """

    urls: dict[str, str]
    prompts: Path | None
    tokenizer: Path | None
    timeout_s: float
    save_outputs: Path | None
    force: bool

    def server_name(self, url: str) -> str:
        """What the server at `url` is in this comparison."""
        shown = {"ar": "AR", "baseline_again": "second baseline"}
        names = [shown.get(name, name) for name, own in self.urls.items() if own == url]
        return f"{' and '.join(names)} server"

    def checked_prompts(self) -> Path:
        """The prompt file; InputError for what is missing."""
        for name in ("baseline", "candidate"):
            if name not in self.urls:
                raise InputError(f"--{name} is missing", hint="give the server as http://host:port")
        if self.prompts is None:
            raise InputError("--prompts is missing", hint="a JSONL file, one prompt a line")
        return self.prompts


def _named(**urls: str | None) -> dict[str, str]:
    return {name: url for name, url in urls.items() if url is not None}


def _settings(
    runs: int, batch: int, block: int | None, aa: int, aa_limit: int | None, warmup: int | None,
    limit: int | None,
) -> PairedBenchSettings:  # fmt: skip
    from specpilot_cli.paired_bench.types import PairedBenchSettings

    return PairedBenchSettings(
        runs=runs, batches=(batch,), block_requests=block, aa_sessions=aa, aa_limit=aa_limit,
        warmup=warmup, limit=limit,
    )  # fmt: skip


def _journal_path(output: Path | None) -> Path | None:
    """The journal lies beside the result; without a result file there is none."""
    if output is None or str(output) == "-":
        return None
    return output.with_suffix(".journal.jsonl")


def _journal(output: Path | None, *, resume: bool, force: bool) -> JournalFile | None:
    from specpilot_cli.paired_bench.run import JournalFile

    path = _journal_path(output)
    if path is None:
        if resume:
            raise InputError(
                "--resume needs --output", hint="the journal lies beside the result file"
            )
        return None
    return JournalFile(path, resume=resume, force=force)


def _measure(
    source: _Source, settings: PairedBenchSettings, journal: JournalFile | None, *, quiet: bool
) -> tuple[Envelope, PairedBenchSummary]:
    from specpilot_cli.engines.http_client import HttpEngine
    from specpilot_cli.io.prompts_file import read_prompts
    from specpilot_cli.paired_bench.run import run_paired_bench
    from specpilot_cli.report.json_out import build_envelope, plain
    from specpilot_cli.ui import ConsoleReporter

    prompts_file = source.checked_prompts()
    texts = read_prompts(prompts_file)
    with ConsoleReporter(quiet) as reporter, ExitStack() as stack:
        # One engine per server: two names at one URL then share its prefix cache knowingly.
        engines = {
            url: stack.enter_context(
                HttpEngine(url, source.timeout_s, name=source.server_name(url))
            )
            for url in dict.fromkeys(source.urls.values())
        }
        for engine in engines.values():
            engine.health()
        systems = {name: engines[url] for name, url in source.urls.items()}
        prompts = _tokenize(texts, source.tokenizer, systems["baseline"], reporter)
        try:
            result = run_paired_bench(
                systems, prompts, settings=settings, reporter=reporter, journal=journal
            )
        except KeyboardInterrupt:
            if journal is not None:
                reporter.warn(f"stopped; continue with --resume (journal: {journal.path})")
            raise
    if source.save_outputs is not None:
        _save_outputs(result, source.save_outputs, force=source.force)
    environment = {**result.summary.environment, "urls": source.urls}
    summary = replace(result.summary, environment=environment)
    envelope = build_envelope(
        "paired-bench", plain(summary), inputs=[prompts_file], verdict=summary.verdict
    )
    return envelope, summary


def _save_outputs(result: PairedBenchResult, folder: Path, *, force: bool) -> None:
    """The answers of the first run; nothing if the comparison did not get that far."""
    from specpilot_cli.io.jsonl import write_jsonl
    from specpilot_cli.paired_bench.outputs import output_records

    for system in _SAVED_SYSTEMS:
        records = output_records(result, system)
        if records:
            write_jsonl(folder / f"{system}.jsonl", records, force=force)


def _tokenize(
    texts: list[Prompt], folder: Path | None, baseline: EngineClient, reporter: Reporter
) -> list[TokenPrompt]:
    from specpilot_cli.io.tokenizer_file import TokenizerFile
    from specpilot_cli.paired_bench.tokens import tokenize, tokenize_with_server

    if folder is not None:
        return tokenize(texts, TokenizerFile(folder).encode)
    return tokenize_with_server(texts, baseline, reporter=reporter)


def _read_saved(saved: Path, *, with_work: bool) -> tuple[Envelope, PairedBenchSummary]:
    from specpilot_cli.paired_bench.saved import read_saved

    if with_work:
        raise InputError(
            "--from measures nothing, so it takes no server and no prompts",
            hint="leave out the other options to see the saved result",
        )
    return read_saved(saved)


def _finish(
    envelope: Envelope, summary: PairedBenchSummary, as_json: bool, output: Path | None,
    force: bool, exit_zero: bool,
) -> None:  # fmt: skip
    from specpilot_cli.report.paired_bench_text import print_summary

    options.finish(
        envelope, as_json=as_json, output=output, force=force, exit_zero=exit_zero,
        text=lambda: print_summary(summary),
    )  # fmt: skip
