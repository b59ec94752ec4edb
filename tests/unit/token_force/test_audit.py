"""Which events stock's own numerics explain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from specpilot_cli.engines.base import ForcedScores, Generation, TokenLogprob
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.audit import (
    AuditMeans,
    Event,
    audit,
    find_events,
    sample_events,
)
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.scorer import ScoredOutput

PROMPT = (90, 91)
OUTPUT = tuple(range(100))  # token t at position t
POSITION = 40
LIMIT = 0.5


def record(output=OUTPUT, name="r", prompt=PROMPT):
    return OutputRecord(
        request_id=name, benchmark="b", prompt_ids=prompt, output_ids=output, finish_reason="length"
    )


EVENT = Event("system", "r", "b", POSITION, POSITION, 7, 1.4)


@dataclass
class FixedScorer:
    """Prefers token 7 at the event, except at the prefill lengths in `moves`."""

    moves: tuple[int, ...] = ()
    position: int = POSITION
    lengths: list[int] = field(default_factory=list)

    def score(self, input_ids, start):
        n = len(input_ids) - start
        assert start == len(PROMPT)
        self.lengths.append(n)
        argmax = np.array(input_ids[start:], dtype=np.int64)
        if n > self.position:
            argmax[self.position] = 8 if n in self.moves else 7
        return ForcedScores(np.full(n, -2.0), argmax, np.full(n, -1.0))


@dataclass
class Stock:
    """Continues a prefix as the answer does; at the event it emits `emits`."""

    emits: int = 7
    position: int = POSITION
    token_logprob: float | None = None
    leaves_early: bool = False
    asked: list = field(default_factory=list)

    def generate_many(self, requests, *, concurrency):
        self.asked.append([(len(r.input_ids) - len(PROMPT), r.max_new_tokens) for r in requests])
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        start = len(request.input_ids) - len(PROMPT)
        ids = [self._token(t) for t in range(start, start + request.max_new_tokens)]
        row = [TokenLogprob(self.emits, -0.1)]
        if self.token_logprob is not None:
            row.append(TokenLogprob(POSITION, self.token_logprob))
        return Generation(
            request.request_id, tuple(ids), "length", len(request.input_ids), len(ids), None,
            0.0, 0.1, 0.2, top_logprobs=tuple(tuple(row) for _ in ids),
        )  # fmt: skip

    def _token(self, position):
        if position == self.position:
            return self.emits
        return 99 if self.leaves_early and position == self.position - 1 else position


def explain(*, scorer=None, probe=None, records=(), event=EVENT, at_once=1, **settings):
    means = AuditMeans(scorer or FixedScorer(), tuple({"r": r} for r in records), probe)
    (done,) = audit(
        [event],
        {"r": record()},
        means,
        LIMIT,
        TokenForceSettings(probe_concurrency=at_once, **settings),
        label="events",
    )
    return done.explanation


def test_nothing_explains_a_token_that_only_the_system_emits():
    assert explain(probe=Stock(), records=[record((*OUTPUT[:POSITION], 7))]) is None


def test_a_recorded_answer_with_the_same_text_up_to_the_token_explains_it():
    assert explain(records=[record(OUTPUT[: POSITION + 1])]) == "record"


def test_the_same_token_after_other_text_explains_nothing():
    other = (1, *OUTPUT[1:])
    assert explain(records=[record(other)]) is None
    assert explain(records=[record(prompt=(1, 2))]) is None


@pytest.mark.parametrize("length", [POSITION + 1, POSITION + 1 + 20])
def test_an_argmax_that_moves_with_the_prefill_length_explains_the_event(length):
    scorer = FixedScorer(moves=(length,))
    assert explain(scorer=scorer, prefill_tails=(0, 20)) == "prefill_length"


def test_the_full_length_is_not_scored_again():
    scorer = FixedScorer()
    explain(scorer=scorer, prefill_tails=(0, 20, 64))  # 40 + 1 + 64 is past the end
    assert scorer.lengths == [41, 61]
    scorer.lengths.clear()
    explain(scorer=scorer, prefill_tails=(59,))
    assert scorer.lengths == []


def test_stock_that_emits_the_token_on_its_own_path_explains_it():
    stock = Stock(emits=POSITION)
    assert explain(probe=stock, probe_offsets=(4,)) == "path"
    assert stock.asked == [[(36, 5)]]


def test_stocks_own_margin_explains_a_token_it_nearly_emitted():
    assert explain(probe=Stock(token_logprob=-0.6)) == "margin"  # exactly 2δ below
    assert explain(probe=Stock(token_logprob=-0.601)) is None


def test_a_path_that_left_the_text_earlier_explains_nothing():
    stock = Stock(emits=POSITION, leaves_early=True)
    assert explain(probe=stock, probe_offsets=(4,)) is None


def test_an_early_event_is_probed_from_the_prompt_once():
    stock = Stock(position=2)
    event = Event("system", "r", "b", 2, 2, 7, 1.4)
    scorer = FixedScorer(position=2)
    assert explain(scorer=scorer, probe=stock, probe_offsets=(0, 4, 32), event=event) is None
    assert stock.asked == [[(2, 1)], [(0, 3)]]


def test_an_explained_event_is_not_probed_again():
    stock = Stock(emits=POSITION)
    explain(probe=stock, probe_offsets=(0, 4, 32))
    assert len(stock.asked) == 1


def test_events_are_mismatches_beyond_twice_delta():
    margins = np.array([0.0, 0.3, 0.5, 0.500001, 2.0])
    scores = ForcedScores(-margins, np.arange(5) + 50, np.zeros(5))
    found = find_events([ScoredOutput(record(OUTPUT[:5]), scores)], LIMIT, system="system")
    assert [event.position for event in found] == [3, 4]
    assert [event.argmax_id for event in found] == [53, 54]


def test_the_sample_is_uniform_over_events_and_repeatable():
    events = [Event("system", f"r{i}", "b", 0, 0, 1, 1.0) for i in range(1000)]
    hits = np.zeros(1000)
    for seed in range(400):
        for event in sample_events(events, 200, seed):
            hits[int(event.request_id[1:])] += 1
    # Binomial(400, 0.2): mean 80, sd 8; the extremes of 1,000 lie within 5 sd.
    assert hits.min() > 40
    assert hits.max() < 120
    assert sample_events(events, 200, 5) == sample_events(events, 200, 5)
    assert len(sample_events(events[:20], 200, 0)) == 20
