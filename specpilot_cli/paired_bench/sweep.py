"""Which stock is the fastest? A candidate that beats a badly tuned baseline has shown nothing.

Every variant is started afresh and serves the same development prompts, once in each direction of
the list, so that a drift favours no place in it. The rate that ranks is that of paired-bench. A
variant that does not start is recorded with its reason and loses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from specpilot_cli import stats
from specpilot_cli.engines.base import EngineClient
from specpilot_cli.errors import MachineError, MeasurementInvalid
from specpilot_cli.paired_bench.client import Lane, serve_block
from specpilot_cli.paired_bench.machine import recordable
from specpilot_cli.paired_bench.ratios import pooled_tau, summarise_system
from specpilot_cli.paired_bench.types import TimedRequest, TokenPrompt
from specpilot_cli.schema.bench_launch import SweepResult, SweepVariant
from specpilot_cli.schema.sglang_recipe import Argument
from specpilot_cli.ui import Reporter

PASSES = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to start the baseline. command holds `{port}`."""

    arguments: Mapping[str, Argument]
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """The options that tell it from the others."""
        return " ".join(f"{key}={value}" for key, value in self.arguments.items()) or "as it stands"


@dataclass(slots=True)
class _Timed:
    rates: list[float] = field(default_factory=list)
    rows: list[TimedRequest] = field(default_factory=list)
    failure: str | None = None
    info: dict[str, Any] = field(default_factory=dict)


def run_sweep(
    variants: Sequence[Variant],
    start: Callable[[Variant], AbstractContextManager[EngineClient]],
    warmup: Sequence[TokenPrompt],
    prompts: Sequence[TokenPrompt],
    *,
    batch: int,
    prompts_sha256: str,
    reporter: Reporter,
) -> SweepResult:
    """Time all variants; `start` launches one and yields its client.

    Raises MeasurementInvalid if no variant answers all prompts.
    """
    timed = [_Timed() for _ in variants]
    for number in range(PASSES):
        order = range(len(variants)) if number % 2 == 0 else reversed(range(len(variants)))
        for done, index in enumerate(order):
            variant, mine = variants[index], timed[index]
            reporter.progress(f"sweep pass {number + 1}/{PASSES}", done, len(variants))
            if mine.failure is None:
                try:
                    with start(variant) as engine:
                        _time(engine, warmup, prompts, batch, number, mine)
                except (MachineError, MeasurementInvalid) as error:
                    mine.failure = error.message.splitlines()[0]
                    reporter.warn(f"{variant.name}: {mine.failure}")
    found = [_variant(variant, mine) for variant, mine in zip(variants, timed, strict=True)]
    found.sort(key=lambda one: -(one.rate_tok_per_s or 0.0))
    if found[0].rate_tok_per_s is None:
        raise MeasurementInvalid(
            f"no variant of the sweep answered all prompts; the first: {found[0].failure}"
        )
    return SweepResult(
        batch=batch, n_requests=len(prompts), passes=PASSES, prompts_sha256=prompts_sha256,
        variants=tuple(found),
    )  # fmt: skip


def _time(
    engine: EngineClient, warmup: Sequence[TokenPrompt], prompts: Sequence[TokenPrompt],
    batch: int, number: int, mine: _Timed,
) -> None:  # fmt: skip
    mine.info = recordable(dict(engine.server_info()))
    lane = Lane(engine)
    lane.flush()
    serve_block(engine, warmup, batch=batch, clock=time.monotonic, cpu_clock=time.process_time)
    lane.flush()
    answers, _ = serve_block(
        engine, prompts, batch=batch, clock=time.monotonic, cpu_clock=time.process_time
    )
    rows = [
        TimedRequest("sweep", number, 0, 0, "baseline", prompt.benchmark, answer, batch)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    mine.rows += rows
    mine.rates.append(summarise_system(rows, "baseline").rate_tok_per_s)


def _variant(variant: Variant, mine: _Timed) -> SweepVariant:
    complete = mine.failure is None
    return SweepVariant(
        name=variant.name,
        arguments=dict(variant.arguments),
        command=variant.command,
        environment=dict(variant.environment),
        rate_tok_per_s=stats.geometric_mean(mine.rates) if complete else None,
        pass_rates_tok_per_s=tuple(mine.rates),
        tau=pooled_tau(mine.rows) if complete else None,
        failure=mine.failure,
        server_info=mine.info,
    )
