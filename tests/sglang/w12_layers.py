"""A program for SGLang's interpreter: its real layers, sharded, with W12 and stock side by side.

Every rank's layer is built as in a server of that many ranks, loaded by SGLang's own loaders, and
encoded. Prints one JSON line for each: which method it ended with, and whether product and bits
are those of the stock layer; and for gated delta networks, whose projections become one weight. No
process group is made: a product needs none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_context, get_parallel

from specpilot_cli.engines.sglang.plugin.w12_config import W12Config
from specpilot_cli.engines.sglang.plugin.w12_models import adapt

HIDDEN = 256
RANKS = (1, 2, 4)

Make = Callable[[Any], Any]
Load = Callable[[Any], None]


def import_gdn() -> Any:
    """The GDN layer, whose module asks for operators of the CUDA kernel package by name."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    while True:
        try:
            from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet
        except AttributeError as error:
            missing = re.search(r"no attribute '(\w+)'", str(error))
            if missing is None:
                raise
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
        else:
            return Qwen3_5GatedDeltaNet


def ordinary(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Weights like trained ones."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn((rows, cols), generator=generator, dtype=torch.float32)
    return (0.02 * weights).to(torch.bfloat16)


def merged(name: str, sizes: list[int], *, packed: bool = False) -> tuple[str, Make, Load]:
    """A merged projection; packed: as GDN layers, which load the first three parts as one."""
    parts = [ordinary(size, HIDDEN, seed) for seed, size in enumerate(sizes)]

    def make(config: Any) -> Any:
        layer = MergedColumnParallelLinear(
            HIDDEN, sizes, bias=False, quant_config=config, prefix=name
        )
        if packed:
            gdn = import_gdn()
            gdn._bind_packed_weight_loaders(gdn, layer)
        return layer

    def load(layer: Any) -> None:
        loader = layer.weight.weight_loader
        if packed:
            loader(layer.weight, torch.cat(parts[:3]), (0, 1, 2))
        for number in range(3 if packed else 0, len(parts)):
            loader(layer.weight, parts[number], number)

    return name, make, load


def qkv() -> tuple[str, Make, Load]:
    """Eight heads, four of keys and values."""
    parts = {"q": ordinary(1024, HIDDEN, 1), "k": ordinary(512, HIDDEN, 2),
             "v": ordinary(512, HIDDEN, 3)}  # fmt: skip

    def make(config: Any) -> Any:
        return QKVParallelLinear(
            HIDDEN, 128, 8, 4, bias=False, quant_config=config, prefix="qkv_proj"
        )

    def load(layer: Any) -> None:
        for part, weights in parts.items():
            layer.weight.weight_loader(layer.weight, weights, part)

    return "qkv_proj", make, load


def plain(name: str, make: Make, weights: torch.Tensor) -> tuple[str, Make, Load]:
    """A layer that loads one tensor."""
    return name, make, lambda layer: layer.weight.weight_loader(layer.weight, weights)


def layers() -> Iterator[tuple[str, Make, Load]]:
    """Every kind of layer that a hybrid model has."""
    yield qkv()
    yield merged("gate_up_proj", [1024, 1024])
    yield merged("in_proj_qkvz", [512, 512, 1024, 1024], packed=True)
    yield merged("in_proj_ba", [16, 16])
    yield plain(
        "down_proj",
        lambda config: RowParallelLinear(
            1024, HIDDEN, bias=False, quant_config=config, prefix="down_proj"
        ),
        ordinary(HIDDEN, 1024, 4),
    )
    yield plain(
        "lm_head",
        lambda config: ParallelLMHead(1000, HIDDEN, quant_config=config, prefix="lm_head"),
        ordinary(1000, HIDDEN, 5),
    )


def compare(make: Make, load: Load) -> dict[str, Any]:
    """Build, load and finish one rank's layer twice."""
    stock, ours = make(None), make(W12Config())
    for layer in (stock, ours):
        load(layer)
    ours.quant_method.process_weights_after_loading(ours)
    x = ordinary(3, stock.weight.shape[1], 6)
    products = [layer.quant_method.apply(layer, x) for layer in (stock, ours)]
    weight = ours.weight if ours.w12_product is None else ours.w12_product.to_bf16()
    return {
        "method": type(ours.quant_method).__name__,
        "shape": list(stock.weight.shape),
        "same_product": torch.equal(*(product.view(torch.int16) for product in products)),
        "same_bits": torch.equal(weight.view(torch.int16), stock.weight.view(torch.int16)),
    }


def network(config: Any) -> Any:
    """A gated delta network with 8 heads of keys and 16 of values, 64 channels each."""
    heads = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    model = SimpleNamespace(
        hidden_size=HIDDEN, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4, hidden_act="silu", output_gate_type=None, rms_norm_eps=1e-6,
        model_type="qwen3_5_text", **heads, **{f"{name}_cpu": n for name, n in heads.items()},
    )  # fmt: skip
    return import_gdn()(model, 0, config, None, "linear_attn")


def load_network(built: Any, seed: int) -> None:
    """As the model's loader: a checkpoint has q, k, v together, and z, b, a apart."""
    qkvz, ba = built.in_proj_qkvz, built.in_proj_ba
    qkvz.weight.weight_loader(qkvz.weight, ordinary(2048, HIDDEN, seed), (0, 1, 2))
    qkvz.weight.weight_loader(qkvz.weight, ordinary(1024, HIDDEN, seed + 1), 3)
    for number in range(2):
        ba.weight.weight_loader(ba.weight, ordinary(16, HIDDEN, seed + 2 + number), number)


def compare_networks() -> dict[str, Any]:
    """Build one rank's network twice, and load both twice, with SGLang's steps around a load."""
    cpu = torch.device("cpu")
    with get_context().override_server_args():
        stock, ours = network(None), network(W12Config())
        same: dict[str, list[bool]] = {"same_product": [], "same_bits": [], "fused": []}
        for seed in (10, 20):
            DefaultModelLoader.restore_weights_before_loading(ours, cpu)
            for built in (stock, ours):
                load_network(built, seed)
            DefaultModelLoader.postprocess_weights(ours, cpu)
            same["fused"].append(ours.w12_fusion.is_active and ours.in_proj_ba.weight is None)
            for rows in (1, 7, 2000):
                x = ordinary(rows, HIDDEN, 6)
                pairs = zip(stock._forward_input_proj(x), ours._forward_input_proj(x), strict=True)
                same["same_product"] += [torch.equal(*pair) for pair in pairs]
            for name in ("in_proj_qkvz", "in_proj_ba"):
                weight = getattr(ours, name).w12_product.to_bf16().view(torch.int16)
                loaded = getattr(stock, name).weight.view(torch.int16)
                same["same_bits"].append(torch.equal(weight, loaded))
    return {name: all(values) for name, values in same.items()}


def main() -> None:
    """Print one line per layer, number of ranks, and rank."""
    torch.set_default_dtype(torch.bfloat16)
    import_gdn()
    adapt(W12Config)
    cases: dict[str, Callable[[], dict[str, Any]]]
    cases = {name: partial(compare, make, load) for name, make, load in layers()}
    cases["linear_attn"] = compare_networks
    for name, examine in cases.items():
        for ranks in RANKS:
            for rank in range(ranks):
                place = {"tp_size": ranks, "tp_rank": rank}
                place |= {f"attn_{key}": value for key, value in place.items()}
                with get_parallel().override(**place):
                    found = examine()
                line = {"layer": name, "ranks": ranks, "rank": rank, **found}
                sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
