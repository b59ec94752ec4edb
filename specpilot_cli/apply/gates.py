"""The two gates of a recipe on unseen prompts: is it faster, and is it lossless?"""

from __future__ import annotations

from pathlib import Path

from specpilot_cli.apply.recipes import LoadedRecipe, take_per_benchmark
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.io.jsonl import write_jsonl
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.paired_bench.outputs import output_records
from specpilot_cli.paired_bench.run import JournalFile, run_paired_bench
from specpilot_cli.paired_bench.tokens import tokenize
from specpilot_cli.paired_bench.types import (
    AR,
    BASELINE,
    CANDIDATE,
    PairedBenchResult,
    PairedBenchSettings,
)
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.token_force.run import run_token_force
from specpilot_cli.token_force.text import TokenText
from specpilot_cli.ui import Reporter


def bench_settings(loaded: LoadedRecipe, prompts_per_benchmark: int | None) -> PairedBenchSettings:
    """The recipe's sizes; `prompts_per_benchmark` overrides them downwards or upwards."""
    gate = loaded.recipe.gates.paired_bench
    limit = prompts_per_benchmark or gate.prompts_per_benchmark
    aa_limit = gate.aa_prompts_per_benchmark
    return PairedBenchSettings(
        runs=gate.runs,
        batch=loaded.recipe.regime.requests,
        aa_sessions=gate.aa_sessions,
        aa_limit=None if aa_limit is None else min(aa_limit, limit),
        warmup=gate.warmup,
        limit=limit,
    )


def bench(
    loaded: LoadedRecipe,
    engines: dict[str, HttpEngine],
    settings: PairedBenchSettings,
    folder: Path,
    *,
    reporter: Reporter,
) -> PairedBenchResult:
    """Stock, tuned and plain decoding on unseen prompts, interleaved; answers are kept."""
    # warm-up prompts are taken from the same file and never timed
    per_benchmark = (settings.limit or 0) + settings.warmup_requests
    prompts = take_per_benchmark(loaded.unseen, per_benchmark)
    result = run_paired_bench(
        dict(engines),
        tokenize(prompts, TokenizerFile(loaded.target).encode),
        settings=settings,
        reporter=reporter,
        journal=JournalFile(folder / "bench.journal.jsonl", force=True),
    )
    for system in (BASELINE, CANDIDATE, AR):
        records = output_records(result, system)
        if records:
            write_jsonl(folder / "outputs" / f"{system}.jsonl", records, force=True)
    return result


def force(
    loaded: LoadedRecipe,
    engines: dict[str, HttpEngine],
    timed: PairedBenchResult,
    *,
    reporter: Reporter,
) -> TokenForceResult:
    """Audit the very answers that were timed; plain decoding on the BF16 weights scores them."""
    gate = loaded.recipe.gates.token_force
    settings = TokenForceSettings(
        split_position=gate.split_position,
        audit_limit=gate.audit_limit,
        probe_offsets=gate.probe_offsets,
        probe_concurrency=loaded.recipe.regime.requests,
    )
    return run_token_force(
        output_records(timed, CANDIDATE),
        output_records(timed, BASELINE),
        output_records(timed, AR),
        engines[AR],
        settings=settings,
        probe=engines[BASELINE],
        text=TokenText(loaded.target),
        reporter=reporter,
    )
