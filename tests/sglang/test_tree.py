"""Draft trees in the real SGLang, on a CPU: the target's own outputs, and the steps of a replay.

All engines run in one process, one after the other (`cpu_engine/in_process.py`), in float32, where
a token's logits do not depend on how many rows are computed with it beyond a few last bits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from specpilot_cli.replay.run import replay_accept_lengths
from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin, TreePlugin
from tests.sglang.cpu_engine.jobs import DENSE, Done, Job, recording, run_jobs
from tests.sglang.cpu_engine.models import LIVELY, TinyPair

pytestmark = pytest.mark.slow

NEW_TOKENS = 40
N_PROMPTS = 6
MOST_APART = 1e-4  # nats, in float32
_RANDOM = random.Random(5)
REQUESTS: list[dict[str, Any]] = [
    {
        "rid": f"r{number}",
        "input_ids": _RANDOM.choices(LIVELY, k=_RANDOM.randrange(4, 9)),
        "max_new_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "logprobs": number == 0,
    }
    for number in range(N_PROMPTS)
]
SHAPES = {  # name -> tree, requests at once
    "b8n8": (TreePlugin(block=8, nodes=8), 1),
    "b8n32m": (TreePlugin(block=8, nodes=32, scoring="marginal"), 4),
    "b16n8": (TreePlugin(block=16, nodes=8), 4),
    "b16n16m": (TreePlugin(block=16, nodes=16, scoring="marginal"), 1),
    "b16n32": (TreePlugin(block=16, nodes=32), 4),
}
ALWAYS = ("b8n32m", "b16n32")
NAMES = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.extended) for name in SHAPES
]

LIFE = TreePlugin(block=8, nodes=16)
TIGHT = 260
"""KV tokens that four requests at once outgrow: one of them has to give way, and comes back."""
STOP = 63
"""A token that most of these outputs contain early on, in the middle of a step."""


def _lives() -> list[dict[str, Any]]:
    """Requests that come while others run, are aborted, or end inside a tree."""
    requests = [{**request, "at": 3 * number} for number, request in enumerate(REQUESTS)]
    requests[1]["abort_at"] = requests[1]["at"] + 7
    later = {"at": 12}
    stop = {"stop_token_ids": [STOP], "ignore_eos": False, **later}
    stopped = [{**request, **stop, "rid": f"stop-{request['rid']}"} for request in REQUESTS]
    warm = {"temperature": 1.0, "top_k": 8, **later}
    sampled = [{**request, **warm, "rid": f"warm-{request['rid']}"} for request in REQUESTS[:2]]
    return [*requests, *sampled, *stopped]


def _prefixed() -> list[dict[str, Any]]:
    """Requests that begin alike, one after the other and then together, and the first again."""
    shared = 5 * REQUESTS[0]["input_ids"]
    places = [0, 30, 60, 60, 60, 60, 140]
    endings = [*(request["input_ids"] for request in REQUESTS), REQUESTS[0]["input_ids"]]
    return [
        {**REQUESTS[0], "rid": f"p{number}", "input_ids": [*shared, *ending], "at": place}
        for number, (ending, place) in enumerate(zip(endings, places, strict=True))
    ]


def _speculative(pair: TinyPair, algorithm: str) -> tuple[str, ...]:
    drafter = ("--speculative-draft-model-path", str(pair.drafter))
    return ("--speculative-algorithm", algorithm, *drafter)


@pytest.fixture(scope="module")
def done(
    tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Done]:
    """Every engine's answers."""
    extended = request.config.getoption("--extended")
    folder = tmp_path_factory.mktemp("tree")
    jobs = [Job("ar", [*REQUESTS, *_lives()[-N_PROMPTS:], *_prefixed()])]
    for block in (8, 16):
        recorder = RecorderPlugin(mode="dense", folder=str(folder / f"dense{block}"))
        words = (*_speculative(tiny_pair, "DFLASH"), "--speculative-num-draft-tokens", str(block))
        jobs.append(Job(f"dense{block}", REQUESTS, words, PluginConfig(recorder=recorder), DENSE))
    for name, (tree, running) in SHAPES.items():
        if name not in ALWAYS and not extended:
            continue
        words = _speculative(tiny_pair, "SPECPILOT_TREE")
        jobs.append(Job(name, REQUESTS, words, PluginConfig(tree=tree), running=running))
    words, plugin = _speculative(tiny_pair, "SPECPILOT_TREE"), PluginConfig(tree=LIFE)
    jobs.append(Job("life", _lives(), words, plugin))
    jobs.append(Job("tight", _prefixed(), words, plugin, tokens=TIGHT, radix=True))
    return run_jobs(tiny_pair, jobs, folder / "log")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_plain_decoding(done: dict[str, Done], name: str) -> None:
    plain = done["ar"].outputs
    assert done[name].outputs == {rid: plain[rid] for rid in done[name].outputs}
    assert all(len(output) == NEW_TOKENS for output in done[name].outputs.values())


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_plain_decoding(done: dict[str, Done], name: str) -> None:
    ours, theirs = (done[job].answers["r0"].logprobs for job in (name, "ar"))
    assert len(ours) == NEW_TOKENS
    assert max(theirs) < 0
    assert ours == pytest.approx(theirs, abs=MOST_APART)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_the_replays(done: dict[str, Done], name: str) -> None:
    """Same lattice, same tree, same accepted path: step by step what `specpilot replay` says."""
    tree, _ = SHAPES[name]
    dense = done[f"dense{tree.block}"]
    assert dense.outputs == done[name].outputs
    found = recording(REQUESTS, dense)
    policy = "best-first" if tree.scoring == "conditional" else "marginal"
    replayed = replay_accept_lengths(found, policy, tree.nodes)
    served = [done[name].answers[request["rid"]].accepted for request in REQUESTS]
    assert [cut(steps) for steps in served] == [tuple(steps.tolist()) for steps in replayed]
    tokens = sum(len(steps) for steps in served)
    assert 1.3 < N_PROMPTS * (NEW_TOKENS - 1) / tokens < tree.block


def cut(steps: tuple[int, ...]) -> tuple[int, ...]:
    """Without what the last step committed beyond the request's end."""
    left, kept = NEW_TOKENS - 1, []
    for step in steps:
        kept.append(min(step, left))
        left -= kept[-1]
    return tuple(kept)


@pytest.mark.parametrize("name", NAMES)
def test_the_plugin_says_what_it_serves(done: dict[str, Done], name: str) -> None:
    tree, _ = SHAPES[name]
    state = done[name].state
    assert state is not None
    assert state["problems"] == []
    facts = state["active"]["tree"]
    for key in ("nodes", "block", "scoring", "rows", "depth"):
        assert facts[key] == getattr(tree, key)
    assert facts["steps"] == sum(len(a.accepted) for a in done[name].answers.values())


def test_requests_come_go_and_stop_as_with_plain_decoding(done: dict[str, Done]) -> None:
    """One is aborted in mid-step, others arrive meanwhile, or stop at a token inside a tree."""
    life, plain = done["life"], done["ar"]
    for request in REQUESTS:
        rid = request["rid"]
        ours, theirs = life.answers[rid], plain.answers[rid].output_ids
        if rid == "r1":
            assert ours.finish == "abort"
            assert 1 < len(ours.output_ids) < NEW_TOKENS
        assert ours.output_ids == theirs[: len(ours.output_ids)]
        stopped = life.answers[f"stop-{rid}"]
        assert stopped.output_ids == plain.answers[f"stop-{rid}"].output_ids
        assert stopped.finish == plain.answers[f"stop-{rid}"].finish
    inside = [  # the last step accepted more than up to the stop token
        sum(answer.accepted) > len(answer.output_ids) - 1
        for rid, answer in life.answers.items()
        if answer.finish == "stop"
    ]
    assert any(inside)


def test_sampled_requests_beside_greedy_ones_are_complete(done: dict[str, Done]) -> None:
    """Their tokens are drawn, so only what must hold of any draw can be said."""
    for rid, answer in done["life"].answers.items():
        if rid.startswith("warm-"):
            assert len(answer.output_ids) == NEW_TOKENS
            assert answer.finish == "length"


def test_prefixes_are_reused_and_requests_resumed(done: dict[str, Done]) -> None:
    """The prefix cache is on, and its pool too small for all requests at once."""
    tight, plain = done["tight"], done["ar"]
    for rid, answer in tight.answers.items():
        assert answer.output_ids == plain.answers[rid].output_ids
    assert sum(answer.cached for answer in tight.answers.values()) > 100
    assert any(answer.retractions for answer in tight.answers.values())
