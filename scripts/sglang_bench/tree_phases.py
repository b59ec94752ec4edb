"""A step of the 27B shape with a tree, beside stock's chain.

Both servers are resident together. Weights are random: what a step costs does not depend on what is
accepted, but that a chain's commit is as long as it is told to be and a tree's is one token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_bench.fleet import ServerSpec
from sglang_bench.load import generate, post, prompts_of
from sglang_bench.models import vocabulary
from sglang_bench.phases import REAL_DRAFTS, SIMULATED, W12_ARGS, Bench, Phase, Servers, memory
from sglang_bench.steps import step_times
from specpilot_cli.schema.plugin_config import (
    TREE_ALGORITHM,
    PluginConfig,
    TreePlugin,
    W12Plugin,
)

SHAPE, DRAFTER = "qwen-27b", "qwen-27b-dflash2"
WIDE = TreePlugin(block=16, nodes=32)
_PROFILED_STEPS = 12


def tree_args(bench: Bench, drafter: str, *, real: bool = False) -> tuple[str, ...]:
    """Arguments of a tree server with the drafter of `Bench.chain`."""
    return tuple(
        TREE_ALGORITHM if word == "DFLASH" else word for word in bench.chain(drafter, real=real)
    )


def step_phases(bench: Bench) -> list[Phase]:
    """A step of 32 nodes on a block of 16 against stock's chain of 8.

    The target in W12, with the small kernels that let products start early where a step is narrow
    enough for them, and in BF16.
    """
    room = ("--skip-tokenizer-init", *memory(0.85, 32768, 1, 1))  # a shape has no tokenizer
    trees = tree_args(bench, DRAFTER)

    def chain(name: str) -> ServerSpec:
        return bench.spec(name, SHAPE, *bench.chain(DRAFTER), memory=room,
                          env={SIMULATED: "4", **REAL_DRAFTS})  # fmt: skip

    def tree(name: str, w12: W12Plugin | None) -> ServerSpec:
        words = () if w12 is None else W12_ARGS
        return bench.spec(name, SHAPE, *words, *trees, memory=room,
                          plugin=PluginConfig(w12=w12, tree=WIDE))  # fmt: skip

    def phase(name: str, other: ServerSpec) -> Phase:
        stock = chain(f"chain-beside-{other.name}")  # the next phase's waits beside this one's
        run = _compare(stock.name, other.name)
        return Phase(name, ((stock,), (other,)), run, 110, essential=stock.name)

    return [
        phase("step, W12", tree("tree-w12", W12Plugin(chained=True))),
        phase("step, BF16", tree("tree-bf16", None)),
    ]


def _compare(chain: str, other: str) -> Callable[[Bench, Servers], None]:
    def run(bench: Bench, facts: Servers) -> None:
        bench.book.put("tree", other, facts[other]["plugin_state"]["active"]["tree"])
        name = f"27B step, chain against {other}"
        labels = {"chain": chain, "tree": other}
        bench.time(name, labels, SHAPE, requests=1, new_tokens=192, rounds=6, reserve_s=60,
                   per="steps")  # fmt: skip
        timed = bench.book.results["timings"].get(name, {}).get("ms", {})
        for label, server in labels.items():
            if label in timed and not bench.cpu:
                profile(bench, server, timed[label]["median"])

    return run


def profile(bench: Bench, name: str, unprofiled_ms: float) -> None:
    """Where a server's step goes, kept as `profiles[name]`; a failure is noted."""
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
        times = step_times(found[-1], unprofiled_ms)
        bench.book.put("profiles", name, times)
        shown = {key: value for key, value in times.items() if key != "longest"}
        bench.book.note(f"{name}: {shown}")
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail(f"profile of {name}", error)
