"""Trees with a DSPARK drafter in the real SGLang, on a CPU, in float32 as in `test_tree.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specpilot_cli.replay.run import replay_accept_lengths
from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin, TreePlugin
from tests.sglang.cpu_engine.jobs import Done, Job, recording, run_jobs
from tests.sglang.cpu_engine.models import BLOCK, TinyPair, build_dspark_drafter
from tests.sglang.test_tree import NEW_TOKENS, REQUESTS, cut

pytestmark = [pytest.mark.slow, pytest.mark.extended]

ROWS = BLOCK + 1  # the drafted tokens and the one before them
TREES = {
    scoring: TreePlugin(drafter="DSPARK", block=ROWS, nodes=16, scoring=scoring)
    for scoring in ("conditional", "marginal")
}
ENVIRONMENT = {"SGLANG_DSPARK_STACKED_CTX_KV": "0"}  # a Triton kernel


@pytest.fixture(scope="module")
def done(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """Plain decoding, a dense recording, and the trees."""
    folder = tmp_path_factory.mktemp("dspark-tree")
    pair = replace(tiny_pair, drafter=build_dspark_drafter(tiny_pair.drafter, folder / "drafter"))
    drafter = ("--speculative-draft-model-path", str(pair.drafter))
    chain = ("--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens", str(ROWS))
    tree = ("--speculative-algorithm", "SPECPILOT_TREE", *drafter)
    recorder = PluginConfig(recorder=RecorderPlugin(mode="dense", folder=str(folder / "dense")))
    jobs = [
        Job("plain", REQUESTS),
        Job("dense", REQUESTS, (*chain, *drafter), recorder, ENVIRONMENT),
        *(Job(name, REQUESTS, tree, PluginConfig(tree=one), ENVIRONMENT)
          for name, one in TREES.items()),
    ]  # fmt: skip
    return run_jobs(pair, jobs, folder / "log")


@pytest.mark.parametrize("name", TREES)
def test_outputs_are_those_of_plain_decoding(done: dict[str, Done], name: str) -> None:
    assert done[name].outputs == done["plain"].outputs


@pytest.mark.parametrize("name", TREES)
def test_every_step_is_the_replays(done: dict[str, Done], name: str) -> None:
    assert done["dense"].outputs == done["plain"].outputs
    found = recording(REQUESTS, done["dense"])
    policy = "best-first" if name == "conditional" else "marginal"
    replayed = replay_accept_lengths(found, policy, TREES[name].nodes)
    served = [done[name].answers[request["rid"]].accepted for request in REQUESTS]
    assert [cut(steps) for steps in served] == [tuple(steps.tolist()) for steps in replayed]
    assert len(REQUESTS) * (NEW_TOKENS - 1) / sum(map(len, served)) > 1.3
