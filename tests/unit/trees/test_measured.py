"""What the committed measurements of tree builders must hold, and what README says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def _records(name: str) -> list[dict[str, Any]]:
    path = ROOT / f"docs/measurements/{name}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]["records"]
    return found


def test_best_first_builds_a_tree_of_32_nodes_in_five_microseconds() -> None:
    best = {r["builder"]: r["best_us"] for r in _records("tree_builders_cpu") if r["nodes"] == 32}
    assert best["best-first, batch"] <= 5
    assert best["best-first, one call per tree"] <= 5
    assert best["best-first, demo recording, batch"] <= 5  # single calls: README says how long
    batch = [best[f"{name}, batch"] for name in ("best-first", "eagle-2", "sequoia")]
    row = f"{best['best-first, one call per tree']:.1f}; " + ", ".join(f"{us:.1f}" for us in batch)
    assert f"| {row}, {best['opt-tree, batch']:.0f} µs" in (ROOT / "README.md").read_text("utf-8")


def test_peers_are_told_apart_by_whose_code_it_is() -> None:
    records = {record["tree"]: record for record in _records("tree_peers_cpu")}
    theirs = [r for r in records.values() if r["code"] == "the package's own code"]
    assert {r["source"].split()[0] for r in theirs} == {"angelslim", "sglang"}
    again = [r["tree"] for r in records.values() if "written again" in r["code"]]
    assert again == ["DDTree", "OPT-Tree"]
    for name in again:
        assert records[name]["identical_trees"] == records[name]["trees"]
    own = records["best-first, one call"]["best_us"]
    assert all(r["best_us"] > 5 * own for r in records.values() if r["code"] != "specpilot")
    page = " ".join((ROOT / "docs/replay.md").read_text("utf-8").split())
    sglang, slim = sorted(r["best_us"] for r in theirs)
    eagle = records["EAGLE-2, one call"]["best_us"]
    assert f"{sglang:,.0f} and {slim:,.0f} µs a tree of 32 nodes" in page
    assert f"beside {eagle:.1f} for `eagle-2`" in page
    assert f"and {own:.1f} for `best-first`" in page
