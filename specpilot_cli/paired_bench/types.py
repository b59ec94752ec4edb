"""What a paired benchmark takes and gives: settings, timed requests, results.

Field names end in their unit (`_s`, `_ratio`, `_log` for natural logarithms, `_tok_per_s`),
because a summary is written to JSON field by field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specpilot_cli.engines.base import Generation
from specpilot_cli.errors import InputError

# `ok` is a calibration: noise was measured, nothing was compared.
Verdict = Literal["promote", "no", "invalid", "ok"]

BASELINE, CANDIDATE = "baseline", "candidate"
# Optional systems: plain decoding, and a second launch of the baseline for the A/A sessions.
AR, BASELINE_AGAIN = "ar", "baseline_again"
KNOWN_SYSTEMS = (BASELINE, CANDIDATE, AR, BASELINE_AGAIN)

# Fewer sessions than this leave the noise, and so the threshold, poorly known.
ENOUGH_AA_SESSIONS = 3


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """One request as token ids, so that no server's tokenizer takes part in the comparison."""

    request_id: str
    benchmark: str
    input_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class PairedBenchSettings:
    """How to measure and when to promote.

    runs: passes over all requests, even, so that each order occurs equally often.
    batches: requests in flight, one or more levels; each run serves every request at each.
    block_requests: requests one system serves before the other takes over; None means 1 at batch 1
    and four batches otherwise. aa_sessions: K, baseline against itself; 0 where the noise of an
    earlier calibration is used. aa_limit: requests per benchmark in those sessions (None = all;
    fewer make the measured noise larger, never smaller on average). warmup: requests outside the
    timed set; None means one batch of the largest level. limit: timed requests per benchmark.
    base_identical_ratio, base_diverging_ratio: least gain worth promoting when all output tokens
    equal the baseline's, and when some differ (paper §3.2). sigma_*_log: assumed request noise,
    for the plan that is printed before the measurement only.
    """

    runs: int = 2
    batches: tuple[int, ...] = (1,)
    block_requests: int | None = None
    aa_sessions: int = 3
    aa_limit: int | None = None
    warmup: int | None = None
    limit: int | None = None
    base_identical_ratio: float = 0.01
    base_diverging_ratio: float = 0.03
    confidence: float = 0.95
    power: float = 0.8
    sigma_identical_log: float = 0.01
    sigma_diverging_log: float = 0.10

    def __post_init__(self) -> None:
        """Raise InputError for settings that cannot be measured."""
        if self.runs < 2 or self.runs % 2:
            raise InputError(
                f"runs must be even and at least 2, not {self.runs}",
                where="runs",
                hint="every request is served in both orders equally often, which takes pairs",
            )
        if self.aa_sessions < 0:
            raise InputError(f"A/A sessions cannot be {self.aa_sessions}", where="aa")
        if not self.batches or len(set(self.batches)) < len(self.batches):
            raise InputError(
                f"batch sizes must be given once each, not {self.batches}",
                where="batch",
                hint="for example --batch 1,8,32",
            )
        least_one = {"batch": min(self.batches), "block_requests": self.block_requests,
                     "warmup": self.warmup}  # fmt: skip
        for name, value in least_one.items():
            if value is not None and value < 1:
                raise InputError(
                    f"{name} must be at least 1, not {value}",
                    where=name,
                    hint="leave the option out for its default",
                )
        for name, value in {"limit": self.limit, "aa_limit": self.aa_limit}.items():
            if value is not None and value < 2:
                raise InputError(
                    f"{name} must be at least 2, not {value}",
                    where=name,
                    hint="the spread between requests cannot be estimated from one",
                )

    @property
    def warmup_requests(self) -> int:
        """Requests served before timing: at least one full batch unless asked otherwise."""
        return self.warmup if self.warmup is not None else max(2, *self.batches)

    def requests_per_block(self, batch: int) -> int:
        """Requests that one system serves at `batch` before another takes over."""
        if self.block_requests is not None:
            return self.block_requests
        return 1 if batch == 1 else 4 * batch


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One answer and when it was due: session `ab` or `aa1`..., run, block, place in the order.

    batch: requests in flight. digest: SHA-256 of the output ids where these were not kept.
    """

    session: str
    run: int
    block: int
    position: int
    system: str
    benchmark: str
    answer: Generation
    batch: int = 1
    digest: str = ""

    @property
    def request_id(self) -> str:
        """The prompt's id."""
        return self.answer.request_id

    @property
    def output_digest(self) -> str:
        """SHA-256 of the output ids: answers are alike if these are."""
        return self.digest or output_digest(self.answer.output_ids)


def output_digest(ids: Sequence[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class GainEstimate:
    """A gain with its two-sided interval (A/A noise included) and one-sided lower bound (without).

    df: degrees of freedom of the standard error `se_log`.
    """

    gain_ratio: float
    low_ratio: float
    high_ratio: float
    lower_bound_ratio: float
    log_gain: float
    se_log: float
    df: float
    n_requests: int


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """One benchmark: candidate over baseline. Rates are geometric means, tau is pooled."""

    name: str
    n_requests: int
    n_identical: int
    gain: GainEstimate
    rate_tok_per_s: dict[str, float]
    tau: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class SystemSummary:
    """One system over the whole A/B session (all runs, all benchmarks).

    rate: output tokens / (last byte - submit), geometric mean over answers of each benchmark,
    then over benchmarks. decode_rate: tokens after the first / (last - first byte); None when
    answers arrive in one piece. inter_token: mean seconds per token after the first within a
    request; percentiles are over answers, as chunks are not tokens. tau: (completion tokens - 1)
    / verify steps, pooled. cached_ratio: prompt tokens from the prefix cache. n_unstable:
    requests whose output differed between runs of this same system.
    """

    name: str
    rate_tok_per_s: float
    decode_rate_tok_per_s: float | None
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    inter_token_p50_s: float | None
    inter_token_p90_s: float | None
    inter_token_p99_s: float | None
    tau: float | None
    completion_tokens: int
    verify_steps: int | None
    cached_ratio: float | None
    n_unstable: int


@dataclass(frozen=True, slots=True)
class LevelResult:
    """The comparison at one batch size: all benchmarks with equal weights, then each."""

    batch: int
    gain: GainEstimate
    benchmarks: tuple[BenchmarkResult, ...]
    systems: tuple[SystemSummary, ...]


@dataclass(frozen=True, slots=True)
class AaSession:
    """One session of the baseline against itself; `promoted` should never be true."""

    name: str
    gain_ratio: float
    lower_bound_ratio: float
    n_requests: int
    promoted: bool


@dataclass(frozen=True, slots=True)
class LevelNoise:
    """nu of the A/A sessions at one batch size alone, in log units."""

    batch: int
    nu_log: float


@dataclass(frozen=True, slots=True)
class Noise:
    """nu, the root mean square of ln G over A/A sessions, and what it rests on.

    sigma_log: spread of a request's mean log-ratio within these sessions. same_launch: the baseline
    ran against the very same server, so noise between launches is not in nu. provisional: fewer
    than three sessions. levels: the same by batch size. source: SHA-256 of the calibration that it
    was taken from; None where it was measured in this benchmark.
    """

    nu_log: float
    sigma_log: float
    sessions: tuple[AaSession, ...]
    same_launch: bool
    provisional: bool
    levels: tuple[LevelNoise, ...] = ()
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The promote rule applied: `lower_bound > bound`, bound = 1 + base + 2 nu (paper §3.2)."""

    verdict: Verdict
    lower_bound_ratio: float
    bound_ratio: float
    base_ratio: float
    identical: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ArSpeedup:
    """Speedup of one system over plain decoding, served in the same runs."""

    system: str
    overall: GainEstimate
    benchmarks: dict[str, GainEstimate]


@dataclass(frozen=True, slots=True)
class RequestGain:
    """One request: mean log-ratio over its runs as a ratio; same tokens as the baseline or not."""

    request_id: str
    benchmark: str
    gain_ratio: float
    identical: bool


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What the client itself took; none of it but delays inside a request enters a rate.

    call_overhead: seconds per block between the call and its first submit and after its last byte.
    refill_gap: seconds until the next request followed a finished one. cpu_ratio: processor
    seconds of the client process per second of serving (close to 1 would mean that the client sets
    the pace). loop_lag: how late the client's event loop ran what was due, the worst one percent.
    """

    call_overhead_p50_s: float
    refill_gap_p50_s: float | None
    refill_gap_p99_s: float | None
    cpu_ratio: float
    loop_lag_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How texts became token ids, by hashes: the result holds no prompt text.

    texts_sha256: of all ids, benchmarks and texts before any template. template_sha256: of the
    chat template; None where texts were sent as they stand. thinking: its switch. tokenizer_sha256:
    of tokenizer.json; None where the baseline's server tokenised. sealed: the prompts were kept for
    one final comparison.
    """

    texts_sha256: str
    template_sha256: str | None = None
    thinking: bool | None = None
    tokenizer_sha256: str | None = None
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What the measurement can show, worked out before it starts.

    detectable_*: smallest true gain promoted with the stated power, under the assumed request noise
    and the A/A noise known by then (assumed_nu_log; 0 before any). estimated_s: from the warm-up's
    speed.
    """

    n_requests: dict[str, int]
    n_answers: int
    power: float
    sigma_identical_log: float
    sigma_diverging_log: float
    detectable_identical_ratio: float
    detectable_diverging_ratio: float
    estimated_s: float | None = None
    assumed_nu_log: float = 0.0


@dataclass(frozen=True, slots=True)
class PairedBenchSummary:
    """Everything a table, a figure or a later reader needs, without the single answers."""

    verdict: Verdict
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    settings: PairedBenchSettings
    plan: Plan
    decision: Decision | None
    gain: GainEstimate | None
    benchmarks: tuple[BenchmarkResult, ...]
    systems: tuple[SystemSummary, ...]
    noise: Noise | None
    over_ar: tuple[ArSpeedup, ...]
    requests: tuple[RequestGain, ...]
    client: ClientCost | None
    paced: tuple[str, ...]
    prompts_sha256: str
    started_utc: str
    wall_s: float
    environment: dict[str, Any] = field(default_factory=dict)
    levels: tuple[LevelResult, ...] = ()
    prompt_form: PromptForm | None = None


@dataclass(frozen=True, slots=True)
class PairedBenchResult:
    """The summary, every answer it rests on (A/A sessions included), and the timed prompts."""

    summary: PairedBenchSummary
    rows: tuple[TimedRequest, ...]
    prompts: tuple[TokenPrompt, ...]
    server_info: Mapping[str, Mapping[str, Any]]

    @property
    def verdict(self) -> Verdict:
        """promote, no, or invalid."""
        return self.summary.verdict

    def answers(self, system: str, *, run: int = 0) -> list[Generation]:
        """The A/B answers of `system` in `run` at the first batch size, in serving order.

        For token forcing, which audits the very tokens that were timed.
        """
        batch = self.summary.settings.batches[0]
        return [
            row.answer
            for row in self.rows
            if row.session == "ab"
            and row.system == system
            and row.run == run
            and row.batch == batch
        ]
