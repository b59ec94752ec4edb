"""Every deliberate fault does what it says, where it says, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.faults import (
    FAULTS,
    Fault,
    KvSlotFault,
    LogitFault,
    PrecisionFault,
    StaleStateFault,
    TemperatureFault,
    WrongIdFault,
    parse_fault,
)
from specpilot_cli.errors import InputError

Requests = Callable[..., list[GenerateRequest]]
NEW = 40


def outputs(
    pair: Any, fault: Fault | None, requests: list[GenerateRequest], mode: str = "tree", n: int = 4
) -> list[tuple[int, ...]]:
    return [r.output_ids for r in pair.engine(mode, fault=fault).generate(requests, concurrency=n)]


@pytest.mark.parametrize(
    "fault",
    [
        LogitFault(3, 5, -1.5), PrecisionFault(2), WrongIdFault(0.25, 9), KvSlotFault(12),
        StaleStateFault(), TemperatureFault(0.25, 3, 4),
    ],
    ids=lambda fault: fault.name,
)  # fmt: skip
def test_what_a_server_is_started_with_reads_back(fault: Fault) -> None:
    assert parse_fault(fault.argument) == fault
    assert FAULTS[fault.name] is type(fault)
    assert fault.describe()["kind"].replace("_", "-") == fault.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gremlin", "unknown fault"),
        ("kv-slot:before=3", "has no `before`"),
        ("kv-slot:after=soon", "not a number"),
        ("logit-bias", "lacks a value"),
        ("low-precision:mantissa_bits=9", "0 to 7"),
        ("wrong-id:rate=0", "rate"),
        ("temperature:temperature=0", "temperature"),
        ("logit-bias:after=0,bias=nan", "finite"),
    ],
)
def test_a_fault_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_fault(text)


def test_low_precision_rounds_to_nearest_and_spares_prefill(pair: Any) -> None:
    engine = pair.engine("ar", fault=PrecisionFault(3))
    exact = pair.engine("ar")
    weight = exact.model.layers[0].mlp.gate_proj.weight
    rounded = engine._verifier.layers[0].mlp.gate_proj.weight
    # 3 mantissa bits: at most 2^-4 away, relative, and every value has no more bits than that
    assert float(((rounded - weight).abs() / weight.abs()).max()) <= 2.0**-4
    mantissa, _ = torch.frexp(rounded)
    assert torch.equal((mantissa * 16).round(), mantissa * 16)
    assert torch.equal(engine.model.layers[0].mlp.gate_proj.weight, weight)


def test_low_precision_spares_the_token_of_prefill(pair: Any, requests_of: Requests) -> None:
    clean, faulty = (outputs(pair, f, requests_of(3)) for f in (None, PrecisionFault(1)))
    assert clean != faulty
    assert [ids[0] for ids in clean] == [ids[0] for ids in faulty]


def test_each_wrong_id_is_one_token_after_which_decoding_goes_on(
    pair: Any, requests_of: Requests
) -> None:
    """Every token but the struck ones is the argmax of what came before it."""
    fault = WrongIdFault(0.05, seed=2)
    requests = requests_of(4)
    engine = pair.engine("chain", fault=fault)
    struck = wrong = 0
    for request, result in zip(requests, engine.generate(requests, concurrency=2), strict=True):
        armed = fault.armed(request.input_ids, request.max_new_tokens)
        scores = engine.score([*result.prompt_ids, *result.output_ids], len(request.input_ids) - 1)
        best = np.array([row[0] for row in scores.top_logprobs])
        off = np.flatnonzero(best - np.array(scores.logprobs) > 1e-3)
        struck += len(armed)
        wrong += len(off)
        # the end of the step that holds an armed position, so not before it and within a block
        assert all(any(at <= position < at + 8 for at in armed) for position in off)
    assert 0 < wrong <= struck
    assert wrong >= struck - 2  # two in one step are one wrong id


def test_wrong_ids_strike_the_same_text_from_wherever_it_is_resumed() -> None:
    fault = WrongIdFault(0.01, seed=3)
    prompt = tuple(range(20, 60))
    whole = fault.armed(prompt, 1000)
    resumed = fault.armed((*prompt, *range(300)), 700)
    assert [at - 300 for at in whole if at >= 300] == list(resumed)
    assert fault.armed(prompt, 1000) != WrongIdFault(0.01, seed=4).armed(prompt, 1000)
    rates = [len(WrongIdFault(0.01, seed=s).armed(prompt, 1000)) for s in range(200)]
    assert 9.0 < float(np.mean(rates)) < 11.0  # ten expected; the mean's error is 0.22


def test_kv_slots_are_off_only_from_the_given_slot_on(pair: Any, requests_of: Requests) -> None:
    requests = requests_of(3)
    clean = outputs(pair, None, requests)
    for after in (0, 30):
        faulty = outputs(pair, KvSlotFault(after), requests)
        assert faulty != clean
        for request, one, other in zip(requests, clean, faulty, strict=True):
            before = max(1, after - len(request.input_ids))
            assert one[:before] == other[:before]
    assert outputs(pair, KvSlotFault(1000), requests) == clean


def test_a_stale_state_needs_a_rejected_draft(pair: Any, requests_of: Requests) -> None:
    requests = requests_of(3)
    assert outputs(pair, StaleStateFault(), requests, "ar") == outputs(pair, None, requests, "ar")
    assert outputs(pair, StaleStateFault(), requests) != outputs(pair, None, requests)


def test_temperature_leaks_in_at_its_batch_alone(pair: Any, requests_of: Requests) -> None:
    requests = [replace(r, input_ids=r.input_ids[:5]) for r in requests_of(4)]
    fault = TemperatureFault(1.0, at_running=4)
    clean = outputs(pair, None, requests, n=1)
    assert outputs(pair, fault, requests, n=3) == outputs(pair, None, requests, n=3)
    assert outputs(pair, fault, requests, n=4) != clean


def test_noise_samples_the_softmax(pair: Any, requests_of: Requests) -> None:
    """The argmax of the noisy logits has the probabilities of softmax(logits / T)."""

    logits = torch.tensor([0.0, 0.5, -0.5]).repeat(4000, 1)
    slot: Any = SimpleNamespace(output_ids=[])
    TemperatureFault(0.5, at_running=1).distort(logits, [slot], [None])
    found = torch.bincount(logits.argmax(-1), minlength=3) / 4000
    expected = torch.softmax(torch.tensor([0.0, 1.0, -1.0]), 0)
    assert torch.allclose(found, expected, atol=0.03)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_no_fault_reaches_a_score(pair: Any, name: str) -> None:
    text = f"{name}:after=0" if name in ("logit-bias", "kv-slot") else name
    ids = list(range(1, 30))
    faulty = pair.engine("ar", fault=parse_fault(text)).score(ids)
    assert faulty.logprobs == pair.engine("ar").score(ids).logprobs
