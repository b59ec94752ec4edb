"""The demo pair with trees in SGLang: outputs first, then tokens per step, then speed.

The pair has weights of its own, so tokens per step mean something: they are held against a replay
of lattices that SGLang itself recorded of the same prompts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sglang_bench.fleet import ServerSpec
from sglang_bench.load import generate
from sglang_bench.phases import REAL_DRAFTS, SIMULATED, Bench, Phase, Servers
from sglang_bench.prefix_reuse import reuse
from sglang_bench.tree_phases import WIDE, tree_args
from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin, TreePlugin

TARGET, DRAFTER = "pair-target", "pair-drafter"
TREES = {
    "b16-n32": WIDE,
    "b8-n16": TreePlugin(block=8, nodes=16),
    "b16-n16": TreePlugin(block=16, nodes=16),
    "b16-n32-marginal": TreePlugin(block=16, nodes=32, scoring="marginal"),
}
FEW = ("b16-n32", "b8-n16")
PROMPTS = "recipes/demo-cpu/prompts/unseen.jsonl"
TAU_AGREEMENT_PCT = 2.0
_LIMIT = 8  # token-force says nothing of fewer prompts
_PLAIN, _CHAIN, _SCORER, _CACHING = "pair-plain", "pair-chain", "pair-scorer", "pair-caching"
_COMPARISONS = (("b16-n32", _CHAIN), ("b16-n32-marginal", "pair-b16-n32"))
"""What paired-bench compares: a tree, and the server that it is compared with."""


def pair_phase(bench: Bench, labels: Sequence[str]) -> Phase:
    """The demo pair with the trees of these labels, one more with the prefix cache, and stock."""
    trees = {label: TREES[label] for label in labels}
    room = (
        "--mem-fraction-static", "0.3", "--max-total-tokens", "32768",
        "--max-running-requests", "8", "--cuda-graph-bs-decode", "1", "2", "4", "8",
    )  # fmt: skip
    chain, words = bench.chain(DRAFTER, real=True), tree_args(bench, DRAFTER, real=True)

    def spec(name: str, *args: str, **more: Any) -> ServerSpec:
        return bench.spec(name, TARGET, *args, memory=room, real=True, **more)

    def dense(block: int) -> ServerSpec:
        folder = str(bench.work / "recordings" / f"pair-{block}")
        return spec(
            f"pair-dense-{block}", *chain, "--speculative-num-draft-tokens", str(block),
            plugin=PluginConfig(recorder=RecorderPlugin(mode="dense", folder=folder)),
            env={SIMULATED: "1", **REAL_DRAFTS},
        )  # fmt: skip

    caching = spec(
        _CACHING, *words, "--mamba-track-interval", "64", "--max-mamba-cache-size", "64",
        plugin=PluginConfig(tree=WIDE), without=("--disable-radix-cache",),
    )  # fmt: skip
    served = [
        spec(f"pair-{label}", *words, plugin=PluginConfig(tree=tree))
        for label, tree in trees.items()
    ]
    stock = (spec(_PLAIN), spec(_CHAIN, *chain), spec(_SCORER, "--enable-fp32-lm-head"))
    blocks = sorted({tree.block for tree in trees.values()})
    groups = (stock, (*served, caching), tuple(map(dense, blocks)))
    return Phase("pair", groups, partial(_judge, trees=trees), 300)


def _judge(bench: Bench, facts: Servers, *, trees: dict[str, TreePlugin]) -> None:
    out = bench.work / "pair-tree"
    out.mkdir(exist_ok=True)
    for label in trees:
        bench.book.put("tree", label, _tree_facts(facts, f"pair-{label}"))
        _force(bench, f"pair-{label}", out)
    bench.book.put("tree", "caching", _tree_facts(facts, _CACHING))
    try:
        urls = [_url(bench, name) for name in (_CACHING, _SCORER, _PLAIN)]
        found = reuse(*urls, new_tokens=96 if bench.short else 320)
        bench.book.put("prefix_reuse", _CACHING, found)
        bench.book.note(f"prefix reuse: {found}")
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail("prefix reuse", error)
    blocks = {tree.block for tree in trees.values()}
    lattices = _recordings(bench, blocks, 8 if bench.short else 32, out)
    for label, tree in trees.items():
        if tree.block in lattices:
            _agreement(bench, f"pair-{label}", tree, lattices[tree.block], out)
    for label, other in _COMPARISONS:
        if label in trees and (other == _CHAIN or other.removeprefix("pair-") in trees):
            _done(bench, f"paired-bench of {label} against {other}", [
                "paired-bench", "--baseline", _url(bench, other), "--candidate",
                _url(bench, f"pair-{label}"), "--ar", _url(bench, _PLAIN), *_prompts(bench),
                "--limit", str(_LIMIT), "--aa", "1", "-o", str(out / f"bench-{label}.json"),
            ], keep=("paired_bench", f"{label} against {other}"))  # fmt: skip


def _tree_facts(facts: Servers, name: str) -> dict[str, Any] | None:
    """What the server's plugin says of its trees; None for a server that is not there."""
    if name not in facts:
        return None
    found: dict[str, Any] = facts[name]["plugin_state"]["active"]["tree"]
    return found


def _force(bench: Bench, name: str, out: Path) -> None:
    """token-force of one server, alone and with eight requests at once."""
    for concurrency in (1, 8):
        _done(bench, f"token-force of {name} at {concurrency}", [
            "token-force", "--system", _url(bench, name), "--stock", _url(bench, _CHAIN),
            "--scorer", _url(bench, _SCORER), "--ar", _url(bench, _PLAIN), *_prompts(bench),
            "--limit", str(_LIMIT), "--concurrency", str(concurrency), "-o",
            str(out / f"{name}-{concurrency}.json"),
        ], keep=("token_force", f"{name} at {concurrency}"))  # fmt: skip


def _recordings(bench: Bench, blocks: set[int], limit: int, out: Path) -> dict[int, Path]:
    """Dense lattices by block, with the outputs beside them."""
    found = {}
    for block in sorted(blocks):
        place = out / f"dense-{block}.safetensors"
        if _done(bench, f"recording {block}", [
            "record", "--url", _url(bench, f"pair-dense-{block}"), *_prompts(bench), "--limit",
            str(limit), "-o", str(place), "--outputs", str(out / f"dense-{block}.jsonl"),
        ]):  # fmt: skip
            found[block] = place
    return found


def _agreement(bench: Bench, name: str, tree: TreePlugin, lattice: Path, out: Path) -> None:
    """Tokens per step of the server and of the replay of the same prompts."""
    try:
        place = out / f"{name}-replay.json"
        policy = "best-first" if tree.scoring == "conditional" else "marginal"
        _call(bench, ["replay", str(lattice), "--policy", policy, "--nodes", str(tree.nodes),
                      "-o", str(place)])  # fmt: skip
        rows = json.loads(place.read_text(encoding="utf-8"))["results"]["rows"]
        replayed = next(row for row in rows if row["nodes"] == tree.nodes)
        tokens = steps = 0
        answers = (out / f"dense-{tree.block}.jsonl").read_text(encoding="utf-8").splitlines()
        for line in answers:
            record = json.loads(line)
            new = len(record["output_ids"])
            if new < 2:
                continue
            answer = generate(_url(bench, name), tuple(record["prompt_ids"]), new)
            tokens += new - 1
            steps += int(answer["meta_info"]["spec_verify_ct"])
        served = tokens / steps
        expected = replayed["tau_tokens_per_step"]["value"]
        difference = 100 * (served / expected - 1)
        bench.book.put("agreement", name, {
            "served_tokens_per_step": served, "replayed_tokens_per_step": expected,
            "difference_pct": difference, "requests": len(answers), "steps": steps,
            "agrees": abs(difference) <= TAU_AGREEMENT_PCT,
        })  # fmt: skip
        bench.book.note(f"{name}: {served:.3f} tokens per step, replay {expected:.3f}")
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail(f"replay of {name}", error)


def _done(
    bench: Bench, what: str, args: Sequence[str], *, keep: tuple[str, str] | None = None
) -> bool:
    """Run one command of specpilot; keep the document it writes; note a failure."""
    try:
        gated = () if args[0] == "record" else ("--exit-zero",)
        _call(bench, [*args, "--force", "--quiet", *gated])
        if keep is not None:
            place = Path(args[list(args).index("-o") + 1])
            document = json.loads(place.read_text(encoding="utf-8"))
            bench.book.put(*keep, document)
            bench.book.note(f"{what}: {document['verdict']}")
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail(what, error)
        return False
    return True


def _prompts(bench: Bench) -> tuple[str, str]:
    return "--prompts", str(bench.repository / PROMPTS)


def _url(bench: Bench, name: str) -> str:
    return bench.fleet.running[name].url


def _call(bench: Bench, args: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specpilot_cli", *args], cwd=bench.repository, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-1500:]}")
