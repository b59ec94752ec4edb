"""The two gates of a recipe on unseen prompts: is it faster, and is it lossless?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specpilot_cli.apply.serving import Servers
from specpilot_cli.errors import InputError
from specpilot_cli.io.jsonl import write_jsonl
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.paired_bench.outputs import output_records
from specpilot_cli.paired_bench.plan import split_warmup
from specpilot_cli.paired_bench.run import JournalFile, run_paired_bench
from specpilot_cli.paired_bench.types import (
    AR,
    BASELINE,
    CANDIDATE,
    PairedBenchResult,
    PairedBenchSettings,
    TokenPrompt,
    Verdict,
)
from specpilot_cli.schema.recipe import PairedBenchGate, TokenForceGate
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.token_force.run import run_token_force
from specpilot_cli.ui import Reporter

RecipeVerdict = Literal["promote", "no", "reject", "invalid"]


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What the gates are given.

    unseen: token ids of every prompt, warm-up included; n_timed of them are timed. tokenizer: of
    the target, to show people where answers differ; None where it has none.
    """

    unseen: tuple[TokenPrompt, ...]
    n_timed: int
    bench: PairedBenchSettings
    audit: TokenForceSettings
    tokenizer: Path | None


def judge(speed: Verdict, audit: Literal["accept", "reject", "invalid"] | None) -> RecipeVerdict:
    """Both gates as one word: nothing without two valid ones, no gain counts if tokens differ."""
    if audit is None or "invalid" in (speed, audit) or speed == "ok":
        return "invalid"  # `ok` compares nothing
    return "reject" if audit == "reject" else speed


def bench(plan: GatePlan, fleet: Servers, folder: Path, *, reporter: Reporter) -> PairedBenchResult:
    """Every system of the fleet on unseen prompts, interleaved; answers are kept.

    Raises `MachineError` if a server died: the benchmark alone would only say that it is invalid.
    """
    with fleet.watched():
        result = run_paired_bench(
            dict(fleet.engines),
            plan.unseen,
            settings=plan.bench,
            reporter=reporter,
            journal=JournalFile(folder / "bench.journal.jsonl"),
        )
        if result.verdict == "invalid":
            fleet.check_after_failure()
    for system in (BASELINE, CANDIDATE, AR):
        records = output_records(result, system)
        if records:
            write_jsonl(folder / "outputs" / f"{system}.jsonl", records)
    return result


def force(
    plan: GatePlan, fleet: Servers, timed: PairedBenchResult, *, reporter: Reporter
) -> TokenForceResult:
    """Audit the very answers that were timed; plain decoding on the BF16 weights scores them.

    Where stock itself decodes plainly it is the scorer, and its second pass calibrates δ. Raises
    `MeasurementInvalid` or `MachineError` for a server that answers wrongly or not at all.
    """
    separate = AR in fleet.engines
    plain = output_records(timed, AR) if separate else output_records(timed, BASELINE, run=1)
    with fleet.watched():
        return run_token_force(
            output_records(timed, CANDIDATE),
            output_records(timed, BASELINE),
            plain,
            fleet.engines[AR if separate else BASELINE],
            settings=plan.audit,
            probe=fleet.engines[BASELINE],
            text=None if plan.tokenizer is None else TokenizerFile(plan.tokenizer),
            reporter=reporter,
        )


def bench_settings(
    gate: PairedBenchGate, *, requests: int, prompts_per_benchmark: int | None
) -> PairedBenchSettings:
    """The recipe's sizes; `prompts_per_benchmark` overrides them downwards or upwards."""
    limit = prompts_per_benchmark or gate.prompts_per_benchmark
    aa_limit = gate.aa_prompts_per_benchmark
    return PairedBenchSettings(
        runs=gate.runs,
        batches=(requests,),
        aa_sessions=gate.aa_sessions,
        aa_limit=None if aa_limit is None else min(aa_limit, limit),
        warmup=gate.warmup,
        limit=limit,
    )


def audit_settings(gate: TokenForceGate, *, requests: int) -> TokenForceSettings:
    """The recipe's sizes of the audit."""
    return TokenForceSettings(
        split_position=gate.split_position,
        audit_limit=gate.audit_limit,
        probe_offsets=gate.probe_offsets,
        probe_concurrency=requests,
    )


def check_lengths(prompts: Sequence[TokenPrompt], context: int, path: Path) -> None:
    """Raise `InputError` for a prompt whose answer would not fit in `context` tokens."""
    for prompt in prompts:
        length = len(prompt.input_ids)
        if length + prompt.max_new_tokens > context:
            raise InputError(
                f"prompt `{prompt.request_id}` does not fit: {length} tokens and "
                f"{prompt.max_new_tokens} new ones in a context of {context}",
                where=str(path),
                hint="shorten the prompt or its max_new_tokens",
            )


def count_timed(
    unseen: Sequence[TokenPrompt], bench: PairedBenchSettings, audit: TokenForceSettings, path: Path
) -> int:
    """How many prompts are timed. Raises `InputError` if they are too few for a verdict."""
    _, timed = split_warmup(unseen, n_warmup=bench.warmup_requests, limit=bench.limit)
    if len(timed) < audit.min_requests:
        raise InputError(
            f"{len(timed)} timed prompts carry no verdict on losslessness: "
            f"{audit.min_requests} are needed",
            where=str(path),
            hint="raise --limit, or the recipe's prompts_per_benchmark",
        )
    return len(timed)
