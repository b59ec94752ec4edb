"""Trees' servers differ from stock's in what is compared alone; a step's time from its trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from sglang_bench import phases, prefix_reuse, tree_pair, tree_phases
from sglang_bench.book import Book, Clock
from sglang_bench.fleet import Fleet
from sglang_bench.phases import Bench
from sglang_bench.steps import TOP_K, step_times

from specpilot_cli.schema.plugin_config import TREE_ALGORITHM, PluginConfig


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    fleet = Fleet(tmp_path / "servers", phases.GPU_ARGS, first_port=9000)
    return Bench(fleet, Book(tmp_path / "r.json", Clock(60), {}), tmp_path, tmp_path, tmp_path)


def test_steps_are_compared_on_equal_terms(bench: Bench) -> None:
    found = tree_phases.step_phases(bench)
    chained = []
    for phase in found:
        chain, tree = phase.specs()
        words = [word for word in tree.args if word not in phases.W12_ARGS]
        assert [TREE_ALGORITHM if w == "DFLASH" else w for w in chain.args] == words
        assert (chain.model, phase.essential) == (tree.model, chain.name)
        assert isinstance(tree.plugin, PluginConfig)
        assert tree.plugin.tree == tree_phases.WIDE
        assert (tree.plugin.w12 is not None) == ("w12" in tree.args)
        chained.append(tree.plugin.w12 is not None and tree.plugin.w12.chained)
    assert chained == [True, False]
    names = [spec.name for phase in found for spec in phase.specs()]
    assert len(set(names)) == 4  # servers of two phases wait beside each other


def test_outputs_are_judged_by_servers_that_are_there(bench: Bench) -> None:
    phase = tree_pair.pair_phase(bench, tree_pair.FEW)
    names = [spec.name for spec in phase.specs()]
    assert len(set(names)) == len(names)
    assert {f"pair-{label}" for label in tree_pair.FEW} <= set(names)
    assert {"pair-plain", "pair-chain", "pair-scorer", "pair-dense-8", "pair-dense-16"} <= set(
        names
    )
    assert "pair-b16-n32-marginal" not in names


def test_one_server_keeps_its_prefix_cache(bench: Bench) -> None:
    phase = tree_pair.pair_phase(bench, tree_pair.FEW)
    words = {spec.name: bench.fleet._command(spec, 1) for spec in phase.specs()}
    caching = [name for name, line in words.items() if "--disable-radix-cache" not in line]
    assert caching == ["pair-caching"]
    assert "--attention-backend" in words["pair-caching"]


def written(folder: Path, kernels: list[tuple[str, float, float]], starts: list[float]) -> Path:
    """A trace of steps that begin at `starts`, a draft of 10 and a target pass of 60 µs each."""
    passes = (("DRAFT", 0, 10), ("VERIFY", 12, 60), ("VERIFY", 13, 58))
    marks = [
        (f"step[{kind} bs=1]", start + at, length)
        for start in starts
        for kind, at, length in passes
    ]
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": at, "dur": dur, "tid": 7}
        for name, at, dur in marks
    ]
    events += [
        {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": dur, "tid": 7,
         "args": {"device": 0, "stream": 7}}
        for name, at, dur in kernels
    ]  # fmt: skip
    path = folder / "t.trace.json.gz"
    document = {"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def test_what_no_kernel_fills_is_the_unprofiled_step_less_its_kernels(tmp_path: Path) -> None:
    """Each step is marked three times; kernels that overlap count once."""
    kernels = []
    for start in (0.0, 100.0, 200.0):
        kernels += [("gemm", start + 2, 6), ("gatherTopK", start + 9, 2), ("gemm", start + 14, 40),
                    ("gemm", start + 50, 10), ("copy", start + 80, 5)]  # fmt: skip
    found = step_times(written(tmp_path, kernels, [0, 100, 200]), 0.07)
    assert found["steps"] == 2
    assert found["profiled_ms"] == pytest.approx(0.1)
    assert found["kernel_ms"] == pytest.approx(0.059)
    assert found["idle_ms"] == pytest.approx(0.011)
    assert found["top_k_ms"] == pytest.approx(0.002)
    assert found["launches"] == 5
    assert found["outside_spans"] == {"ms": pytest.approx(0.005), "launches": 1}
    assert list(found["longest"]) == ["gemm", "copy", "gatherTopK"]
    assert found["longest"]["gemm"] == (0.056, 3)


@pytest.mark.parametrize(
    ("name", "chooses"),
    [
        ("void at::native::mbtopk::radixFindKthValues<float>", True),
        ("void at::native::sbtopk::gatherTopK<float>", True),
        ("void at::native::bitonicSortKVInPlace<2, -1>", True),
        ("flashinfer::sampling::RadixTopKKernel<float>", True),
        ("nvjet_sm90_tst_384x8_64x4", False),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>", False),
    ],
)
def test_kernels_that_choose_candidates(name: str, chooses: bool) -> None:
    assert bool(TOP_K.search(name)) is chooses


def answered(monkeypatch: pytest.MonkeyPatch, *, cached: int, regret: float) -> dict[str, Any]:
    """`reuse` of servers that answer 7s and a scorer that prefers another token by `regret`."""
    asked: list[tuple[str, tuple[int, ...]]] = []

    def generate(url: str, ids: tuple[int, ...], new: int) -> dict[str, Any]:
        asked.append((url, tuple(ids)))
        return {"output_ids": [7] * new, "meta_info": {"cached_tokens": cached}}

    monkeypatch.setattr(prefix_reuse, "generate", generate)
    monkeypatch.setattr(prefix_reuse, "largest_regret", lambda *_: regret)
    found = prefix_reuse.reuse("system", "scorer", "plain", new_tokens=100)
    first, *later = [ids for url, ids in asked if url == "system"]
    assert all(ids[: len(first)] == first and set(ids[len(first) : -3]) == {7} for ids in later)
    assert len({len(ids) for ids in later}) == len(later) == found["requests"]
    return found


def test_a_prefix_cache_is_right_if_it_was_used_and_all_tokens_are_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = answered(monkeypatch, cached=128, regret=0.1)
    assert good["right"] is True
    assert good["equal_to_plain"] == good["requests"]
    assert answered(monkeypatch, cached=128, regret=0.4)["right"] is False
    assert answered(monkeypatch, cached=64, regret=0.1)["right"] is False
