"""`specpilot paired-bench`: is the candidate faster than the baseline, beyond noise?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from specpilot_cli.commands import bench_answers, bench_parts, options
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.paired_bench.run import JournalFile
    from specpilot_cli.paired_bench.types import (
        PairedBenchResult,
        PairedBenchSettings,
    )
    from specpilot_cli.schema.result import Envelope
    from specpilot_cli.ui import Reporter

_SYSTEMS, _REQUESTS, _MEASURE = "Systems", "Requests", "Measurement"


def _system(help_text: str, metavar: str = "SYSTEM", **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=_SYSTEMS, **more)


def _request(help_text: str, metavar: str = "N", **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=_REQUESTS, **more)


def _measured(help_text: str, metavar: str = "N", **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=_MEASURE, **more)


def _flag(name: str, help_text: str, panel: str) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=panel)


Baseline = Annotated[
    str | None,
    _system("The system to beat: a URL, RECIPE:stock, a launch file, or a sweep's result."),
]
Candidate = Annotated[str | None, _system("The system to judge: a URL, RECIPE:tuned, or a file.")]
Ar = Annotated[str | None, _system("Plain decoding as a third system: gives speedups of both.")]
BaselineAgain = Annotated[
    str | None, _system("A second launch of the baseline, for the A/A sessions.", "URL")
]
Gpus = Annotated[
    str | None,
    _system("GPUs for servers to start. Two: one each, changed over between runs.", "0,1"),
]
Fresh = Annotated[bool, _flag("--fresh", "Start the servers anew for every run.", _SYSTEMS)]
Sweep = Annotated[
    Path | None, _system("Find the fastest stock: time every variant of a launch file.", "FILE")
]
Prompts = Annotated[list[Path] | None, _request("Prompts (JSONL); repeatable.", "FILE")]
Benchmarks = Annotated[
    list[str] | None,
    _request(
        "gsm8k, math500, humaneval, mbpp, mt-bench, own, or a set of yours as NAME=FILE; "
        "repeatable.",
        "NAME[=FILE][#SHA]",
    ),
]
MaxNewTokens = Annotated[int, _request("Longest answer of --benchmark requests.", min=1)]
TokenizerFolder = Annotated[
    Path | None,
    _request("Folder with tokenizer.json. Default: the baseline tokenises.", "DIR"),
]
Chat = Annotated[bool, _flag("--chat", "Apply the tokenizer folder's chat template.", _REQUESTS)]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking", help="The template's thinking switch. Default: its own.",
        rich_help_panel=_REQUESTS,
    ),
]  # fmt: skip
Limit = Annotated[int | None, _request("Timed prompts per benchmark.")]
Warmup = Annotated[int | None, _request("Untimed prompts first. Default: one batch.")]
Sealed = Annotated[
    bool, _flag("--sealed", "Final on unseen requests, which are used once.", _REQUESTS)
]
Seen = Annotated[
    list[Path] | None, _request("Development prompts that --sealed must not hold.", "FILE")
]
Runs = Annotated[int, _measured("Passes over all prompts; even.")]
Batch = Annotated[str, _measured("Requests in flight; several sizes as 1,8,32.")]
Aa = Annotated[int, _measured("Sessions of the baseline against itself.")]
AaLimit = Annotated[
    int | None, _measured("Prompts per benchmark in A/A; fewer measure more noise.")
]
Calibrate = Annotated[
    int | None, _measured("Only measure the A/A noise, over K sessions.", "K", min=1)
]
NoiseFile = Annotated[
    Path | None, _measured("A/A noise of an earlier --calibrate, in place of --aa.", "FILE")
]
Block = Annotated[
    int | None,
    _measured("Requests until the other system takes over. Default: 1, or 4 batches."),
]
Timeout = Annotated[float, _measured("Limit of one request, seconds.", "SECONDS", min=1.0)]
Stall = Annotated[
    float, _measured("Limit between two events of one stream, seconds.", "SECONDS", min=0.1)
]
SaveOutputs = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Keep the answers, one JSONL per system, for token-force.",
        rich_help_panel="Output",
    ),
]  # fmt: skip
Export = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Every answer as a table, .csv or .parquet.", rich_help_panel="Output"
    ),
]
Redact = Annotated[bool, _flag("--redact", "Keep output tokens out of the journal.", "Output")]
Resume = Annotated[bool, _flag("--resume", "Continue the journal beside --output.", "Output")]
Saved = Annotated[
    list[Path] | None,
    typer.Option(
        "--from", metavar="FILE", help="Show a saved result again; several are compared.",
        rich_help_panel="Output",
    ),
]  # fmt: skip


def paired_bench(
    baseline: Baseline = None, candidate: Candidate = None, ar: Ar = None,
    baseline_again: BaselineAgain = None, gpus: Gpus = None, fresh: Fresh = False,
    sweep: Sweep = None, prompts: Prompts = None, benchmark: Benchmarks = None,
    max_new_tokens: MaxNewTokens = 2048, tokenizer: TokenizerFolder = None, chat: Chat = False,
    thinking: Thinking = None, limit: Limit = None, warmup: Warmup = None, sealed: Sealed = False,
    seen: Seen = None, runs: Runs = 2, batch: Batch = "1", aa: Aa = 3, aa_limit: AaLimit = None,
    calibrate: Calibrate = None, noise: NoiseFile = None, block: Block = None,
    timeout: Timeout = 600.0, stall_timeout: Stall = 60.0, save_outputs: SaveOutputs = None,
    export: Export = None, redact: Redact = False, resume: Resume = False, saved: Saved = None,
    as_json: options.JsonFlag = False, output: options.OutputFile = None,
    force: options.ForceFlag = False, quiet: options.QuietFlag = False,
    exit_zero: options.ExitZeroFlag = False,
) -> None:  # fmt: skip
    """Time two servers on the same requests, interleaved: promote (0), no (1), invalid (4).

    Promoted is what gains more than 1 % (3 % if any output token differs) plus twice the A/A noise,
    with 95 % confidence. `-o FILE.json` also keeps a journal, from which `--resume` continues.

    Examples:

        specpilot paired-bench --baseline URL --candidate URL --prompts unseen.jsonl -o bench.json

        specpilot paired-bench --baseline stock.yaml --candidate tuned.yaml --gpus 0,1 \\
          --benchmark gsm8k --tokenizer MODEL --chat --batch 1,8 -o bench.html

        specpilot paired-bench --from before.json --from after.json
    """
    request = bench_parts.PromptOptions(
        tuple(prompts or ()), tuple(benchmark or ()), max_new_tokens, tokenizer, chat, thinking,
        sealed, tuple(seen or ()),
    )  # fmt: skip
    sources = _given(baseline=baseline, candidate=candidate, ar=ar, baseline_again=baseline_again)
    systems = bench_parts.SystemOptions(
        sources, tuple(gpus.split(",")) if gpus else (), fresh, timeout, stall_timeout
    )
    kept = bench_parts.OutputOptions(
        output, save_outputs, export, redact, resume, force, as_json, exit_zero, quiet,
        (*request.inputs(), *(saved or ()), noise, sweep, *(seen or ())),
    )  # fmt: skip
    bench_answers.check_outputs(kept)
    if saved:
        alone = not any((sources, prompts, benchmark, sweep))
        bench_answers.show_saved(saved, kept, alone=alone)
        return
    sessions = _sessions(aa, calibrate, noise, sweep)
    settings = _settings(runs, batch, block, sessions, aa_limit, warmup, limit)
    _run(systems, request, settings, kept, noise, sweep, only_noise=calibrate is not None)


def _given(**sources: str | None) -> dict[str, str]:
    return {name: source for name, source in sources.items() if source is not None}


def _sessions(aa: int, calibrate: int | None, noise: Path | None, sweep: Path | None) -> int:
    """How many A/A sessions are run. InputError for options that contradict each other."""
    modes = {"--calibrate": calibrate, "--noise": noise, "--sweep": sweep}
    given = [name for name, value in modes.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} do not go together", hint="one at a time")
    if calibrate is not None:
        return calibrate
    if noise is None and aa < 1:
        raise InputError(
            "without the baseline timed against itself there is no noise to compare with",
            where="--aa",
            hint="give --aa 3, or --noise FILE of an earlier --calibrate",
        )
    return aa if noise is None else 0


def _settings(
    runs: int, batch: str, block: int | None, aa: int, aa_limit: int | None,
    warmup: int | None, limit: int | None,
) -> PairedBenchSettings:  # fmt: skip
    from specpilot_cli.paired_bench.types import PairedBenchSettings

    return PairedBenchSettings(
        runs=runs, batches=bench_parts.parse_batches(batch), block_requests=block,
        aa_sessions=aa, aa_limit=aa_limit, warmup=warmup, limit=limit,
    )  # fmt: skip


def _journal(kept: bench_parts.OutputOptions) -> JournalFile | None:
    from specpilot_cli.paired_bench.run import JournalFile

    if kept.journal is None:
        return None
    return JournalFile(kept.journal, kept.resume, kept.force, kept.redact)


def _run(
    systems: bench_parts.SystemOptions, request: bench_parts.PromptOptions,
    settings: PairedBenchSettings, kept: bench_parts.OutputOptions, noise: Path | None,
    sweep: Path | None, *, only_noise: bool,
) -> NoReturn:  # fmt: skip
    if sweep is not None:
        bench_answers.finish_sweep(sweep, request, settings, kept)
    if only_noise and request.sealed:
        raise InputError(
            "a calibration takes development requests",
            where="--sealed",
            hint="the sealed ones are for the final comparison",
        )
    result, envelope = _measure(systems, request, settings, kept, noise, only_noise=only_noise)
    bench_answers.finish(envelope, result.summary, kept)


def _measure(
    systems: bench_parts.SystemOptions, request: bench_parts.PromptOptions,
    settings: PairedBenchSettings, kept: bench_parts.OutputOptions, noise: Path | None, *,
    only_noise: bool,
) -> tuple[PairedBenchResult, Envelope]:  # fmt: skip
    from specpilot_cli.paired_bench.run import run_calibration, run_paired_bench
    from specpilot_cli.report.json_out import build_envelope, plain
    from specpilot_cli.ui import ConsoleReporter

    systems.check(("baseline",) if only_noise else ("baseline", "candidate"))
    request.check()
    loaded = bench_parts.load_prompts(request)
    with (
        ConsoleReporter(kept.quiet) as reporter,
        kept.work_folder() as work,
        bench_parts.opened(systems, work, reporter) as opened,
    ):
        tokens, form = bench_parts.tokenize_prompts(loaded, request, opened.baseline, reporter)
        basis = bench_parts.basis_of(noise, form, settings.batches)
        _claim(request, kept, form.texts_sha256, systems)
        journal = _journal(kept)
        try:
            if only_noise:
                result = run_calibration(
                    opened.stage, tokens, settings=settings, reporter=reporter, journal=journal,
                    form=form,
                )  # fmt: skip
            else:
                result = run_paired_bench(
                    opened.stage, tokens, settings=settings, reporter=reporter, journal=journal,
                    basis=basis,
                )  # fmt: skip
        except KeyboardInterrupt:
            _say_resume(journal, reporter)
            raise
    bench_answers.keep(result, kept)
    environment = {
        **result.summary.environment, "urls": dict(systems.sources), "devices": list(systems.gpus),
        "benchmarks": loaded.origins, "baseline_sweep": opened.sweep,
    }  # fmt: skip
    result = replace(result, summary=replace(result.summary, environment=environment))
    inputs = [path for path in request.inputs() if path.exists()]
    envelope = build_envelope(
        "paired-bench", plain(result.summary), inputs=inputs, verdict=result.verdict
    )
    return result, envelope


def _say_resume(journal: JournalFile | None, reporter: Reporter) -> None:
    if journal is not None:
        reporter.warn(f"stopped; continue with --resume (journal: {journal.path})")


def _claim(
    request: bench_parts.PromptOptions, kept: bench_parts.OutputOptions, texts_sha256: str,
    systems: bench_parts.SystemOptions,
) -> None:  # fmt: skip
    """Mark a sealed set as used before anything of it is served."""
    from specpilot_cli.paired_bench.sealed import claim

    if not request.sealed:
        return
    if kept.journal is None:
        raise InputError(
            "--sealed needs -o FILE.json", hint="a final that is not kept proves nothing"
        )
    beside = request.files[0] if request.files else kept.journal.parent / "sealed-sets"
    ledger = beside.with_name(f"{beside.name}.sealed.jsonl")
    claim(ledger, texts_sha256, journal=kept.journal, candidate=systems.sources["candidate"])
