"""The two gates of a recipe on unseen prompts: is it faster, and is it lossless?"""

from __future__ import annotations

from pathlib import Path

from specpilot_cli.apply.preflight import CheckedRecipe
from specpilot_cli.apply.serving import Fleet
from specpilot_cli.io.jsonl import write_jsonl
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.paired_bench.outputs import output_records
from specpilot_cli.paired_bench.run import JournalFile, run_paired_bench
from specpilot_cli.paired_bench.types import AR, BASELINE, CANDIDATE, PairedBenchResult
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.token_force.run import run_token_force
from specpilot_cli.ui import Reporter


def bench(
    checked: CheckedRecipe, fleet: Fleet, folder: Path, *, reporter: Reporter
) -> PairedBenchResult:
    """Stock, tuned and plain decoding on unseen prompts, interleaved; answers are kept.

    Raises `MachineError` if a server died: the benchmark alone would only say that it is invalid.
    """
    with fleet.watched():
        result = run_paired_bench(
            dict(fleet.engines),
            checked.unseen,
            settings=checked.bench,
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
    checked: CheckedRecipe, fleet: Fleet, timed: PairedBenchResult, *, reporter: Reporter
) -> TokenForceResult:
    """Audit the very answers that were timed; plain decoding on the BF16 weights scores them.

    Raises `MeasurementInvalid` or `MachineError` for a server that answers wrongly or not at all.
    """
    with fleet.watched():
        return run_token_force(
            output_records(timed, CANDIDATE),
            output_records(timed, BASELINE),
            output_records(timed, AR),
            fleet.engines[AR],
            settings=checked.audit,
            probe=fleet.engines[BASELINE],
            text=TokenizerFile(checked.loaded.target),
            reporter=reporter,
        )
