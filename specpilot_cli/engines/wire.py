"""SGLang's `/generate` bodies and replies, and the checks a reply must pass.

A measurement is only as good as its worst reply, so nothing is repaired here: a reply
that lacks a field, miscounts its tokens or holds a number that is not finite raises
MeasurementInvalid with the request id. Shapes as in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specpilot_cli.engines.base import (
    ForcedScores,
    GenerateRequest,
    Generation,
    TokenLogprob,
)
from specpilot_cli.engines.replies import (
    LOGPROB_SLACK_NATS,
    JsonObject,
    check_most,
    count,
    decode_json,
    finish_type,
    invalid,
    meta_of,
    optional_count,
    pair,
    token_ids,
    without_ids,
)

# Named one by one: what a request leaves out, the server fills in from defaults of its own, such as
# the model's generation_config.json with a repetition penalty.
GREEDY: dict[str, float | int] = {
    "temperature": 0,
    "top_k": 1,
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """Client times of one answer, seconds on the monotonic clock."""

    submit_s: float
    first_byte_s: float
    last_byte_s: float


def generate_body(request: GenerateRequest, *, stream: bool) -> JsonObject:
    """Body of a greedy `/generate` request."""
    body: JsonObject = {
        "sampling_params": {**GREEDY, "max_new_tokens": request.max_new_tokens},
        "stream": stream,
    }
    if request.input_ids:
        body["input_ids"] = list(request.input_ids)
    elif request.text is not None:
        body["text"] = request.text
        body["return_prompt_token_ids"] = True
    if request.rid is not None:
        body["rid"] = request.rid
    if request.ignore_eos:
        body["sampling_params"]["ignore_eos"] = True
    if request.top_logprobs:
        body["return_logprob"] = True
        body["top_logprobs_num"] = request.top_logprobs
    return body


def score_body(input_ids: Sequence[int], start: int) -> JsonObject:
    """Body that asks for the forced tokens `input_ids[start:]` and the argmax beside each.

    Row 0 of the reply belongs to token `start - 1` and is empty, so row i scores
    token `start - 1 + i`.
    """
    return {
        "input_ids": [int(token) for token in input_ids],
        "sampling_params": {**GREEDY, "max_new_tokens": 0},
        "stream": False,
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": 1,
    }


@dataclass(slots=True)
class StreamAssembler:
    """Puts one streamed answer together; knows both of SGLang's stream forms.

    A cumulative stream repeats all ids so far in every chunk (the default), an incremental
    one sends only new ids. Which one it is follows from `completion_tokens`, once two
    chunks hold tokens. After that the chunks of a cumulative stream need no parsing but
    the last, which keeps the client cheap when 64 streams run at once. A stream ends in an error
    as soon as it has more than `max_new_tokens`.
    """

    request_id: str
    max_new_tokens: int
    _ids: list[int] = field(default_factory=list)
    _top: list[Any] = field(default_factory=list)
    _last: JsonObject | None = None
    _unparsed: bytes | None = None
    _cumulative: bool | None = None
    _chunks_with_tokens: int = 0

    @property
    def has_tokens(self) -> bool:
        """Whether a chunk with at least one token has arrived."""
        return self._chunks_with_tokens > 0

    def add(self, payload: bytes) -> None:
        """Take the JSON of one `data:` event."""
        if self._cumulative and self._chunks_with_tokens > 1 and b'"error"' not in payload:
            self._unparsed = payload
            return
        self._take(decode_json(payload, self.request_id))

    def _take(self, chunk: JsonObject) -> None:
        meta = meta_of(chunk, self.request_id)
        if chunk.get("output_ids") is None and not self.has_tokens and meta.get("finish_reason"):
            finish_type(meta, self.request_id)  # an abort holds no ids either
        if chunk.get("output_ids") is None and not self.has_tokens:
            raise without_ids(self.request_id, "of its answers")
        ids = token_ids(chunk.get("output_ids"), "output_ids", self.request_id)
        total = count(meta, "completion_tokens", self.request_id)
        self._last = chunk
        if meta.get("finish_reason") is not None:
            finish_type(meta, self.request_id)  # an abort chunk need not count right
        if not ids and total == len(self._ids):
            return
        if self._chunks_with_tokens == 0:
            ok = total == len(ids)
        elif self._cumulative is None:
            # Both forms fit only when the chunk adds nothing, and then nothing is decided.
            if len(ids) == total and list(ids[: len(self._ids)]) == self._ids:
                self._cumulative = True
            elif len(ids) + len(self._ids) == total:
                self._cumulative = False
            ok = self._cumulative is not None
        else:
            ok = len(ids) + (0 if self._cumulative else len(self._ids)) == total
        if not ok:
            raise invalid(
                self.request_id,
                f"a chunk says {total} completion tokens and holds {len(ids)} ids "
                f"after {len(self._ids)}",
            )
        check_most(total, self.max_new_tokens, self.request_id)
        if self._cumulative and list(ids[: len(self._ids)]) != self._ids:
            raise invalid(self.request_id, "the stream changed tokens it had already sent")
        self._chunks_with_tokens += 1
        rows = meta.get("output_top_logprobs") or []
        if not isinstance(rows, list):
            raise invalid(self.request_id, "output_top_logprobs is not a list")
        if self._cumulative is not False:
            self._ids.clear()
            self._top.clear()
        self._ids.extend(ids)
        self._top.extend(rows)

    def finish(self) -> JsonObject:
        """Return the whole answer in the shape of a reply without streaming."""
        if self._unparsed is not None:
            self._take(decode_json(self._unparsed, self.request_id))
            self._unparsed = None
        if self._last is None:
            raise invalid(self.request_id, "the stream ended without a chunk")
        meta = dict(meta_of(self._last, self.request_id))
        if self._top:
            meta["output_top_logprobs"] = self._top
        return {**self._last, "output_ids": self._ids, "meta_info": meta}


def parse_generation(
    reply: Mapping[str, Any], request: GenerateRequest, arrival: Arrival
) -> Generation:
    """Check a whole answer and turn it into a Generation.

    Raises MeasurementInvalid for missing ids, a wrong token count, more tokens than asked
    for, an abort, or log-probabilities that are not finite.
    """
    name = request.request_id
    meta = meta_of(reply, name)
    reason = finish_type(meta, name)
    output_ids = token_ids(reply.get("output_ids"), "output_ids", name)
    completion = count(meta, "completion_tokens", name)
    if completion != len(output_ids):
        raise invalid(name, f"{len(output_ids)} output ids but {completion} completion tokens")
    if not output_ids:
        raise invalid(name, "the answer holds no token")
    check_most(completion, request.max_new_tokens, name)
    if reason == "length" and completion != request.max_new_tokens:
        raise invalid(
            name,
            f"stopped for length after {completion} of {request.max_new_tokens} tokens: "
            "is the server's context too short?",
        )
    prompt_tokens = count(meta, "prompt_tokens", name)
    return Generation(
        request_id=name,
        output_ids=output_ids,
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion,
        verify_steps=optional_count(meta, "spec_verify_ct", name),
        submit_s=arrival.submit_s,
        first_byte_s=arrival.first_byte_s,
        last_byte_s=arrival.last_byte_s,
        prompt_ids=_prompt_ids(reply, request, prompt_tokens),
        cached_tokens=optional_count(meta, "cached_tokens", name),
        text=reply.get("text") if isinstance(reply.get("text"), str) else None,
        top_logprobs=_output_top(meta, request, completion),
    )


def _prompt_ids(
    reply: Mapping[str, Any], request: GenerateRequest, prompt_tokens: int
) -> tuple[int, ...]:
    name = request.request_id
    if request.input_ids:
        ids = request.input_ids
    elif reply.get("prompt_token_ids") is None:
        raise without_ids(name, "of a prompt sent as text")
    else:
        ids = token_ids(reply["prompt_token_ids"], "prompt_token_ids", name)
    if len(ids) != prompt_tokens:
        raise invalid(name, f"{len(ids)} prompt ids but the server counted {prompt_tokens}")
    return ids


def _output_top(
    meta: Mapping[str, Any], request: GenerateRequest, completion: int
) -> tuple[tuple[TokenLogprob, ...], ...] | None:
    if not request.top_logprobs:
        return None
    rows = meta.get("output_top_logprobs")
    if not isinstance(rows, list) or len(rows) != completion:
        return None  # some speculative algorithms report none; the caller decides if it matters
    name = request.request_id
    return tuple(
        tuple(pair(entry, name) for entry in row) if isinstance(row, list) else () for row in rows
    )


def parse_scores(
    reply: Mapping[str, Any], input_ids: Sequence[int], start: int, *, request_id: str
) -> ForcedScores:
    """Check a teacher-forced reply and return the scores of `input_ids[start:]`.

    Raises MeasurementInvalid when rows are missing, name other tokens than those forced,
    are not finite, or put the forced token above the argmax.
    """
    meta = meta_of(reply, request_id)
    forced = [int(token) for token in input_ids[start:]]
    token_rows = _rows(meta, "input_token_logprobs", len(forced), request_id)
    top_rows = _rows(meta, "input_top_logprobs", len(forced), request_id)
    values = np.empty(len(forced), dtype=np.float64)
    best_ids = np.empty(len(forced), dtype=np.int64)
    best = np.empty(len(forced), dtype=np.float64)
    for index, token in enumerate(forced):
        own = pair(token_rows[index], request_id)
        if own.token_id != token:
            raise invalid(
                request_id, f"scored token {own.token_id} where {token} was forced (row {index})"
            )
        top = top_rows[index]
        if not isinstance(top, list) or not top:
            raise invalid(request_id, f"no top log-probability at row {index}")
        argmax = pair(top[0], request_id)
        if own.logprob > argmax.logprob + LOGPROB_SLACK_NATS:
            raise invalid(request_id, f"the forced token scores above the argmax at row {index}")
        values[index], best_ids[index] = own.logprob, argmax.token_id
        best[index] = max(argmax.logprob, own.logprob)
    same = best_ids == np.asarray(forced, dtype=np.int64)
    values[same] = best[same]
    return ForcedScores(token_logprobs=values, argmax_ids=best_ids, argmax_logprobs=best)


def _rows(meta: Mapping[str, Any], key: str, n_forced: int, request_id: str) -> list[Any]:
    rows = meta.get(key)
    if not isinstance(rows, list):
        raise invalid(request_id, f"the reply has no `{key}`")
    if len(rows) != n_forced + 1:
        raise invalid(request_id, f"`{key}` has {len(rows)} rows, not {n_forced + 1}")
    return rows[1:]
