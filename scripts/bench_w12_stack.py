#!/usr/bin/env python3
"""Measure what small kernels between W12 products cost, in a graph of 64 layers; write JSON.

    python scripts/bench_w12_stack.py --output docs/measurements/w12_stack_h200.json

The products of Qwen3.8-27B's layers without the LM head, several copies of each weight, so that L2
is cold. Between them, where a layer has them, a norm of the sum with the residual, an elementwise
kernel in place of attention or recurrence, a gated norm, and a gated activation:

    alone      no kernel between
    torch      torch's kernels; none starts before the one ahead of it has ended, and a product
               behind one begins with empty rings
    chained    those of `specpilot_kernels.chained`, but for the elementwise one

Times are medians of replays in which all columns take turns, milliseconds of the whole stack.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_w12 import ATTENTION_EVERY, LAYERS, Weights, clocks, make_weights
from torch.nn.functional import linear, rms_norm, silu

from specpilot_kernels.chained import ops as chained
from specpilot_kernels.timing import Work, in_turns
from specpilot_kernels.w12 import gemm, shapes

ROWS = (1, 8, 32)
NAMES = ("gdn_in", "gdn_out", "attn_qkv", "attn_o", "gate_up", "down")
HEAD, HIDDEN, INNER, WIDE = 128, 5120, 6144, 17408
EPS = 1e-6

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Between:
    """What stands between the products: x and residual -> both, and x -> x."""

    norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    mix: Callable[[Tensor], Tensor]
    gated_norm: Callable[[Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]


def kinds() -> dict[str, Between]:
    """The columns."""
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    head = ones[:HEAD]

    def torch_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(residual.add_(x), (HIDDEN,), ones, EPS), residual

    def heads(compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: compute(x.view(-1, HEAD)).view(x.shape)

    def mix(x: Tensor) -> Tensor:
        return x[:, :INNER] * 1.0

    return {
        "alone": Between(
            lambda x, r: (x, r), lambda x: x[:, :INNER], lambda x: x, lambda x: x[:, :WIDE]
        ),
        "torch": Between(
            torch_norm, mix, heads(lambda x: rms_norm(x, (HEAD,), head, EPS)),
            lambda x: silu(x[:, :WIDE]) * x[:, WIDE:],
        ),
        "chained": Between(
            lambda x, r: chained.add_rms_norm(x, r, ones, EPS), mix,
            heads(lambda x: chained.gated_rms_norm(x, x, head, EPS)),
            lambda x: chained.act_and_mul(x, "silu"),
        ),
    }  # fmt: skip


def stack(table: dict[str, Weights], form: str, between: Between, start: Tensor) -> Tensor:
    """The layers; form: `w12` or `bf16`."""
    multiply: Callable[[Tensor, Any], Tensor] = gemm.gemm if form == "w12" else linear

    def product(name: str, layer: int, x: Tensor) -> Tensor:
        several = getattr(table[name], form)
        return multiply(x, several[layer % len(several)])

    x, residual = start, torch.zeros_like(start)
    for layer in range(LAYERS):
        attention = layer % ATTENTION_EVERY == ATTENTION_EVERY - 1
        x, residual = between.norm(x, residual)
        x = between.mix(product("attn_qkv" if attention else "gdn_in", layer, x))
        if not attention:
            x = between.gated_norm(x)
        x = product("attn_o" if attention else "gdn_out", layer, x)
        x, residual = between.norm(x, residual)
        x = between.activation(product("gate_up", layer, x))
        x = product("down", layer, x)
    return x


def main() -> int:
    """Run; half a minute on an H200."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replays", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    gemm.warm()
    chained.warm()
    wanted = shapes.MODELS[shapes.QWEN_27B]
    table = {name: make_weights(name, wanted[name]) for name in NAMES}
    columns, found = kinds(), {}
    for rows in ROWS:
        start = torch.randn((rows, HIDDEN), device="cuda").bfloat16()
        works: dict[str, list[Work]] = {
            f"{form} {name}": [partial(stack, table, form, between, start)]
            for form in ("bf16", "w12")
            for name, between in columns.items()
        }
        times = in_turns(works, options.replays)
        found[str(rows)] = {name: seconds * 1e3 for name, seconds in times.items()}
        shown = ", ".join(f"{name} {ms:.3f}" for name, ms in found[str(rows)].items())
        print(f"{rows} rows, ms: {shown}", flush=True)
    document = {
        "what": "64 layers of Qwen3.8-27B without the LM head in one graph, milliseconds, medians",
        "command": shlex.join(["python", "scripts/bench_w12_stack.py", *sys.argv[1:]]),
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "clocks": clocks(),
        "rows": found,
    }
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
