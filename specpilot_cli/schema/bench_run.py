"""The journal of a paired benchmark: JSON lines, appended while it runs, never rewritten.

First a header that fixes what is measured; then one line per answered request, one per finished
run, one per server that was started for it, and one if something failed. A run counts only if its
`run_end` line is there, so a killed benchmark resumes at the run it was in.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, RootModel, model_validator

from specpilot_cli.schema.base import FileModel

JOURNAL_VERSION = 2


class BenchSettings(FileModel):
    """What has to stay the same for runs of one benchmark to be combined."""

    runs: int = Field(ge=2)
    batches: tuple[Annotated[int, Field(ge=1)], ...]
    block_requests: int | None
    aa_sessions: int = Field(ge=0)
    aa_limit: int | None
    limit: int | None
    warmup: int = Field(ge=1)
    base_identical_ratio: float = Field(ge=0)
    base_diverging_ratio: float = Field(ge=0)


class BenchSystem(FileModel):
    """One system under test as it described itself when the benchmark began."""

    name: str
    server_info: dict[str, Any]


class BenchHeader(FileModel):
    """The first line: nothing below it is comparable if any of this differs."""

    kind: Literal["header"] = "header"
    journal_version: int = JOURNAL_VERSION
    specpilot_version: str
    started_utc: str
    prompts_sha256: str
    settings: BenchSettings
    systems: list[BenchSystem]
    environment: dict[str, Any]
    noise_sha256: str | None = None


class BenchLaunch(FileModel):
    """A system was started afresh for a run: where, and what its server then said of itself."""

    kind: Literal["launch"] = "launch"
    session: str
    run: int = Field(ge=0)
    system: str
    device: str | None
    server_info: dict[str, Any]


class BenchRequest(FileModel):
    """One answered request; times are seconds on the client's monotonic clock.

    session is `ab`, or `aa1`, `aa2`, ... where the baseline is served against itself. block and
    position say when the request was due: position 0 is the system that was served first. In a
    redacted journal `output_ids` is empty; the hash always stands.
    """

    kind: Literal["request"] = "request"
    session: str
    run: int = Field(ge=0)
    block: int = Field(ge=0)
    position: int = Field(ge=0)
    system: str
    request_id: str
    benchmark: str
    prompt_tokens: int = Field(ge=0)
    batch: int = Field(ge=1)
    output_ids: list[Annotated[int, Field(ge=0)]]
    output_sha256: str
    completion_tokens: int = Field(ge=1)
    finish_reason: str = Field(pattern="^(stop|length)$")
    verify_steps: int | None = Field(ge=0)
    cached_tokens: int | None = Field(ge=0)
    submit_s: float
    first_byte_s: float
    last_byte_s: float

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.output_ids and len(self.output_ids) != self.completion_tokens:
            raise ValueError("`completion_tokens` is not the number of `output_ids`")
        times = (self.submit_s, self.first_byte_s, self.last_byte_s)
        if list(times) != sorted(times) or self.submit_s == self.last_byte_s:
            raise ValueError("the answer's times are not in order")
        return self


class BenchRunEnd(FileModel):
    """A run is complete: all of its `n_requests` lines stand above."""

    kind: Literal["run_end"] = "run_end"
    session: str
    run: int = Field(ge=0)
    n_requests: int = Field(ge=1)
    wall_s: float
    load_average_1min: float | None
    call_overhead_s: list[float]
    refill_gaps_s: list[float]
    loop_lag_p99_s: list[float] = Field(default_factory=list)
    client_cpu_s: float
    served_s: float


class BenchFailure(FileModel):
    """Why the benchmark is invalid; nothing that follows such a line is measured."""

    kind: Literal["failure"] = "failure"
    session: str
    run: int
    system: str
    reason: str


class BenchLine(
    RootModel[
        Annotated[
            BenchHeader | BenchLaunch | BenchRequest | BenchRunEnd | BenchFailure,
            Field(discriminator="kind"),
        ]
    ]
):
    """Any line of the journal."""
