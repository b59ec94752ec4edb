"""What is measured: the servers of every phase, the order in which they load, their comparisons.

A phase's servers are all resident while it is timed, and nothing else runs. Names of servers say
what they are: `w12` and `bf16`, `gemv` for `--bf16-gemm-backend gemv`, `chain` for DFLASH.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_bench import logits, pair
from sglang_bench.book import Book, Timing, measure
from sglang_bench.fleet import Fleet, ServerSpec, gpu_state
from sglang_bench.models import vocabulary
from specpilot_cli.schema.plugin_config import PluginConfig, RecorderPlugin, W12Plugin

GPU_ARGS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--disable-radix-cache --skip-server-warmup --disable-prefill-cuda-graph "
    "--skip-tokenizer-init"
).split()
CPU_ARGS = (
    "--device cpu --sleep-on-idle --disable-radix-cache --skip-server-warmup --skip-tokenizer-init "
    "--mem-fraction-static 0.1 --max-total-tokens 16384 --max-running-requests 8"
).split()
CARD_FREE_GIB, CARD_FRACTION = 78.7, 0.85
"""An 80 GB H100 as an idle process sees it, and the static share of it that is emulated."""

W12 = PluginConfig(w12=W12Plugin())
TIED_W12 = PluginConfig(w12=W12Plugin(tied_lm_head=True))
UNCHAINED_W12 = PluginConfig(w12=W12Plugin(chained=False))
W12_ARGS = ("--quantization", "w12")
GEMV = ("--bf16-gemm-backend", "gemv")
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
REAL_DRAFTS = {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}

Servers = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things are, and how long they may take.

    models: folder of model folders. work: for logs and recordings. repository: its root.
    short: a rehearsal, with few tokens and rounds. cpu: no GPU. kept: server -> what
    `logits.collect` found there.
    """

    fleet: Fleet
    book: Book
    models: Path
    work: Path
    repository: Path
    cpu: bool = False
    short: bool = False
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)

    def spec(self, name: str, model: str, *args: str, memory: tuple[str, ...] = (),
             **more: Any) -> ServerSpec:  # fmt: skip
        """A server of a model folder; what only a GPU knows is left out without one."""
        folder = self.models / model
        if self.cpu:
            args = tuple(a for a in args if a not in GEMV)
            memory = ()
        return ServerSpec(name, folder, (*args, *memory), **more)

    def chain(self, drafter: str, *, real: bool = False) -> tuple[str, ...]:
        """Arguments of a stock DFlash2 chain of the drafter's own block."""
        args = ["--speculative-algorithm", "DFLASH"]
        args += ["--speculative-draft-model-path", str(self.models / drafter)]
        if not real:
            args += ["--speculative-draft-load-format", "dummy"]
        if not self.cpu:
            args += ["--speculative-draft-attention-backend", "triton"]
        return tuple(args)

    def time(self, name: str, names: dict[str, str], model: str, *, requests: int,
             new_tokens: int, rounds: int, reserve_s: float,
             per: str = "tokens") -> None:  # fmt: skip
        """Time servers in turns (label -> server); a failure is noted."""
        try:
            urls = {label: self.fleet.running[server].url for label, server in names.items()}
            if self.short:
                requests, new_tokens, rounds = min(requests, 4), 32, 3
            timing = Timing(
                name, urls, requests, new_tokens, rounds, vocabulary(self.models / model), per,
                every=4 if self.short else 8,
            )  # fmt: skip
            measure(self.book, timing, reserve_s=reserve_s)
        except Exception as error:  # noqa: BLE001 - one measurement of many
            self.book.fail(name, error)


@dataclass(frozen=True, slots=True)
class Phase:
    """groups: servers that load together; a group waits until the one before has its pools.

    sides: small servers that load first and are gone before `run`; `side` works with them while
    the others load. need_s: about what the phase takes; a phase that no longer fits is left out.
    essential: a server without which the run ends, as the rest would say little.
    """

    name: str
    groups: tuple[tuple[ServerSpec, ...], ...]
    run: Callable[[Bench, Servers], None]
    need_s: float
    sides: tuple[ServerSpec, ...] = ()
    side: Callable[[Bench], None] | None = None
    essential: str | None = None

    def specs(self) -> Iterator[ServerSpec]:
        yield from self.sides
        for group in self.groups:
            yield from group


def memory(fraction: float, tokens: int | None, running: int, *graphs: int) -> tuple[str, ...]:
    """Arguments that size pools and CUDA graphs; tokens: cap of the KV pool."""
    cap = () if tokens is None else ("--max-total-tokens", str(tokens))
    batches = ("--cuda-graph-bs-decode", *map(str, graphs))
    return (
        "--mem-fraction-static", str(fraction), *cap, "--max-running-requests", str(running),
        *batches,
    )  # fmt: skip


def card_fraction() -> float:
    """The static fraction of this GPU that leaves what an 80 GB card would."""
    state = gpu_state()
    if not state:
        return CARD_FRACTION
    free_gib = (float(state["memory.total"]) - float(state["memory.used"])) / 1024
    return round(CARD_FREE_GIB * CARD_FRACTION / free_gib, 4)


def plain_phases(bench: Bench) -> list[Phase]:
    """27B without speculation, W12 beside stock; every form sizes its pools once as on 80 GB."""
    card, batches = card_fraction(), (32, 1, 8, 32)

    def compare(stock: str, w12: str, label: str) -> Callable[[Bench, Servers], None]:
        def run(bench: Bench, facts: Servers) -> None:
            del facts
            for name in (stock, w12):
                collect_logits(bench, name, "qwen-27b")
            pair_of = {label: stock, "w12": w12}
            for requests, tokens, rounds in ((1, 160, 6), (32, 96, 5)):
                bench.time(f"qwen-27b plain, {label}, {requests} at once", pair_of, "qwen-27b",
                           requests=requests, new_tokens=tokens, rounds=rounds,
                           reserve_s=240)  # fmt: skip
            summarise_27b(bench)

        return run

    first = (
        bench.spec("gemv-card", "qwen-27b", *GEMV, memory=memory(card, None, *batches)),
        bench.spec("w12", "qwen-27b", *W12_ARGS, plugin=W12,
                   memory=memory(0.85, 65536, *batches)),
    )  # fmt: skip
    second = (
        bench.spec("w12-card", "qwen-27b", *W12_ARGS, plugin=UNCHAINED_W12,
                   memory=memory(card, None, *batches)),
        bench.spec("bf16", "qwen-27b", memory=memory(0.9, 65536, *batches)),
    )  # fmt: skip
    return [
        Phase("plain, gemv", tuple((s,) for s in first), compare("gemv-card", "w12", "gemv"), 90,
              essential="w12"),
        Phase("plain, stock", tuple((s,) for s in second), compare("bf16", "w12-card", "bf16"), 90),
    ]  # fmt: skip


def collect_logits(bench: Bench, name: str, model: str) -> None:
    """Keep a server's log-probabilities; a failure is noted."""
    try:
        found = logits.collect(bench.fleet.running[name].url, vocabulary(bench.models / model))
        bench.kept[name] = found
        bench.book.put("logits", name, logits.as_text(found))
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail(f"logits of {name}", error)


def summarise_27b(bench: Bench) -> None:
    """Compare what is there so far: log-probabilities with stock's, pool sizes on 80 GB."""
    kept = bench.kept
    for stock, other in (
        ("gemv-card", "w12"), ("bf16", "w12-card"), ("gemv-card", "bf16"), ("w12", "w12-card"),
    ):  # fmt: skip
        if stock in kept and other in kept:
            found = logits.compare(kept[stock], kept[other])
            bench.book.put("logits_compared", f"{stock} / {other}", found)
            bench.book.note(f"log-probabilities {stock} / {other}: {found}")
    servers = bench.book.results["servers"]
    if "gemv-card" in servers and "w12-card" in servers:
        tokens = {
            name: servers[name]["settings"]["max_total_num_tokens"]
            for name in ("gemv-card", "w12-card")
        }
        growth = tokens["w12-card"] / tokens["gemv-card"]
        bench.book.put("kv_pool", "80 GB", {
            "tokens": tokens, "growth_ratio": growth, "card_free_gib": CARD_FREE_GIB,
            "static_fraction_of_card": CARD_FRACTION,
        })  # fmt: skip
        bench.book.note(f"KV pool on 80 GB: {tokens}, {growth:.3f}x")


def chain_phase(bench: Bench) -> Phase:
    """The stock DFlash2 chain, four tokens a step by decree, with either target."""
    drafts = bench.chain("qwen-27b-dflash2")
    env = {SIMULATED: "4", **REAL_DRAFTS}
    room = memory(0.85, 32768, 1, 1)

    def run(bench: Bench, facts: Servers) -> None:
        del facts
        bench.time("qwen-27b chain, 1 at once", {"bf16": "chain-bf16", "w12": "chain-w12"},
                   "qwen-27b", requests=1, new_tokens=384, rounds=6, reserve_s=130,
                   per="steps")  # fmt: skip

    specs = (
        bench.spec("chain-bf16", "qwen-27b", *drafts, memory=room, env=env),
        bench.spec("chain-w12", "qwen-27b", *W12_ARGS, *drafts, plugin=W12, memory=room, env=env),
    )
    return Phase("chain", tuple((s,) for s in specs), run, 70)


def recorder_phase(bench: Bench, *, with_pair: bool) -> Phase:
    """What the plugin costs: absent, inert, recording dense and anchored.

    All four servers are resident, so the model has 24 layers: the step is about half as long as
    the whole model's, and a share of it twice as large. Random weights accept next to nothing, so
    every server commits about one token a step; the dense one must be told to, and what that takes
    counts as its cost.
    """
    drafts = bench.chain("qwen-27b-24l-dflash2")
    room = memory(0.6, 32768, 1, 1)
    folder = bench.work / "recordings"

    def spec(name: str, plugin: Any) -> ServerSpec:
        env = {SIMULATED: "1", **REAL_DRAFTS} if name == "rec-dense" else {}
        return bench.spec(name, "qwen-27b-24l", *drafts, memory=room, env=env, plugin=plugin)

    def recorder(mode: Any) -> PluginConfig:
        return PluginConfig(recorder=RecorderPlugin(mode=mode, folder=str(folder / mode)))

    specs = (
        spec("rec-absent", "absent"), spec("rec-inert", "inert"),
        spec("rec-dense", recorder("dense")), spec("rec-anchored", recorder("anchored")),
    )  # fmt: skip

    def run(bench: Bench, facts: Servers) -> None:
        labels = {name.removeprefix("rec-"): name for name in facts}
        if "absent" not in labels:
            raise RuntimeError("no server without the plugin to compare with")
        bench.time("recorder, 24 layers, 1 at once", labels, "qwen-27b-24l", requests=1,
                   new_tokens=128, rounds=10, reserve_s=25, per="steps")  # fmt: skip

    sides = pair.specs(bench) if with_pair else ()
    return Phase("recorder", tuple((s,) for s in specs), run, 100, sides,
                 pair.run if with_pair else None)  # fmt: skip


def other_model_phases(bench: Bench) -> list[Phase]:
    """W12 beside the fastest stock on models of other shapes, at 1, 8 and 32 requests."""

    def run_for(models: tuple[str, ...]) -> Callable[[Bench, Servers], None]:
        def run(bench: Bench, facts: Servers) -> None:
            for model in models:
                pair_of = {"gemv": f"{model}-gemv", "w12": f"{model}-w12"}
                if not all(name in facts for name in pair_of.values()):
                    continue
                for requests, tokens, rounds in ((1, 192, 6), (8, 128, 5), (32, 96, 5)):
                    bench.time(f"{model} plain, gemv, {requests} at once", pair_of, model,
                               requests=requests, new_tokens=tokens, rounds=rounds,
                               reserve_s=60)  # fmt: skip

        return run

    def specs(model: str) -> tuple[ServerSpec, ...]:
        room = memory(0.8, 32768, 32, 1, 8, 32)
        return (
            bench.spec(f"{model}-gemv", model, *GEMV, memory=room),
            bench.spec(f"{model}-w12", model, *W12_ARGS, memory=room, plugin=TIED_W12),
        )

    small = (*specs("llama-8b"), *specs("gemma-12b"))
    return [
        Phase("llama and gemma", tuple((s,) for s in small),
              run_for(("llama-8b", "gemma-12b")), 130),
        Phase("muse", tuple((s,) for s in specs("muse-30b")), run_for(("muse-30b",)), 100),
    ]  # fmt: skip
