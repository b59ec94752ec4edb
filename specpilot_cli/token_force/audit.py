"""Can stock's own numerics explain a large-margin event?

The paper (§3.3) explains an event "if stock reproduces it on its own paths or margins, or if
the scorer's argmax changes with the prefill length". Our reading, the same for the system's
events and for stock's own:

- record: another stock-engine run (stock's, AR's) emitted that token after the same prefix.
- path: stock, started a few tokens before the event, follows the answer and emits the token.
- margin: started so, stock's own log-probabilities put the token within 2δ of its best.
- prefill length: the scorer's argmax at the event changes when the text after it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.scorer import ScoredOutput, Scorer
from specpilot_cli.ui import Reporter, SilentReporter

System = Literal["system", "stock"]
Explanation = Literal["record", "path", "margin", "prefill_length"]


class StockProbe(Protocol):
    """Stock, live: continues given prefixes greedily. `HttpEngine` is one."""

    def generate_many(
        self, requests: Sequence[GenerateRequest], *, concurrency: int
    ) -> list[Generation]:
        """Answer all requests in order, `concurrency` in flight."""
        ...


@dataclass(frozen=True, slots=True)
class Event:
    """One large-margin mismatch. position: index in the output. margin_nats: below the argmax."""

    system: System
    request_id: str
    benchmark: str
    position: int
    token_id: int
    argmax_id: int
    margin_nats: float


@dataclass(frozen=True, slots=True)
class AuditedEvent:
    """An event and what explains it; None is unexplained."""

    event: Event
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class AuditMeans:
    """What the audit may consult.

    records: other stock-engine answers by request id, whose tokens count as reproduced.
    probe: live stock; None skips the path and margin clauses.
    """

    scorer: Scorer
    records: tuple[Mapping[str, OutputRecord], ...] = ()
    probe: StockProbe | None = None


def find_events(
    outputs: Sequence[ScoredOutput], event_margin_nats: float, *, system: System
) -> list[Event]:
    """Every mismatch with a margin above 2δ, in order of requests and positions."""
    events: list[Event] = []
    for output in outputs:
        large = output.mismatch & (output.margins > event_margin_nats)
        events.extend(
            Event(
                system=system,
                request_id=output.record.request_id,
                benchmark=output.record.benchmark,
                position=int(position),
                token_id=output.record.output_ids[position],
                argmax_id=int(output.scores.argmax_ids[position]),
                margin_nats=float(output.margins[position]),
            )
            for position in np.flatnonzero(large)
        )
    return events


def sample_events(events: Sequence[Event], limit: int, seed: int) -> list[Event]:
    """Up to `limit` events, drawn uniformly without replacement, in random order.

    Uniform over events, so that the audited share of events is the audited share of tokens;
    any prefix of the sample is a uniform sample too.
    """
    order = np.random.default_rng(seed).permutation(len(events))
    return [events[index] for index in order[:limit]]


def audit(
    events: Sequence[Event],
    answers: Mapping[str, OutputRecord],
    means: AuditMeans,
    event_margin_nats: float,
    settings: TokenForceSettings,
    *,
    label: str,
    reporter: Reporter = SilentReporter(),
) -> list[AuditedEvent]:
    """Look for an explanation of each event; `answers` holds the audited system's answers.

    The cheap clauses come first: an event is asked about only until it is explained.
    """
    if not events:
        return []
    explained: dict[int, Explanation] = {}
    for index, event in enumerate(events):
        reporter.progress(f"auditing {label}", index, len(events))
        answer = answers[event.request_id]
        if _in_records(event, answer, means.records):
            explained[index] = "record"
        elif _argmax_moves(event, answer, means.scorer, settings.prefill_tails):
            explained[index] = "prefill_length"
    reporter.progress(f"auditing {label}", len(events), len(events))
    if means.probe is not None:
        for done, offset in enumerate(settings.probe_offsets):
            reporter.progress(f"probing stock at {label}", done, len(settings.probe_offsets))
            open_events = [(i, e) for i, e in enumerate(events) if i not in explained]
            explained.update(
                _probe(open_events, answers, means.probe, offset, event_margin_nats, settings)
            )
        total = len(settings.probe_offsets)
        reporter.progress(f"probing stock at {label}", total, total)
    return [AuditedEvent(event, explained.get(i)) for i, event in enumerate(events)]


def _in_records(
    event: Event, answer: OutputRecord, records: Sequence[Mapping[str, OutputRecord]]
) -> bool:
    end = event.position + 1
    for record in records:
        other = record.get(event.request_id)
        if (
            other is not None
            and other.prompt_ids == answer.prompt_ids
            and other.output_ids[:end] == answer.output_ids[:end]
        ):
            return True
    return False


def _argmax_moves(event: Event, answer: OutputRecord, scorer: Scorer, tails: Sequence[int]) -> bool:
    """Whether the scorer prefers another token than before at some other prefill length.

    Scored from the prompt's end each time: starting at the event would let the server answer
    from states that it cached at the full length.
    """
    start = len(answer.prompt_ids)
    for tail in tails:
        kept = answer.output_ids[: event.position + 1 + tail]
        if len(kept) == len(answer.output_ids):
            continue  # the length it was scored at before
        scores = scorer.score((*answer.prompt_ids, *kept), start)
        if int(scores.argmax_ids[event.position]) != event.argmax_id:
            return True
    return False


def _probe(
    events: Sequence[tuple[int, Event]],
    answers: Mapping[str, OutputRecord],
    probe: StockProbe,
    offset: int,
    event_margin_nats: float,
    settings: TokenForceSettings,
) -> dict[int, Explanation]:
    """Let stock decode from `offset` tokens before each event; explanations by event index."""
    # Starting at the prompt is the longest path there is; do not ask for it twice.
    shorter = [other for other in settings.probe_offsets if other < offset]
    useful = [
        (index, event)
        for index, event in events
        if event.position > max(shorter, default=-1) or not shorter
    ]
    requests = []
    for index, event in useful:
        answer = answers[event.request_id]
        steps = min(offset, event.position)
        requests.append(
            GenerateRequest(
                request_id=f"{event.request_id} event {index}",
                input_ids=(*answer.prompt_ids, *answer.output_ids[: event.position - steps]),
                max_new_tokens=steps + 1,
                top_logprobs=settings.margin_top,
            )
        )
    if not requests:
        return {}
    # A batch as large as the audited one: stock's rounding depends on it.
    copies = -(-settings.probe_concurrency // len(requests))
    replies = probe.generate_many(requests * copies, concurrency=settings.probe_concurrency)
    found: dict[int, Explanation] = {}
    for (index, event), request, reply in zip(
        useful * copies, requests * copies, replies, strict=True
    ):
        steps = request.max_new_tokens - 1
        path = answers[event.request_id].output_ids[event.position - steps : event.position]
        explanation = _read_probe(event, path, reply, event_margin_nats)
        if explanation is not None:
            found.setdefault(index, explanation)
    return found


def _read_probe(
    event: Event, path: tuple[int, ...], reply: Generation, event_margin_nats: float
) -> Explanation | None:
    steps = len(path)
    if len(reply.output_ids) <= steps or reply.output_ids[:steps] != path:
        return None  # stock left the answer's text before the event
    if reply.output_ids[steps] == event.token_id:
        return "path"
    if reply.top_logprobs is None or not reply.top_logprobs[steps]:
        return None
    row = reply.top_logprobs[steps]
    best = max(entry.logprob for entry in row)
    for entry in row:
        if entry.token_id == event.token_id and best - entry.logprob <= event_margin_nats:
            return "margin"
    return None
