"""Step times of running servers, from their counters and the arrival of their answers.

Requests of equal length start together, and what counts is the stretch in which all of them decode:
from the last first token to the first last one. How many steps lie in it follows from the server's
own count of verify passes (without speculation a step is a token) and the share of the answer's
chunks that arrived in it. Prefill is the time to the first token of a lone prompt, host and
network included. Prompts are random ids, each sent once, so that no prefix cache answers them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.sglang.info import ServerFacts, read_facts
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.schema.batch_times import BatchStepTimes, CostCurve, CostPoint
from specpilot_cli.schema.step_profile import DeviceInfo, EngineInfo, ModelInfo
from specpilot_cli.simulate.fit import StepSample, fit_components
from specpilot_cli.ui import Reporter, SilentReporter

_IDS = (100, 300)  # that every vocabulary has; what they mean does not matter
_LEAST_STEPS = 4.0  # in which all requests decode; fewer are mostly their own edges


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """What is asked of each server: requests in flight and prompt lengths of the timed steps,
    output tokens of each, prompt lengths of the timed prefills, and how often all of it is
    repeated after one round that warms up.
    """

    concurrency: tuple[int, ...] = (1, 4, 12)
    prompt_tokens: tuple[int, ...] = (64, 512)
    new_tokens: int = 128
    prefill_tokens: tuple[int, ...] = (16, 64, 256, 1024)
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of a batch in which all requests decode: seconds a step, steps, tokens in all
    contexts in its middle.
    """

    step_s: float
    steps: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """What one server showed: its settings, its steps, and seconds by prompt rows of a prefill."""

    facts: ServerFacts
    samples: tuple[StepSample, ...]
    prefill: tuple[tuple[int, float], ...]

    @property
    def rows(self) -> int:
        """Rows verified per request."""
        return _rows(self.facts)


def shared_window(answers: Sequence[Generation], arrivals: Mapping[str, Sequence[float]]) -> Window:
    """The stretch in which every request of a batch decodes.

    arrivals: by request id, when each chunk came, on the clock of the answers. Raises
    `MeasurementInvalid` where the requests hardly overlap.
    """
    times = [np.array(arrivals[answer.request_id]) for answer in answers]
    start, end = max(item[0] for item in times), min(item[-1] for item in times)
    seconds = steps = context = 0.0
    for answer, stamps in zip(answers, times, strict=True):
        inside = np.flatnonzero((stamps[1:] > start) & (stamps[1:] <= end)) + 1
        if len(inside) < 2:
            continue
        passes = answer.verify_steps or answer.completion_tokens - 1
        seconds += float(stamps[inside[-1]] - stamps[inside[0]])
        steps += (len(inside) - 1) * passes / (len(stamps) - 1)
        middle = (inside[0] + inside[-1]) / 2 / (len(stamps) - 1)
        context += answer.prompt_tokens + middle * answer.completion_tokens
    if steps < _LEAST_STEPS * len(answers) or not seconds > 0:
        raise MeasurementInvalid(
            f"{len(answers)} requests decoded together for {steps / len(answers):.1f} steps only",
            hint="raise --new-tokens, or ask for no more requests than the server runs at once",
        )
    return Window(seconds / steps, steps / len(answers), context)


def measure_server(
    url: str,
    plan: ServedPlan,
    *,
    seed: int = 0,
    timeout_s: float = 600.0,
    reporter: Reporter = SilentReporter(),
) -> ServedTimes:
    """Time the steps and prefills of the server at `url`; medians over the rounds.

    Raises `MachineError` where it cannot be reached or does not say how many rows it verifies, and
    `MeasurementInvalid` for answers that are no basis.
    """
    arrivals: dict[str, list[float]] = {}

    def watch(request_id: str, at_s: float) -> None:
        arrivals.setdefault(request_id, []).append(at_s)

    rng = np.random.default_rng(seed)
    steps: dict[tuple[int, int], list[Window]] = {}
    prefill: dict[int, list[float]] = {}
    with HttpEngine(url, timeout_s, watch=watch) as engine:
        engine.health()
        facts = read_facts(engine.server_info())
        _rows(facts)  # refuses before the work
        for done in range(plan.rounds + 1):
            for count in plan.concurrency:
                for length in plan.prompt_tokens:
                    arrivals.clear()
                    batch = _requests(rng, count, length, plan.new_tokens)
                    answers = engine.generate_many(batch, concurrency=count)
                    found = shared_window(answers, arrivals)
                    if done:
                        steps.setdefault((count, length), []).append(found)
            for length in plan.prefill_tokens:
                answer = engine.generate(_requests(rng, 1, length, 1)[0])
                if done:
                    prefill.setdefault(length, []).append(answer.time_to_first_token_s)
            reporter.progress(f"steps of {engine.base_url}", done + 1, plan.rounds + 1)
    medians = tuple((length, statistics.median(prefill[length])) for length in sorted(prefill))
    return ServedTimes(facts, _samples(facts, steps), medians)


def _samples(
    facts: ServerFacts, steps: Mapping[tuple[int, int], Sequence[Window]]
) -> tuple[StepSample, ...]:
    """Medians over the rounds, by requests in flight and prompt length."""
    return tuple(
        StepSample(
            requests=count,
            rows=count * _rows(facts),
            draft_rows=count * _block(facts),
            context_tokens=statistics.fmean(item.context_tokens for item in windows),
            step_s=statistics.median(item.step_s for item in windows),
        )
        for (count, _), windows in steps.items()
    )


def batch_times(
    servers: Sequence[ServedTimes], *, name: str, device: DeviceInfo, source: str
) -> tuple[BatchStepTimes, float]:
    """The file that `simulate batch` reads, and the mean absolute error of its fit as a ratio.

    Raises `InputError` for servers of different models, versions or data types.
    """
    first = servers[0].facts
    for other in servers[1:]:
        for what, own, its in (
            ("model", first.model_path, other.facts.model_path),
            ("engine", (first.engine, first.version), (other.facts.engine, other.facts.version)),
            ("data type", first.dtype, other.facts.dtype),
        ):
            if own != its:
                raise InputError(
                    f"the servers differ in their {what}: {own} and {its}",
                    where="--url",
                    hint="measure one deployment with different speculative settings",
                )
    curves, error = fit_components([sample for one in servers for sample in one.samples])
    drafter = next((s.facts.draft_model_path for s in servers if s.facts.draft_model_path), None)
    by_rows: dict[int, list[float]] = {}
    for one in servers:
        for rows, seconds in one.prefill:
            by_rows.setdefault(rows, []).append(seconds)
    points = tuple(
        CostPoint(amount=rows, seconds=statistics.median(by_rows[rows])) for rows in sorted(by_rows)
    )
    return BatchStepTimes(
        schema_version=1,
        name=name,
        engine=EngineInfo(name=first.engine or "sglang", version=first.version or "not said"),
        device=device,
        target=ModelInfo(name=_model_name(first.model_path)),
        drafter=ModelInfo(name="none" if drafter is None else _model_name(drafter)),
        dtype=first.dtype or "bfloat16",
        decode=curves,
        prefill=CostCurve(name="prefill", driver="prompt_rows", points=points),
        source=source,
        notes=tuple(_notes(servers)),
    ), error


def _notes(servers: Sequence[ServedTimes]) -> Iterator[str]:
    """What the measured settings leave open."""
    settings = sorted({(one.rows, _block(one.facts)) for one in servers})
    told = ", ".join(
        "plain decoding" if rows == 1 and not block else f"{rows} rows on a block of {block}"
        for rows, block in settings
    )
    yield f"settings measured, per request: {told}; others are interpolated or extrapolated"
    if len(settings) == 1:
        yield (
            "one setting alone: rows, requests and drafted rows grow together, so their costs are "
            "not told apart and other policies are guesses"
        )


def _requests(
    rng: np.random.Generator, count: int, length: int, new_tokens: int
) -> list[GenerateRequest]:
    """Requests that no earlier one shares a prefix of more than a few tokens with."""
    ids = rng.integers(*_IDS, size=(count, length)).tolist()
    return [
        GenerateRequest(str(index), tuple(row), new_tokens, ignore_eos=True)
        for index, row in enumerate(ids)
    ]


def _rows(facts: ServerFacts) -> int:
    if facts.speculative_algorithm is None:
        return 1
    if facts.draft_tokens is None:
        raise MachineError(
            "the server speculates and does not say how many rows it verifies",
            where="speculative_num_draft_tokens",
            hint="is it an SGLang server? its /server_info holds that number",
        )
    return facts.draft_tokens


def _block(facts: ServerFacts) -> int:
    """Drafted rows per request: the drafter's block, which a chain verifies whole."""
    return 0 if facts.speculative_algorithm is None else facts.draft_block or _rows(facts)


def _model_name(path: str | None) -> str:
    return "not said" if not path else path.rstrip("/").rpartition("/")[2] or path
