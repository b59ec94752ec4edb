"""The committed recordings: small, of the shipped models, true to live decoding, and quick."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.ceiling.step_times import load_step_times
from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.hashing import sha256_folder
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.replay.run import replay, replay_accept_lengths
from specpilot_cli.schema.deployment import (
    of_curve,
    of_profile,
    of_recording,
    projected_because,
)
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.schema.step_profile import StepProfile

BLOCKS = (8, 12, 16)
MAX_NEW_TOKENS = 60
MOST_PARTED = 1  # requests whose output parts at a near-tie of the target; 0 or 1 were seen
NO_TORCH = """
import resource, sys
for name in ("torch", "triton", "cupy", "cuda", "transformers", "sglang"):
    sys.modules[name] = None
from specpilot_cli.main import main
code = main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def recordings(demo: Any) -> dict[int, LatticeRecording]:
    folder = demo.root / "recordings"
    return {block: read_lattice(folder / f"block-{block}.safetensors") for block in BLOCKS}


def test_they_are_small_and_of_the_shipped_models(
    demo: Any, recordings: dict[int, LatticeRecording]
) -> None:
    files = list((demo.root / "recordings").iterdir())
    assert {path.name for path in files} == {f"block-{b}.safetensors" for b in BLOCKS}
    assert sum(path.stat().st_size for path in files) <= 3_000_000
    hashes = sha256_folder(demo.target), sha256_folder(demo.drafter)
    outputs = {tuple(rec.output_ids.tolist()) for rec in recordings.values()}
    assert len(outputs) == 1  # one greedy output whatever the block
    for block, rec in recordings.items():
        metadata = rec.metadata
        assert (metadata.target_sha256, metadata.drafter_sha256) == hashes
        assert (metadata.mode, metadata.block, rec.n_positions) == ("dense", block, block - 1)
        kinds = [request.benchmark for request in metadata.requests]
        assert len(kinds) == len(set(kinds)) == 8


@pytest.mark.parametrize(("block", "nodes"), [(8, 32), (12, 16), (12, 63), (16, 8), (16, 63)])
def test_live_decoding_commits_what_they_predict(
    engine: ReferenceEngine,
    demo: Any,
    recordings: dict[int, LatticeRecording],
    block: int,
    nodes: int,
) -> None:
    rec = recordings[block]
    requests = [
        GenerateRequest(str(index), tuple(rec.prompt(index).tolist()), MAX_NEW_TOKENS)
        for index in range(rec.n_requests)
    ]
    results = engine.generate(requests, spec=SpecConfig("tree", block, nodes))
    predicted = replay_accept_lengths(rec, "best-first", nodes)
    parted = 0
    for index, (result, lengths) in enumerate(zip(results, predicted, strict=True)):
        if list(result.output_ids) != rec.output(index).tolist():
            parted += 1
            continue
        left, live = len(result.output_ids) - 1, []
        for accepted in result.accept_lengths:
            live.append(min(accepted + 1, left))
            left -= live[-1]
        assert live == lengths.tolist(), rec.metadata.requests[index].request_id
    assert parted <= MOST_PARTED


def test_a_deeper_block_and_more_nodes_accept_more(
    recordings: dict[int, LatticeRecording],
) -> None:
    taus = {block: replay(rec, nodes=[8, 63]) for block, rec in recordings.items()}
    for result in taus.values():
        best, oracle = result.curve("best-first"), result.row("oracle", None).tau.value
        assert best[8] < best[63] <= oracle
        assert result.row("marginal", 63).tau.value < best[63]
    assert taus[8].row("oracle", None).tau.value < taus[16].row("oracle", None).tau.value


def test_the_measurement_covers_every_setting_and_leaves_nothing_unexplained(repo: Path) -> None:
    path = repo / "docs/measurements/replay_live_demo.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    settings = {(row["block"], row["policy"], row["nodes"]) for row in results["settings"]}
    trees = {(block, "best-first", nodes) for block in BLOCKS for nodes in (8, 16, 32, 63)}
    assert settings == trees | {(block, "chain", block - 1) for block in BLOCKS}
    for row in results["settings"]:
        assert row["equal_steps"] == row["compared_steps"] > 60
        assert row["equal_requests"] + len(row["differences"]) == row["requests"] == 8
        assert row["packed_equals_unpacked"]
        assert all(difference["explained"] for difference in row["differences"])


def test_the_step_profile_and_the_step_times_are_of_the_recorded_pair(
    demo: Any, recordings: dict[int, LatticeRecording]
) -> None:
    """So that README's first step projects nothing."""
    step = read_json_model(demo.root / "step.json", StepProfile)
    curve = load_step_times("demo-cpu")
    for timed in (of_profile(step), of_curve(curve)):
        assert projected_because(of_recording(recordings[16].metadata), timed, what="x") == ()
    assert {point.draft_block for point in curve.points} == {16}
    assert (step.mode, step.draft_block, step.requests) == ("chain", 8, 1)
    assert step.tau == replay(recordings[8], ["chain"]).rows[0].tau.value
    assert step.device == curve.device
    # a row more never made a step much cheaper: the machine was not busy with something else
    for before, after in pairwise(curve.points):
        assert after.step_s > 0.95 * before.step_s


_MODEL = ("--target", "qwen3.8-27b", "--drafter", "qwen3.8-27b-dflash2", "--gpu", "h200")


@pytest.mark.parametrize(
    ("block", "command", "extra"),
    [
        *((block, "replay", []) for block in BLOCKS),
        (16, "replay", ["--calibrate"]),
        (16, "replay", ["--json", "--nodes", "1-63"]),
        *((block, "ceiling", [*_MODEL, "--lattices"]) for block in BLOCKS),
        (16, "replay", ["--step-times", "demo-cpu"]),
        (16, "ceiling", ["recipes/demo-cpu/step.json", "--step-times", "demo-cpu", "--lattices"]),
    ],
)
def test_commands_need_neither_torch_nor_five_seconds(
    demo: Any, repo: Path, block: int, command: str, extra: list[str]
) -> None:
    path = str(demo.root / f"recordings/block-{block}.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, command, *extra, path, "-q"],
        capture_output=True, text=True, check=True, timeout=300, cwd=repo,
    )  # fmt: skip
    assert done.stdout
    assert float(done.stderr.splitlines()[-1]) < 5.0  # processor seconds: the machine may be busy
