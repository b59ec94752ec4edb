"""`specpilot paired-bench --sweep`: every variant of stock, timed; the fastest is the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from specpilot_cli.commands import bench_parts
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.engines.base import EngineClient
    from specpilot_cli.paired_bench.sweep import Variant
    from specpilot_cli.paired_bench.types import PairedBenchSettings
    from specpilot_cli.schema.bench_launch import SweepResult
    from specpilot_cli.ui import Reporter


def sweep_stock(
    path: Path, request: bench_parts.PromptOptions, settings: PairedBenchSettings, work: Path,
    reporter: Reporter,
) -> SweepResult:  # fmt: skip
    """Time every variant of the launch file `path`; see `paired_bench.sweep`.

    Raises InputError for sealed requests (a choice is development) and for several batch sizes.
    """
    from specpilot_cli.apply.bench_systems import from_variant, resident, sweep_variants
    from specpilot_cli.paired_bench.plan import split_warmup
    from specpilot_cli.paired_bench.run import prompts_digest
    from specpilot_cli.paired_bench.sweep import run_sweep

    request.check()
    if request.sealed:
        raise InputError("a sweep chooses, so it takes no sealed requests", where="--sealed")
    if len(settings.batches) > 1:
        raise InputError("a sweep is for one batch size", where="--batch", hint="run it for each")
    loaded = bench_parts.load_prompts(request)
    tokens, _ = bench_parts.tokenize_prompts(loaded, request, None, reporter)
    warmup, timed = split_warmup(tokens, n_warmup=settings.warmup_requests, limit=settings.limit)
    file, variants = sweep_variants(path, work, reporter)
    numbers = count(1)

    @contextmanager
    def start(variant: Variant) -> Iterator[EngineClient]:
        plan = from_variant(variant, "baseline", file)
        logs = work / f"sweep-{next(numbers):03d}"
        with resident({"baseline": plan}, None, logs, reporter) as engines:
            yield engines["baseline"]

    return run_sweep(
        variants, start, warmup, timed, batch=settings.batches[0],
        prompts_sha256=prompts_digest(tokens), reporter=reporter,
    )  # fmt: skip
