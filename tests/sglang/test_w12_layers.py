"""W12 on SGLang's own layers and loaders, for one, two and four tensor-parallel ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.cpu_engine.models import TinyPair
from tests.sglang.cpu_engine.server import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.extended]

PROGRAM = Path(__file__).with_name("w12_layers.py")
SITE = PROGRAM.parent / "cpu_engine/site"
ENCODED = ("qkv_proj", "gate_up_proj", "in_proj_qkvz", "down_proj", "lm_head")
NETWORK = "linear_attn"


@pytest.fixture(scope="module")
def lines(tiny_pair: TinyPair, repo: Path) -> list[dict[str, Any]]:
    """What the program prints; `tiny_pair` decides whether SGLang must be there."""
    done = subprocess.run(
        [str(PYTHON), str(PROGRAM)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [SITE, repo, repo / "kernels"])),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def layers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of single layers."""
    return [line for line in lines if line["layer"] != NETWORK]


def test_every_layer_and_rank_was_compared(lines: list[dict[str, Any]]) -> None:
    seen = {(line["layer"], line["ranks"], line["rank"]) for line in lines}
    names = (*ENCODED, "in_proj_ba", NETWORK)
    assert seen == {(n, ranks, rank) for n in names for ranks in (1, 2, 4) for rank in range(ranks)}


def test_shards_are_encoded_and_equal_to_stocks(layers: list[dict[str, Any]]) -> None:
    for line in layers:
        wanted = "W12LinearMethod" if line["layer"] in ENCODED else "UnquantizedLinearMethod"
        assert line["method"] == wanted, line
        assert line["same_bits"], line
        assert line["same_product"], line


def test_projections_of_a_network_are_one_weight(lines: list[dict[str, Any]]) -> None:
    """Before and after another load, for few and many rows."""
    for line in lines:
        if line["layer"] == NETWORK:
            assert line["fused"], line
            assert line["same_bits"], line
            assert line["same_product"], line


def test_ranks_hold_parts_of_the_merged_layers(layers: list[dict[str, Any]]) -> None:
    for line in layers:
        whole = next(w for w in layers if w["layer"] == line["layer"] and w["ranks"] == 1)
        divided = [max(1, a // b) for a, b in zip(whole["shape"], line["shape"], strict=True)]
        assert sorted(divided) == [1, line["ranks"]], line
