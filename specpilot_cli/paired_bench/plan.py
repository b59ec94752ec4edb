"""Before anything is timed: which prompts, what the measurement can show, how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specpilot_cli import stats
from specpilot_cli.errors import InputError
from specpilot_cli.paired_bench.promotion import promotion_bound
from specpilot_cli.paired_bench.schedule import serving_order
from specpilot_cli.paired_bench.types import PairedBenchSettings, Plan, TokenPrompt


@dataclass(frozen=True, slots=True)
class Session:
    """One session: which systems serve which prompts (in serving order)."""

    name: str
    systems: tuple[str, ...]
    prompts: tuple[TokenPrompt, ...]


def in_serving_order(prompts: Sequence[TokenPrompt]) -> tuple[TokenPrompt, ...]:
    """The prompts with their benchmarks taken in turn."""
    return tuple(prompts[i] for i in serving_order([p.benchmark for p in prompts]))


def split_warmup(
    prompts: Sequence[TokenPrompt], *, n_warmup: int, limit: int | None
) -> tuple[tuple[TokenPrompt, ...], tuple[TokenPrompt, ...]]:
    """Warm-up prompts and timed prompts; no prompt is in both.

    The first `limit` prompts of each benchmark are timed. What is left over warms up; if that is
    too little, the last prompts of the largest benchmarks are taken out of the timed set. Raises
    InputError if ids repeat, or if fewer than two timed prompts would be left in a benchmark.
    """
    _check_prompts(prompts)
    taken: Counter[str] = Counter()
    timed: list[TokenPrompt] = []
    spare: list[TokenPrompt] = []
    for prompt in prompts:
        taken[prompt.benchmark] += 1
        fits = limit is None or taken[prompt.benchmark] <= limit
        (timed if fits else spare).append(prompt)
    warmup = list(in_serving_order(spare)[:n_warmup])
    while len(warmup) < n_warmup:
        sizes = Counter(prompt.benchmark for prompt in timed)
        name, size = max(sizes.items(), key=lambda item: item[1])
        if size <= 2:
            raise InputError(
                f"{len(prompts)} prompts in {len(sizes)} benchmark(s) cannot give {n_warmup} for "
                "warm-up and two timed ones per benchmark",
                hint="give more prompts, a smaller --warmup, or a smaller --batch",
            )
        last = max(i for i, prompt in enumerate(timed) if prompt.benchmark == name)
        warmup.append(timed.pop(last))
    return tuple(warmup), in_serving_order(timed)


def _check_prompts(prompts: Sequence[TokenPrompt]) -> None:
    if not prompts:
        raise InputError("no prompts", hint="give --prompts FILE with prompts in it")
    repeated = [name for name, n in Counter(p.request_id for p in prompts).items() if n > 1]
    if repeated:
        raise InputError(
            f"request id `{repeated[0]}` occurs twice", hint="give every prompt an id of its own"
        )
    for name, n in Counter(p.benchmark for p in prompts).items():
        if n < 2:
            raise InputError(
                f"benchmark `{name}` has one prompt; two or more are needed",
                hint="the spread between requests cannot be estimated from one",
            )
    empty = [p.request_id for p in prompts if not p.input_ids]
    if empty:
        raise InputError(f"prompt `{empty[0]}` holds no tokens", hint="give every prompt some text")


def limit_per_benchmark(
    prompts: Sequence[TokenPrompt], limit: int | None
) -> tuple[TokenPrompt, ...]:
    """The first `limit` prompts of each benchmark, order kept."""
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.benchmark] += 1
        if limit is None or seen[prompt.benchmark] <= limit:
            kept.append(prompt)
    return tuple(kept)


def make_plan(
    sessions: Sequence[Session], settings: PairedBenchSettings, *, nu_log: float = 0.0
) -> Plan:
    """What the sessions can show; the last session is the comparison itself.

    nu_log: A/A noise that is already known; otherwise none is assumed.
    """
    counts = Counter(prompt.benchmark for prompt in sessions[-1].prompts)

    def detectable(base: float, sigma: float) -> float:
        return stats.minimum_detectable_gain(
            list(counts.values()),
            sigma,
            bound=promotion_bound(base, nu_log),
            power=settings.power,
            confidence=settings.confidence,
        )

    return Plan(
        n_requests=dict(counts),
        n_answers=settings.runs
        * len(settings.batches)
        * sum(len(s.systems) * len(s.prompts) for s in sessions),
        assumed_nu_log=nu_log,
        power=settings.power,
        sigma_identical_log=settings.sigma_identical_log,
        sigma_diverging_log=settings.sigma_diverging_log,
        detectable_identical_ratio=detectable(
            settings.base_identical_ratio, settings.sigma_identical_log
        ),
        detectable_diverging_ratio=detectable(
            settings.base_diverging_ratio, settings.sigma_diverging_log
        ),
    )


def estimate_seconds(
    sessions: Sequence[Session], s_per_token: dict[str, float], runs: int, *, together: bool = False
) -> float:
    """Expected time of all sessions from the warm-up's seconds per requested token and system.

    together: the systems of a session serve at the same time, so that the slowest one counts.
    """
    combine = max if together else sum
    return runs * sum(
        combine(s_per_token[name] for name in session.systems)
        * sum(prompt.max_new_tokens for prompt in session.prompts)
        for session in sessions
    )
