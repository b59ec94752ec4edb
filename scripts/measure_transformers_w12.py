#!/usr/bin/env python3
"""Measure W12 in Hugging Face Transformers: static cache, one CUDA graph per token, one request.

    python scripts/measure_transformers_w12.py --output docs/measurements/transformers_w12_h200.json

The model has the shape of Llama-3.1-8B and random weights, N(0, 0.02). Its modules are those of
transformers; for W12 every `torch.nn.Linear`, the head too, becomes a `W12Linear` of the same
weight. One graph holds a whole decode step: forward pass, greedy choice, next position. Both models
decode the same prompt in turns, in swapped order; a time is that of replaying the step's graph,
taken with CUDA events. Logits of the prompt are compared with those of the same weights in float32:
W12's may be as far from them as BF16's, but for chance. Verdict "accept" if they are, from a ratio
of 1.10 on.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sglang_bench.fleet import gpu_state
from sglang_bench.models import llama_8b
from sglang_bench.stats import PairedRatio, Spread, orders
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_kernels.w12.linear import W12Linear, warm

BAR_RATIO = 1.10
ERROR_RATIO = 1.25
"""How much farther from float32 W12's logits may be than BF16's."""
STD, PROMPT = 0.02, 128


def make_model(layers: int, device: str) -> LlamaForCausalLM:
    """The shape with weights N(0, 0.02), norms one."""
    shape = {**llama_8b(layers), "attn_implementation": "sdpa"}
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, STD) if weight.dim() > 1 else weight.fill_(1.0)
    return model


def encode(model: LlamaForCausalLM) -> tuple[LlamaForCausalLM, int, int]:
    """A copy with W12 layers; how many there are, and how many stayed as they were."""
    twin = copy.deepcopy(model)
    encoded = kept = 0
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                layer = W12Linear.from_linear(child)
                setattr(parent, name, layer)
                encoded, kept = encoded + (layer is not child), kept + (layer is child)
    return twin, encoded, kept


class Decoder:
    """Greedy decoding of one request with a static cache, a step at a time.

    On a GPU the step is captured once and replayed. All state is in tensors that the step changes
    in place: the token int64 [1, 1], its position int64 [1, 1] and the cache.
    """

    def __init__(self, model: LlamaForCausalLM, prompt: torch.Tensor, most_tokens: int) -> None:
        self.model, self.prompt = model, prompt
        self.length = prompt.shape[1] + most_tokens + 8
        self.cache = StaticCache(config=model.config, max_cache_len=self.length)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=prompt.device)
        self.position = torch.zeros_like(self.token)
        self.columns = torch.arange(self.length, device=prompt.device)
        self.logits = self.start()
        self._replay = self._capture() if prompt.is_cuda else self._step

    def start(self) -> torch.Tensor:
        """Prefill, choose the first token; return the last prompt row's logits [vocabulary]."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.zero_()
        rows = torch.arange(self.prompt.shape[1], device=self.prompt.device)
        logits = self._forward(self.prompt, rows[None])[0, -1]
        self.token.copy_(logits.argmax())
        self.position.fill_(self.prompt.shape[1])
        return logits.float()

    def decode(self, tokens: int) -> None:
        """`tokens` steps, launched and not waited for."""
        for _ in range(tokens):
            self._replay()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # a mask of four dimensions is taken as it is: making one would read values on the host
        mask = self.columns[None, None, None, :] <= positions[:, None, :, None]
        with torch.inference_mode():
            return self.model(
                input_ids=ids, position_ids=positions, attention_mask=mask,
                past_key_values=self.cache, use_cache=True,
            ).logits  # fmt: skip

    def _step(self) -> None:
        logits = self._forward(self.token, self.position)
        with torch.inference_mode():
            self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
            self.position.add_(1)

    def _capture(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay


def timed_ms(decoder: Decoder, tokens: int) -> float:
    """Milliseconds per token of one decoding."""
    decoder.start()
    if not decoder.prompt.is_cuda:
        begin_s = time.perf_counter()
        decoder.decode(tokens)
        return 1e3 * (time.perf_counter() - begin_s) / tokens
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    decoder.decode(tokens)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / tokens


def distance(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance in the 2-norm."""
    return float((exact - other).norm() / exact.norm())


def errors(model: LlamaForCausalLM, decoders: dict[str, Decoder]) -> dict[str, float]:
    """Distance of each decoder's logits from those of the model's weights in float32."""
    exact = copy.deepcopy(model).float()
    with torch.inference_mode():
        logits = exact(input_ids=decoders["bf16"].prompt, use_cache=False).logits[0, -1]
    return {name: distance(logits, decoder.logits) for name, decoder in decoders.items()}


def verdict_of(ratio: float, apart: dict[str, float]) -> str:
    """Whether W12 is fast enough, and its logits differ by the rounding of BF16 alone."""
    rounded = apart["w12"] <= ERROR_RATIO * apart["bf16"]
    return "accept" if ratio >= BAR_RATIO and rounded else "reject"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both models in turns."""
    model = make_model(args.layers, args.device)
    twin, encoded, kept = encode(model)
    if args.device == "cuda":
        warm()
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(0, model.config.vocab_size, (1, PROMPT), generator=generator)
    prompt = prompt.to(args.device)
    decoders = {
        name: Decoder(m, prompt, args.tokens) for name, m in (("bf16", model), ("w12", twin))
    }
    apart = errors(model, decoders)
    for decoder in decoders.values():
        timed_ms(decoder, args.tokens)
    blocks: dict[str, list[float]] = {name: [] for name in decoders}
    for order in orders(list(decoders), args.rounds):
        for name in order:
            blocks[name].append(timed_ms(decoders[name], args.tokens))
    return {
        "gpu": gpu_state(),
        "layers": args.layers,
        "prompt_tokens": PROMPT,
        "tokens": args.tokens,
        "linears": {"w12": encoded, "bf16": kept},
        "logits_from_float32": apart,
        "ms_per_token": {name: asdict(Spread.of(values)) for name, values in blocks.items()},
        "bf16_over_w12": asdict(PairedRatio.of(blocks["bf16"], blocks["w12"])),
        "bar_ratio": BAR_RATIO,
    }


def main() -> int:
    """Run and write; 0 for "accept"."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    results = measure(args)
    verdict = verdict_of(results["bf16_over_w12"]["ratio"], results["logits_from_float32"])
    envelope = build_envelope("scripts/measure_transformers_w12.py", results, verdict=verdict)
    atomic_write_text(args.output, render_json(envelope), force=True)
    print({name: s["median"] for name, s in results["ms_per_token"].items()},
          results["bf16_over_w12"], results["logits_from_float32"], verdict)  # fmt: skip
    return int(verdict != "accept")


if __name__ == "__main__":
    sys.exit(main())
