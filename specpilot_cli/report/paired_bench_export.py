"""Every timed answer of a paired benchmark as a table, through pandas: CSV or Parquet."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.atomic import atomic_output
from specpilot_cli.io.table_file import require_parquet
from specpilot_cli.paired_bench.types import TimedRequest

SUFFIXES = (".csv", ".parquet")


def check_export(path: Path | None) -> None:
    """Refuse an export that cannot be written later: InputError for its name, MachineError for
    what is not installed."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"cannot export to `{path}`", where="--export", hint=f"use {' or '.join(SUFFIXES)}"
        )
    if path.suffix == ".parquet":
        require_parquet()
    elif importlib.util.find_spec("pandas") is None:
        raise MachineError("an export needs pandas", hint="pip install 'specpilot[export]'")


def export_rows(rows: Iterable[TimedRequest], path: Path, *, force: bool) -> None:
    """Write one line per answer, A/A sessions included; times in seconds."""
    import pandas as pd

    frame = pd.DataFrame([_record(row) for row in rows])
    with atomic_output(path, force=force) as temporary:
        if path.suffix == ".parquet":
            frame.to_parquet(temporary, index=False)
        else:
            frame.to_csv(temporary, index=False, lineterminator="\n")


def _record(row: TimedRequest) -> dict[str, Any]:
    answer = row.answer
    rest = answer.completion_tokens - 1
    return {
        "session": row.session,
        "run": row.run,
        "batch": row.batch,
        "block": row.block,
        "position": row.position,
        "system": row.system,
        "benchmark": row.benchmark,
        "request_id": row.request_id,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
        "verify_steps": answer.verify_steps,
        "tokens_per_step": answer.tokens_per_step,
        "cached_tokens": answer.cached_tokens,
        "submit_s": answer.submit_s,
        "time_to_first_token_s": answer.time_to_first_token_s,
        "elapsed_s": answer.elapsed_s,
        "rate_tok_per_s": answer.rate_tok_per_s,
        "inter_token_s": (answer.last_byte_s - answer.first_byte_s) / rest if rest else None,
        "output_sha256": row.output_digest,
    }
