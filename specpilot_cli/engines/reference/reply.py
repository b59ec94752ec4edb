"""Replies of `POST /generate`, in SGLang's shape.

`output_ids` are the engine's own ids and are what a client should read; `text` is for people.
Two of SGLang's definitions are kept although they invite misreading: `spec_accept_length` counts
the token that prefill emits, and input log-probabilities start with a row that is null.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specpilot_cli.engines.reference.payload import Item
from specpilot_cli.engines.reference.spec import EngineResult, TokenScores

if TYPE_CHECKING:
    from tokenizers import Tokenizer

JsonObject = dict[str, Any]
# Shown for bytes that are no complete character yet.
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Update:
    """State of one request after a step. `result` is set once it has finished."""

    output_ids: tuple[int, ...]
    accept_lengths: tuple[int, ...]
    proposed_drafts: int
    output_scores: TokenScores | None = None
    result: EngineResult | None = None


def build_reply(
    item: Item,
    update: Update,
    *,
    tokenizer: Tokenizer | None,
    speculative: bool,
    e2e_latency_s: float,
    index: int | None = None,
) -> JsonObject:
    """One reply object; cumulative, so a stream's chunk repeats everything before it."""
    result = update.result
    job = item.job
    n_output = len(update.output_ids)
    meta: JsonObject = {
        "id": job.request_id,
        "finish_reason": dict(result.finish_reason) if result else None,
        "prompt_tokens": len(job.input_ids),
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": n_output,
        "cached_tokens": 0,
    }
    if item.return_logprob:
        meta.update(_logprobs(item, update, tokenizer))
    if speculative and update.accept_lengths:
        meta.update(_speculation(update))
    if result:
        meta["e2e_latency"] = e2e_latency_s
    reply: JsonObject = {
        "text": _text(item, update, tokenizer),
        "output_ids": list(update.output_ids),
        "meta_info": meta,
    }
    if item.return_prompt_ids:
        reply["prompt_token_ids"] = list(job.input_ids)
    if index is not None:
        reply["index"] = index
    return reply


def _text(item: Item, update: Update, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    ids = list(update.output_ids)
    finished = update.result
    if finished and item.trim_stop and finished.finish_reason["type"] == "stop" and ids:
        ids = ids[:-1]
    text: str = tokenizer.decode(ids, skip_special_tokens=item.skip_special_tokens)
    # an open multi-byte character is completed by a later token
    return text if finished else text.rstrip(_REPLACEMENT)


def _speculation(update: Update) -> JsonObject:
    accepted, steps = sum(update.accept_lengths), len(update.accept_lengths)
    histogram = Counter(update.accept_lengths)
    meta: JsonObject = {
        "spec_verify_ct": steps,
        "spec_accept_length": len(update.output_ids) / steps,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": update.proposed_drafts,
        "spec_correct_drafts_histogram": [histogram[n] for n in range(max(histogram) + 1)],
    }
    if update.proposed_drafts:
        meta["spec_accept_rate"] = accepted / update.proposed_drafts
    return meta


def _logprobs(item: Item, update: Update, tokenizer: Tokenizer | None) -> JsonObject:
    """Log-probability rows `[logprob, token id, text]`; the first input row has no logprob."""
    shown = tokenizer if item.text_in_logprobs else None
    wants_top = item.job.top_logprobs > 0
    scores = update.result.output_scores if update.result else update.output_scores
    output_rows, output_top = _rows(scores, shown)
    meta: JsonObject = {
        "output_token_logprobs": output_rows,
        "output_token_logprobs_length": len(output_rows),
    }
    if wants_top:
        meta["output_top_logprobs"] = output_top
    if update.result is not None:
        rows, top = _rows(update.result.input_scores, shown)
        start = item.job.logprob_start
        if start is not None and start < len(item.job.input_ids):
            first = item.job.input_ids[start]
            rows.insert(0, [None, first, _token_text(shown, first)])
            top.insert(0, None)
        meta["input_token_logprobs"] = rows
        if wants_top:
            meta["input_top_logprobs"] = top
    return meta


def _rows(
    scores: TokenScores | None, tokenizer: Tokenizer | None
) -> tuple[list[list[Any]], list[list[list[Any]] | None]]:
    if scores is None:
        return [], []
    rows = [
        [logprob, token, _token_text(tokenizer, token)]
        for logprob, token in zip(scores.logprobs, scores.token_ids, strict=True)
    ]
    top: list[list[list[Any]] | None] = [
        [
            [logprob, token, _token_text(tokenizer, token)]
            for logprob, token in zip(logprobs, ids, strict=True)
        ]
        for logprobs, ids in zip(scores.top_logprobs, scores.top_ids, strict=True)
    ]
    return rows, top


def _token_text(tokenizer: Tokenizer | None, token: int) -> str | None:
    if tokenizer is None:
        return None
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text
