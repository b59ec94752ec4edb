"""Trees on a target with recurrent layers: the demo pair in the real SGLang, on a CPU.

Its layers' prefills and decode steps are stand-ins in PyTorch (`cpu_engine/site/sgl_kernel`), the
verify passes and commits are specpilot's, in their reference form. All is in BF16, so an output may
leave another one at a near-tie: every token is judged by the float32 target instead, and steps are
held against the recordings of the reference engine where the outputs are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.replay.run import replay_accept_lengths
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.schema.plugin_config import PluginConfig, TreePlugin
from tests.sglang.cpu_engine.jobs import Done, Job, run_jobs
from tests.sglang.cpu_engine.models import TinyPair
from tests.sglang.cpu_engine.server import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.extended]

TREES = {"b8n16": TreePlugin(block=8, nodes=16), "b16n32": TreePlugin(block=16, nodes=32)}
CACHING = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64",
           "--max-mamba-cache-size", "24")  # fmt: skip
MOST_REGRET = 0.25
"""Nats by which the float32 target may prefer another token: a BF16 logit is off by up to 0.06."""
LEAST_EQUAL = 0.25
TAU_TOLERANCE = 0.05


@pytest.fixture(scope="module")
def recordings(repo: Path) -> dict[int, LatticeRecording]:
    """Of the same prompts, by block."""
    folder = repo / "recipes/demo-cpu/recordings"
    return {block: read_lattice(folder / f"block-{block}.safetensors") for block in (8, 16)}


@pytest.fixture(scope="module")
def requests(recordings: dict[int, LatticeRecording]) -> list[dict[str, Any]]:
    """The recorded ones."""
    recorded = recordings[8]
    return [
        {
            "rid": request.request_id,
            "input_ids": recorded.prompt(number).tolist(),
            "max_new_tokens": len(recorded.output(number)),
            "ignore_eos": True,
        }
        for number, request in enumerate(recorded.metadata.requests)
    ]


@pytest.fixture(scope="module")
def done(
    repo: Path, requests: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    """Plain decoding, the trees, and requests that are aborted or begin alike."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: scripts/test.sh sets it up")
    folder = tmp_path_factory.mktemp("hybrid")
    pair = TinyPair(repo / "recipes/demo-cpu/target", repo / "recipes/demo-cpu/drafter")
    words = ("--speculative-algorithm", "SPECPILOT_TREE",
             "--speculative-draft-model-path", str(pair.drafter))  # fmt: skip
    late = [{**request, "rid": f"late-{request['rid']}", "at": 9} for request in requests[2:5]]
    lives = [requests[0], {**requests[1], "abort_at": 4}, *late]
    tree = PluginConfig(tree=TREES["b16n32"])
    jobs = [
        Job("plain", requests, dtype="bfloat16"),
        *(
            Job(name, requests, words, PluginConfig(tree=tree), dtype="bfloat16")
            for name, tree in TREES.items()
        ),
        Job("life", lives, words, tree, dtype="bfloat16"),
        Job("caching", following(requests[0]), (*words, *CACHING), tree, dtype="bfloat16",
            radix=True),
    ]  # fmt: skip
    return run_jobs(pair, jobs, folder / "log")


def following(request: dict[str, Any]) -> list[dict[str, Any]]:
    """A long answer to a short prompt, and requests that go on from within it."""
    first = {**request, "rid": "long", "input_ids": request["input_ids"][:40],
             "max_new_tokens": 150}  # fmt: skip
    later = [
        {"rid": f"later-{keeps}", "follows": "long", "keeps": keeps, "input_ids": [],
         "max_new_tokens": 24, "ignore_eos": True}
        for keeps in (89, 94, 99, 109)  # the first one's next token is the first after those states
    ]  # fmt: skip
    return [first, *later]


@pytest.mark.parametrize("name", ["plain", *TREES])
def test_every_token_is_the_targets_best_up_to_near_ties(
    done: dict[str, Done], requests: list[dict[str, Any]], repo: Path, name: str
) -> None:
    scorer = ReferenceEngine(repo / "recipes/demo-cpu/target", None, dtype="float32")
    for request in requests:
        assert_best(scorer, request["input_ids"], done[name].answers[request["rid"]].output_ids)


def assert_best(scorer: ReferenceEngine, prompt: Sequence[int], output: Sequence[int]) -> None:
    scores = scorer.score([*prompt, *output], len(prompt) - 1, top_k=1)
    for best, ours in zip(scores.top_logprobs, scores.logprobs, strict=True):
        assert best[0] - ours < MOST_REGRET


def test_requests_go_on_from_states_that_were_kept_within_a_step(
    done: dict[str, Done], requests: list[dict[str, Any]], repo: Path
) -> None:
    """The prefix cache has the states after 128 tokens, where no step of the long one ended."""
    answers, (long, *later) = done["caching"].answers, following(requests[0])
    scorer = ReferenceEngine(repo / "recipes/demo-cpu/target", None, dtype="float32")
    before = [*long["input_ids"], *answers["long"].output_ids]
    assert_best(scorer, long["input_ids"], answers["long"].output_ids)
    ends = np.cumsum([len(long["input_ids"]), *answers["long"].accepted])  # each step's last token
    assert 128 not in ends
    for request in later:
        answer = answers[request["rid"]]
        assert answer.cached == 128
        prompt = before[: len(long["input_ids"]) + request["keeps"]]
        assert_best(scorer, prompt, answer.output_ids)


@pytest.mark.parametrize("name", TREES)
def test_tokens_per_step_are_the_replays(
    done: dict[str, Done],
    requests: list[dict[str, Any]],
    recordings: dict[int, LatticeRecording],
    name: str,
) -> None:
    """Of all requests whose outputs are the recorded ones."""
    tree = TREES[name]
    recorded = recordings[tree.block]
    replayed = replay_accept_lengths(recorded, "best-first", tree.nodes)
    steps, expected, tokens, compared = 0, 0, 0, 0
    for number, request in enumerate(requests):
        answer, output = done[name].answers[request["rid"]], recorded.output(number).tolist()
        if list(answer.output_ids) == output:
            compared += 1
            steps, expected = steps + len(answer.accepted), expected + len(replayed[number])
            tokens += len(output) - 1
    assert compared >= LEAST_EQUAL * len(requests)
    assert steps == pytest.approx(expected, rel=TAU_TOLERANCE)
    assert tokens / steps > 2


def test_no_state_is_kept_for_a_row(done: dict[str, Done]) -> None:
    state = done["b16n32"].state
    assert state is not None
    facts = state["active"]["tree"]
    assert facts["kernels"]["recurrent"] == "reference"
    assert 0 < facts["record_bytes"] < facts["snapshot_bytes"] / 2


def test_states_survive_requests_that_come_and_go(
    done: dict[str, Done], requests: list[dict[str, Any]]
) -> None:
    """One is aborted in mid-generation, others take its place and its state's slot."""
    life, alone, aborted = done["life"].answers, done["b16n32"].answers, requests[1]["rid"]
    assert [rid for rid, answer in life.items() if answer.finish == "abort"] == [aborted]
    equal = []
    for rid, answer in life.items():
        other = alone[rid.removeprefix("late-")].output_ids
        if rid == aborted:
            assert 1 < len(answer.output_ids) < len(other)
        equal.append(answer.output_ids == other[: len(answer.output_ids)])
    assert sum(equal) >= len(equal) - 2  # a batch of another size rounds otherwise
