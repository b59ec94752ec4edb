"""SGLang's `/generate` bodies and replies, and the checks a reply must pass.

A measurement is only as good as its worst reply, so nothing is repaired here: a reply
that lacks a field, miscounts its tokens or holds a number that is not finite raises
MeasurementInvalid with the request id. Shapes as in SGLang 0.5.23.
"""

from __future__ import annotations

import json
import math
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
from specpilot_cli.errors import MachineError, MeasurementInvalid

JsonObject = dict[str, Any]

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

# A log-softmax in float32 may land this far above 0, or a token this far above the top list.
_LOGPROB_SLACK_NATS = 1e-4


@dataclass(frozen=True, slots=True)
class Arrival:
    """Client times of one answer, seconds on the monotonic clock."""

    submit_s: float
    first_byte_s: float
    last_byte_s: float


def invalid(request_id: str, reason: str) -> MeasurementInvalid:
    """Build the error that ends a measurement because of one reply."""
    return MeasurementInvalid(
        reason,
        hint="one bad reply voids the run: look at the server's log, then measure again",
        where=f"request `{request_id}`",
    )


def without_ids(request_id: str, what: str) -> MachineError:
    """Build the error for a server whose replies hold no token ids: text is never re-tokenised."""
    return MachineError(
        f"the server reports no token ids {what}",
        where=f"request `{request_id}`",
        hint="several id sequences spell the same text, so ids must come from the server: SGLang's "
        "/generate reports them",
    )


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


def decode_json(raw: bytes, request_id: str) -> JsonObject:
    """Parse one reply; MeasurementInvalid when it is no JSON object."""
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:  # covers UnicodeDecodeError
        shown = raw[:120].decode("utf-8", "replace")
        raise invalid(request_id, f"the reply is not JSON: `{shown}`") from error
    if not isinstance(parsed, dict):
        raise invalid(request_id, f"the reply is a JSON {type(parsed).__name__}, not an object")
    if "error" in parsed:
        error_value = parsed["error"]
        message = error_value.get("message") if isinstance(error_value, dict) else error_value
        raise invalid(request_id, f"the server reported an error: {message}")
    return parsed


def _meta(reply: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise invalid(request_id, "the reply has no `meta_info`")
    return meta


def _token_ids(value: Any, key: str, request_id: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise invalid(request_id, f"the reply has no list `{key}`")
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise invalid(request_id, f"`{key}` holds `{token!r}`, which is no token id")
    return tuple(value)


def _count(meta: Mapping[str, Any], key: str, request_id: str) -> int:
    value = meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid(request_id, f"`meta_info.{key}` is `{value!r}`, not a count")
    return value


def _check_most(n_tokens: int, most: int, request_id: str) -> None:
    if n_tokens > most:
        raise invalid(request_id, f"{n_tokens} tokens where {most} were asked for")


def _optional_count(meta: Mapping[str, Any], key: str, request_id: str) -> int | None:
    return None if meta.get(key) is None else _count(meta, key, request_id)


def finish_type(meta: Mapping[str, Any], request_id: str) -> str:
    """Why generation ended: `stop` or `length`; anything else voids the measurement."""
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind in ("stop", "length"):
        return str(kind)
    if kind == "abort":
        message = reason.get("message", "no message") if isinstance(reason, dict) else "no message"
        raise invalid(request_id, f"the server aborted it: {message}")
    raise invalid(request_id, f"the answer ended with finish reason `{kind!r}`")


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
        meta = _meta(chunk, self.request_id)
        if chunk.get("output_ids") is None and not self.has_tokens and meta.get("finish_reason"):
            finish_type(meta, self.request_id)  # an abort holds no ids either
        if chunk.get("output_ids") is None and not self.has_tokens:
            raise without_ids(self.request_id, "of its answers")
        ids = _token_ids(chunk.get("output_ids"), "output_ids", self.request_id)
        total = _count(meta, "completion_tokens", self.request_id)
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
        _check_most(total, self.max_new_tokens, self.request_id)
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
        meta = dict(_meta(self._last, self.request_id))
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
    meta = _meta(reply, name)
    reason = finish_type(meta, name)
    output_ids = _token_ids(reply.get("output_ids"), "output_ids", name)
    completion = _count(meta, "completion_tokens", name)
    if completion != len(output_ids):
        raise invalid(name, f"{len(output_ids)} output ids but {completion} completion tokens")
    if not output_ids:
        raise invalid(name, "the answer holds no token")
    _check_most(completion, request.max_new_tokens, name)
    if reason == "length" and completion != request.max_new_tokens:
        raise invalid(
            name,
            f"stopped for length after {completion} of {request.max_new_tokens} tokens: "
            "is the server's context too short?",
        )
    prompt_tokens = _count(meta, "prompt_tokens", name)
    return Generation(
        request_id=name,
        output_ids=output_ids,
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion,
        verify_steps=_optional_count(meta, "spec_verify_ct", name),
        submit_s=arrival.submit_s,
        first_byte_s=arrival.first_byte_s,
        last_byte_s=arrival.last_byte_s,
        prompt_ids=_prompt_ids(reply, request, prompt_tokens),
        cached_tokens=_optional_count(meta, "cached_tokens", name),
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
        ids = _token_ids(reply["prompt_token_ids"], "prompt_token_ids", name)
    if len(ids) != prompt_tokens:
        raise invalid(name, f"{len(ids)} prompt ids but the server counted {prompt_tokens}")
    return ids


def _logprob(value: Any, request_id: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid(request_id, f"a log-probability is `{value!r}`")
    if value > _LOGPROB_SLACK_NATS:
        raise invalid(request_id, f"a log-probability is {value}, above zero")
    return float(value)


def _pair(row: Any, request_id: str) -> TokenLogprob:
    if not isinstance(row, list) or len(row) < 2:
        raise invalid(request_id, f"a log-probability row is `{row!r}`")
    value, token = row[0], row[1]
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        raise invalid(request_id, f"a log-probability row names token `{token!r}`")
    return TokenLogprob(token, _logprob(value, request_id))


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
        tuple(_pair(entry, name) for entry in row) if isinstance(row, list) else () for row in rows
    )


def parse_scores(
    reply: Mapping[str, Any], input_ids: Sequence[int], start: int, *, request_id: str
) -> ForcedScores:
    """Check a teacher-forced reply and return the scores of `input_ids[start:]`.

    Raises MeasurementInvalid when rows are missing, name other tokens than those forced,
    are not finite, or put the forced token above the argmax.
    """
    meta = _meta(reply, request_id)
    forced = [int(token) for token in input_ids[start:]]
    token_rows = _rows(meta, "input_token_logprobs", len(forced), request_id)
    top_rows = _rows(meta, "input_top_logprobs", len(forced), request_id)
    values = np.empty(len(forced), dtype=np.float64)
    best_ids = np.empty(len(forced), dtype=np.int64)
    best = np.empty(len(forced), dtype=np.float64)
    for index, token in enumerate(forced):
        own = _pair(token_rows[index], request_id)
        if own.token_id != token:
            raise invalid(
                request_id, f"scored token {own.token_id} where {token} was forced (row {index})"
            )
        top = top_rows[index]
        if not isinstance(top, list) or not top:
            raise invalid(request_id, f"no top log-probability at row {index}")
        argmax = _pair(top[0], request_id)
        if own.logprob > argmax.logprob + _LOGPROB_SLACK_NATS:
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
