"""Dense lattices of DSPARK in the real SGLang, on a CPU; its drafts and outputs stay its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.replay.run import replay_accept_lengths
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin
from specpilot_cli.schema.prompts import Prompt
from tests.sglang.cpu_engine.models import BLOCK, TinyPair, build_dspark_drafter
from tests.sglang.cpu_engine.server import CpuServer, start_together

pytestmark = [pytest.mark.slow, pytest.mark.extended]

PROMPTS = [
    Prompt(request_id=f"r{number}", benchmark="tiny", text=text, max_new_tokens=32)
    for number, text in enumerate(("def add(a, b):", "Once upon", "1, 2, 3,", "key: value"))
]
# As in test_real_engine.py: rounding may flip a near-tie where other rows are verified.
LEAST_EQUAL = len(PROMPTS) // 2


def _servers(pair: TinyPair, folder: Path) -> list[ServerProcess]:
    dspark = replace(pair, drafter=build_dspark_drafter(pair.drafter, folder / "dspark"))
    return [
        CpuServer(
            mode,
            plugin=PluginConfig(recorder=RecorderPlugin(mode=mode, folder=str(folder / mode))),
            arguments=(
                "--speculative-algorithm", "DSPARK", "--speculative-num-draft-tokens",
                str(BLOCK + 1),
            ),
            environment={"SGLANG_DSPARK_STACKED_CTX_KV": "0"},  # a Triton kernel
        ).process(dspark, folder)
        for mode in ("dense", "anchored")
    ]  # fmt: skip


def test_dense_lattices_replay_to_the_steps_that_dspark_takes(
    tiny_pair: TinyPair,
    specpilot_json: Callable[..., tuple[int, dict[str, Any]]],
    prompt_file: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Eq. 1's edges explain stock's chain, and forced rejections leave the outputs as they are."""
    outputs: dict[str, list[OutputRecord]] = {}
    with ExitStack() as stack:
        servers = _servers(tiny_pair, tmp_path)
        start_together(stack, servers)
        for mode, server in zip(("dense", "anchored"), servers, strict=True):
            lattice, answers = tmp_path / f"{mode}.safetensors", tmp_path / f"{mode}.jsonl"
            code, answer = specpilot_json(
                "record", "--url", server.base_url, "--prompts", prompt_file(PROMPTS),
                "-o", lattice, "--outputs", answers, "--concurrency", 2, "--quiet",
            )  # fmt: skip
            assert code == 0
            results = answer["results"]["server"]
            assert (results["algorithm"], results["dropped"]) == ("DSPARK", [])
            assert 0 < results["stock_outside_ratio"] < 1
            outputs[mode] = list(read_jsonl(answers, OutputRecord))
    dense, anchored = (read_lattice(tmp_path / f"{m}.safetensors") for m in ("dense", "anchored"))
    assert dense.n_positions == anchored.n_positions == BLOCK
    assert dense.n_steps == sum(len(output.output_ids) - 1 for output in outputs["dense"])
    replayed = replay_accept_lengths(dense, "chain")
    pairs = [
        (len(lengths), served.verify_steps)
        for lengths, mine, served in zip(
            replayed, outputs["dense"], outputs["anchored"], strict=True
        )
        if mine.output_ids == served.output_ids
    ]
    assert len(pairs) >= LEAST_EQUAL
    ours, theirs = (sum(steps or 0 for steps in column) for column in zip(*pairs, strict=True))
    assert ours == pytest.approx(theirs, rel=0.1)
    counts = np.bincount(anchored.step_request, minlength=len(PROMPTS)).tolist()
    assert counts == [output.verify_steps for output in outputs["anchored"]]
