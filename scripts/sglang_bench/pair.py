"""The demo pair in SGLang: audited by token-force, and asked for the reference engine's prompts.

Five servers with the pair's own weights. Nothing here is timed, so it runs while others load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_bench.fleet import ServerSpec
from specpilot_cli.schema.plugin_config import PluginConfig, W12Plugin

if TYPE_CHECKING:
    from sglang_bench.phases import Bench

PAIR = Path("recipes", "demo-cpu")
"""Relative to the repository, where commands run, so that results name no folder of a machine."""

PROMPTS, TARGET, DRAFTER = "prompts/unseen.jsonl", "pair-target", "pair-drafter"
LIMIT, PER_KIND, TIMEOUT_S = 64, 4, 100.0
W12 = PluginConfig(w12=W12Plugin())


def specs(bench: Bench) -> tuple[ServerSpec, ...]:
    """Plain and chain with either weights, and the scorer: BF16, plain, float32 head."""
    room = (
        "--mem-fraction-static", "0.3", "--max-total-tokens", "32768",
        "--max-running-requests", "8", "--cuda-graph-bs-decode", "1", "2", "4", "8",
    )  # fmt: skip
    chain, w12 = bench.chain(DRAFTER, real=True), ("--quantization", "w12")

    def spec(name: str, *args: str, **more: Any) -> ServerSpec:
        return bench.spec(name, TARGET, *args, memory=room, real=True, **more)

    return (
        spec("pair-plain-bf16"),
        spec("pair-plain-w12", *w12, plugin=W12),
        spec("pair-chain-bf16", *chain),
        spec("pair-chain-w12", *w12, *chain, plugin=W12),
        spec("pair-scorer", "--enable-fp32-lm-head"),
    )


def run(bench: Bench) -> None:
    """Judge both W12 servers against stock's chain and keep all answers; failures are noted."""
    out = bench.work / "pair"
    out.mkdir(exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        for name in ("pair-plain-bf16", "pair-chain-bf16", "pair-chain-w12", "pair-plain-w12"):
            pool.submit(_ask, bench, name, out)
    with ThreadPoolExecutor(2) as pool:
        for name in ("pair-chain-w12", "pair-plain-w12"):
            pool.submit(_audit, bench, name, out)


def _ask(bench: Bench, name: str, out: Path) -> None:
    """Answers to the prompts that the reference engine is compared on."""
    rows = out / f"{name}.rows.json"
    try:
        _call(bench, [
            "scripts/measure_sglang_pair.py", "ask", "--url", _url(bench, name), "--pair",
            str(PAIR), "--prompts", str(PAIR / PROMPTS), "--per-kind",
            str(1 if bench.short else PER_KIND), "--output", str(rows),
        ])  # fmt: skip
        answers = json.loads(rows.read_text(encoding="utf-8"))["rows"]
        tokens = sum(len(row["output_ids"].split()) - 1 for row in answers)
        steps = sum(row["verify_steps"] or 0 for row in answers)
        tau = tokens / steps if steps else None
        bench.book.put("pair", name, {"rows": answers, "tokens_per_step": tau})
        bench.book.note(f"{name}: {len(answers)} answers, {tau} tokens per step")
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail(f"asking {name}", error)


def _audit(bench: Bench, name: str, out: Path) -> None:
    """`specpilot token-force` of one server against stock's chain."""
    result = out / f"{name}.token-force.json"
    stock = "pair-chain-bf16" if "chain" in name else "pair-plain-bf16"
    try:
        _call(bench, [
            "-m", "specpilot_cli", "token-force", "--system", _url(bench, name), "--stock",
            _url(bench, stock), "--scorer", _url(bench, "pair-scorer"), "--ar",
            _url(bench, "pair-plain-bf16"), "--prompts", str(PAIR / PROMPTS), "--tokenizer",
            str(PAIR / "target"), "--limit", str(8 if bench.short else LIMIT), "--output",
            str(result), "--force", "--quiet", "--exit-zero",
        ])  # fmt: skip
        document = json.loads(result.read_text(encoding="utf-8"))
        bench.book.put("token_force", name, document)
        bench.book.note(f"token-force of {name}: {document['verdict']}")
    except Exception as error:  # noqa: BLE001 - one measurement of many
        bench.book.fail(f"token-force of {name}", error)


def _url(bench: Bench, name: str) -> str:
    return bench.fleet.running[name].url


def _call(bench: Bench, args: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, *args], cwd=bench.repository, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-1500:]}")
