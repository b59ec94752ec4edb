"""Trees beside stock's chain: steps of the 27B shape, and the demo pair's tokens and outputs.

Servers that are compared are resident together. `step` serves random weights: what a step costs
does not depend on what is accepted, but that a chain's commit is as long as it is told to be and a
tree's is one token. `pair` serves the demo pair's own weights, so tokens per step mean something:
they are held against a replay of lattices that SGLang itself recorded of the same prompts.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_bench.fleet import ServerSpec
from sglang_bench.load import generate, post, prompts_of
from sglang_bench.models import vocabulary
from sglang_bench.phases import REAL_DRAFTS, SIMULATED, W12_ARGS, Bench, Phase, Servers, memory
from specpilot_cli.schema.plugin_config import (
    TREE_ALGORITHM,
    PluginConfig,
    RecorderPlugin,
    TreePlugin,
    W12Plugin,
)

SHAPE, DRAFTER = "qwen-27b", "qwen-27b-dflash2"
PAIR_TARGET, PAIR_DRAFTER = "pair-target", "pair-drafter"
WIDE = TreePlugin(block=16, nodes=32)
PAIR_TREES = {
    "b8-n16": TreePlugin(block=8, nodes=16),
    "b16-n16": TreePlugin(block=16, nodes=16),
    "b16-n32": WIDE,
    "b16-n32-marginal": TreePlugin(block=16, nodes=32, scoring="marginal"),
}
PROMPTS = "recipes/demo-cpu/prompts/unseen.jsonl"
TAU_AGREEMENT_PCT = 2.0
_PROFILED_STEPS = 12
_GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}


def tree_args(bench: Bench, drafter: str, *, real: bool = False) -> tuple[str, ...]:
    """Arguments of a tree server with the drafter of `Bench.chain`."""
    return tuple(
        TREE_ALGORITHM if word == "DFLASH" else word for word in bench.chain(drafter, real=real)
    )


def step_phases(bench: Bench) -> list[Phase]:
    """A step of 32 nodes on a block of 16 against stock's chain of 8, with and without W12."""
    room = ("--skip-tokenizer-init", *memory(0.85, 32768, 1, 1))  # a shape has no tokenizer
    chain = bench.spec("chain-bf16", SHAPE, *bench.chain(DRAFTER), memory=room,
                       env={SIMULATED: "4", **REAL_DRAFTS})  # fmt: skip
    trees = tree_args(bench, DRAFTER)
    plain = bench.spec("tree-bf16", SHAPE, *trees, memory=room, plugin=PluginConfig(tree=WIDE))
    w12 = bench.spec("tree-w12", SHAPE, *W12_ARGS, *trees, memory=room,
                     plugin=PluginConfig(w12=W12Plugin(), tree=WIDE))  # fmt: skip

    def compare(other: ServerSpec) -> Callable[[Bench, Servers], None]:
        def run(bench: Bench, facts: Servers) -> None:
            state = facts[other.name]["plugin_state"]["active"]["tree"]
            bench.book.put("tree", other.name, state)
            bench.time(f"27B step, chain against {other.name}",
                       {"chain": "chain-bf16", "tree": other.name}, SHAPE, requests=1,
                       new_tokens=192, rounds=6, reserve_s=60, per="steps")  # fmt: skip
            for name in ("chain-bf16", other.name):
                profile(bench, name)

        return run

    again = bench.spec("chain-bf16", SHAPE, *bench.chain(DRAFTER), memory=room, env=chain.env)
    return [
        Phase("step, W12", ((chain,), (w12,)), compare(w12), 110, essential="chain-bf16"),
        Phase("step, BF16", ((again,), (plain,)), compare(plain), 110),
    ]


def profile(bench: Bench, name: str) -> None:
    """Milliseconds of a step, and how many of them no kernel runs; a failure is noted."""
    try:
        url = bench.fleet.running[name].url
        folder = bench.work / "traces" / name
        folder.mkdir(parents=True, exist_ok=True)
        body = {"output_dir": str(folder), "num_steps": _PROFILED_STEPS, "with_stack": False,
                "activities": ["CPU", "GPU"]}  # fmt: skip
        (ids,) = prompts_of(1, 128, vocabulary(bench.models / SHAPE), seed=11)
        post(url, "/start_profile", body).read()
        generate(url, ids, 8 * _PROFILED_STEPS)
        deadline = time.monotonic() + 30.0
        while not (found := sorted(folder.glob("*.trace.json.gz"))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no trace in {folder}")
            time.sleep(0.5)
        time.sleep(1.0)  # the file is written in parts
        times = step_times(found[-1])
        bench.book.put("profiles", name, times)
        bench.book.note(f"{name}: {times}")
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail(f"profile of {name}", error)


def step_times(path: Path) -> dict[str, float]:
    """Of a trace: verify passes, and per step its milliseconds, those of kernels, and the rest.

    A step begins with a verify pass's first kernel and ends with the next one's.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    marks = sorted(
        float(event["ts"])
        for event in events
        if event.get("cat") == "gpu_user_annotation" and "VERIFY" in str(event.get("name"))
    )
    if len(marks) < 3:
        raise ValueError(f"{path.name} has {len(marks)} verify passes on the GPU")
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    busy, reached = 0.0, begin
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in _GPU_EVENTS
    )
    for first, last in spans:
        first, last = max(first, reached), min(last, end)
        if last > first:
            busy, reached = busy + last - first, last
    whole, kernels = (value / steps / 1e3 for value in (end - begin, busy))
    return {"steps": steps, "step_ms": whole, "kernel_ms": kernels, "idle_ms": whole - kernels}


def pair_phase(bench: Bench) -> Phase:
    """The demo pair: tokens per step against replay, token-force, and against stock's chain."""
    room = (
        "--mem-fraction-static", "0.3", "--max-total-tokens", "32768",
        "--max-running-requests", "8", "--cuda-graph-bs-decode", "1", "2", "4", "8",
    )  # fmt: skip
    chain = bench.chain(PAIR_DRAFTER, real=True)

    def spec(name: str, *args: str, **more: Any) -> ServerSpec:
        return bench.spec(name, PAIR_TARGET, *args, memory=room, real=True, **more)

    def dense(block: int) -> ServerSpec:
        folder = str(bench.work / "recordings" / f"pair-{block}")
        return spec(
            f"pair-dense-{block}", *chain, "--speculative-num-draft-tokens", str(block),
            plugin=PluginConfig(recorder=RecorderPlugin(mode="dense", folder=folder)),
            env={SIMULATED: "1", **REAL_DRAFTS},
        )  # fmt: skip

    trees = [
        spec(f"pair-{label}", *tree_args(bench, PAIR_DRAFTER, real=True),
             plugin=PluginConfig(tree=tree))
        for label, tree in PAIR_TREES.items()
    ]  # fmt: skip
    others = (
        spec("pair-plain"), spec("pair-chain", *chain),
        spec("pair-scorer", "--enable-fp32-lm-head"), dense(8), dense(16),
    )  # fmt: skip
    return Phase("pair", (others, tuple(trees)), _judge_pair, 200)


def _judge_pair(bench: Bench, facts: Servers) -> None:
    out = bench.work / "pair-tree"
    out.mkdir(exist_ok=True)
    limit = "2" if bench.short else "8"
    prompts = ["--prompts", str(bench.repository / PROMPTS)]
    lattices: dict[int, Path] = {}
    for block in (8, 16):
        place = out / f"dense-{block}.safetensors"
        if _done(bench, f"recording {block}", [
            "record", "--url", _url(bench, f"pair-dense-{block}"), *prompts, "--limit",
            str(4 * int(limit)), "-o", str(place), "--outputs", str(out / f"dense-{block}.jsonl"),
        ]):  # fmt: skip
            lattices[block] = place
    for label, tree in PAIR_TREES.items():
        name = f"pair-{label}"
        if name in facts and tree.block in lattices:
            _agreement(bench, name, tree, lattices[tree.block], out)
        for concurrency in (1, 8):
            _done(bench, f"token-force of {name} at {concurrency}", [
                "token-force", "--system", _url(bench, name), "--stock", _url(bench, "pair-chain"),
                "--scorer", _url(bench, "pair-scorer"), "--ar", _url(bench, "pair-plain"),
                *prompts, "--limit", limit, "--concurrency", str(concurrency), "-o",
                str(out / f"{name}-{concurrency}.json"),
            ], keep=("token_force", f"{name} at {concurrency}"))  # fmt: skip
    for label in ("b16-n32", "b16-n32-marginal"):
        other = "pair-chain" if label == "b16-n32" else "pair-b16-n32"
        _done(bench, f"paired-bench of {label} against {other}", [
            "paired-bench", "--baseline", _url(bench, other), "--candidate",
            _url(bench, f"pair-{label}"), "--ar", _url(bench, "pair-plain"), *prompts, "--limit",
            limit, "--aa", "1", "-o", str(out / f"bench-{label}.json"),
        ], keep=("paired_bench", f"{label} against {other}"))  # fmt: skip


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


def _url(bench: Bench, name: str) -> str:
    return bench.fleet.running[name].url


def _call(bench: Bench, args: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specpilot_cli", *args], cwd=bench.repository, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-1500:]}")
