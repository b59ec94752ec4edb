"""What every engine offers: greedy generation with timings, and teacher-forced scores.

Both engines (SGLang and the reference engine) speak the same HTTP requests, so the
commands talk to one interface and never ask which engine answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One greedy request.

    Give `input_ids`, or leave them empty and give `text`: the server then tokenises and
    must report the prompt ids it used. `top_logprobs` > 0 also asks for the decode-path
    log-probabilities of that many best tokens at each output position. `rid`: the name under
    which an SGLang server keeps the request; None lets the server choose.
    """

    request_id: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    text: str | None = None
    ignore_eos: bool = False
    top_logprobs: int = 0
    rid: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability in nats."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One validated answer; every time is this client's monotonic clock, in seconds.

    `completion_tokens` always equals `len(output_ids)`: a reply where they differ is refused.
    `verify_steps` is the number of exact target passes after prefill, None without speculation.
    `first_byte_s` is when the first byte of the first chunk that holds a token arrived.
    """

    request_id: str
    output_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    verify_steps: int | None
    submit_s: float
    first_byte_s: float
    last_byte_s: float
    prompt_ids: tuple[int, ...] = ()
    cached_tokens: int | None = None
    text: str | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds from submitting the request to its last byte."""
        return self.last_byte_s - self.submit_s

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from submitting the request to the first byte of its first tokens."""
        return self.first_byte_s - self.submit_s

    @property
    def rate_tok_per_s(self) -> float:
        """Output tokens per second, end to end: completion tokens / (last byte - submit)."""
        return self.completion_tokens / self.elapsed_s

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens committed per exact pass, without the token that prefill emits."""
        if not self.verify_steps:
            return None
        return (self.completion_tokens - 1) / self.verify_steps


@dataclass(frozen=True, slots=True)
class ForcedScores:
    """Teacher-forced log-probabilities of n given tokens, in nats (paper §3.3).

    token_logprobs: float64 [n], of the forced tokens.
    argmax_ids: int64 [n], the most likely token at each position.
    argmax_logprobs: float64 [n], of those; never below `token_logprobs`.
    """

    token_logprobs: npt.NDArray[np.float64]
    argmax_ids: npt.NDArray[np.int64]
    argmax_logprobs: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return int(self.token_logprobs.shape[0])

    @property
    def margins(self) -> npt.NDArray[np.float64]:
        """How far each forced token lies below the best one, float64 [n], nats, >= 0."""
        return self.argmax_logprobs - self.token_logprobs


class EngineClient(Protocol):
    """A server, or an engine in this process, that generates greedily and scores."""

    def health(self) -> None:
        """Return when the engine answers; raise MachineError otherwise."""
        ...

    def server_info(self) -> Mapping[str, Any]:
        """Return the engine's resolved arguments and state."""
        ...

    def flush_cache(self) -> None:
        """Empty the prefix cache; raise MeasurementInvalid when the engine refuses."""
        ...

    def generate(self, request: GenerateRequest) -> Generation:
        """Answer one request."""
        ...

    def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Answer all requests, `concurrency` in flight; results in the order given."""
        ...

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it."""
        ...
