"""Weights and inputs of the W12 GEMM's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from specpilot_kernels.w12.weight import W12Weight

Make = Callable[[torch.Generator], torch.Tensor]


def normal(generator: torch.Generator, rows: int, cols: int, scale: float = 0.02) -> torch.Tensor:
    """N(0, scale) as bfloat16, on the generator's device."""
    values = torch.empty((rows, cols), device=generator.device)
    return values.normal_(0.0, scale, generator=generator).bfloat16()


def fields(generator: torch.Generator, low: int, high: int, rows: int, cols: int) -> torch.Tensor:
    """Random signs and mantissas, exponent fields uniform in low .. high."""

    def random(first: int, last: int) -> torch.Tensor:
        return torch.randint(
            first, last + 1, (rows, cols), generator=generator, device=generator.device
        )

    patterns = random(0, 1) << 15 | random(low, high) << 7 | random(0, 127)
    return patterns.to(torch.int16).view(torch.bfloat16)


def _chance(generator: torch.Generator, share: float, rows: int, cols: int) -> torch.Tensor:
    return torch.rand((rows, cols), generator=generator, device=generator.device) < share


def _zeros_among_ones(generator: torch.Generator) -> torch.Tensor:
    """Two fifths zeros among equal weights: what replaces an escape is as large as a weight."""
    ones = torch.ones((256, 512), device=generator.device)
    ones[_chance(generator, 0.4, 256, 512)] = 0
    return ones.bfloat16()


def _special_channels(generator: torch.Generator) -> torch.Tensor:
    """Zero, minus zero, denormal and tiny channels among ordinary ones; most have lo = 0."""
    weights = normal(generator, 300, 320)
    weights[0::7] = 0
    weights[1::7] = -0.0
    weights[2::7] = fields(generator, 0, 0, 300, 320)[2::7]
    weights[3::7] = fields(generator, 0, 14, 300, 320)[3::7]
    weights[4::7] = fields(generator, 1, 16, 300, 320)[4::7]
    return weights


def _sparse(generator: torch.Generator) -> torch.Tensor:
    weights = normal(generator, 512, 1024)
    weights[_chance(generator, 0.01, 512, 1024)] = 0
    return weights


def _both_ends(generator: torch.Generator) -> torch.Tensor:
    low, high = (fields(generator, end, end, 256, 512) for end in (112, 127))
    return torch.where(_chance(generator, 0.5, 256, 512), low, high)


def _mixed(generator: torch.Generator) -> torch.Tensor:
    spread = torch.randn((384, 640), generator=generator, device=generator.device) * 8
    return (torch.exp(spread) * 1e-3).bfloat16()


CONTENTS: dict[str, Make] = {
    "normal": lambda g: normal(g, 640, 1024),
    "one record": lambda g: normal(g, 128, 64),
    "odd": lambda g: normal(g, 129, 517),
    "inputs not of eight": lambda g: normal(g, 300, 4101),
    "one channel": lambda g: normal(g, 1, 5000),
    "one input": lambda g: normal(g, 700, 1),
    "one weight": lambda g: normal(g, 1, 1, 1.0),
    "more inputs than 2^16": lambda g: normal(g, 192, 65600),
    "all positive": lambda g: normal(g, 256, 8192).abs(),
    "zeros 1 %": _sparse,
    "zeros among ones": _zeros_among_ones,
    "all exponents": lambda g: fields(g, 0, 254, 256, 512),
    "mixed exponents": _mixed,
    "lowest window": lambda g: fields(g, 1, 16, 200, 256),
    "highest window": lambda g: fields(g, 239, 254, 200, 256),
    "both ends of a window": _both_ends,
    "special channels": _special_channels,
    "all denormal": lambda g: fields(g, 0, 0, 130, 130),
    "all zero": lambda g: torch.zeros((256, 128), device=g.device).bfloat16(),
}

# With inputs around 1 the results of these would be too large for bfloat16.
INPUT_SCALE = {"highest window": 2.0**-24, "all exponents": 2.0**-24}


def content(name: str, device: str = "cuda") -> torch.Tensor:
    """The weights of that name, the same at every call."""
    return CONTENTS[name](torch.Generator(device=device).manual_seed(11))


def inputs(rows: int, cols: int, *, scale: float = 1.0, seed: int = 5) -> torch.Tensor:
    """N(0, scale) as bfloat16 on the GPU."""
    return normal(torch.Generator(device="cuda").manual_seed(seed), rows, cols, scale)


def exact(weights: torch.Tensor) -> W12Weight:
    """Encode, however many escapes there are."""
    return W12Weight.from_bits(weights, max_escape_ratio=1.0)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two bfloat16 tensors have the same patterns."""
    return torch.equal(first.view(torch.int16), second.view(torch.int16))


@contextmanager
def little_memory(spare_bytes: int = 16 << 20) -> Iterator[None]:
    """Let torch take no more than so much from the device, whatever it has kept until now."""
    torch.cuda.empty_cache()
    taken = []
    for size in (64 << 20, 16 << 20, 2 << 20):
        reserved = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == reserved:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        taken.pop()  # this one was new memory
        torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + spare_bytes
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
