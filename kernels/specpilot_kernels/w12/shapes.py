"""Shapes of the projections of the supported models, for tuning, checks and benchmarks.

[out_features, in_features], projections that engines fuse fused, without embedding tables. Read
off the models' published configurations.
"""

from __future__ import annotations

from typing import Final

Shape = tuple[int, int]

QWEN_27B: Final = "Qwen3.8-27B"

MODELS: Final[dict[str, dict[str, Shape]]] = {
    QWEN_27B: {
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
        "gdn_in": (16384, 5120),
        "gdn_out": (5120, 6144),
        "attn_qkv": (14336, 5120),
        "attn_o": (5120, 6144),
        "head": (248320, 5120),
    },
    "Qwen3.5-4B": {
        "gate_up": (18432, 2560),
        "down": (2560, 9216),
        "gdn_in": (12288, 2560),
        "gdn_out": (2560, 4096),
        "attn_qkv": (10240, 2560),
        "attn_o": (2560, 4096),
        "head": (248320, 2560),
    },
    "Muse-Glimmer-30B": {
        "gate_up": (39936, 6656),
        "down": (6656, 19968),
        "attn_qkv": (4608, 6656),
        "attn_gate": (4096, 6656),
        "attn_o": (6656, 4096),
        "head": (202048, 6656),
    },
    "Gemma-4-12B": {
        "gate_up": (30720, 3840),
        "down": (3840, 15360),
        "window_qkv": (8192, 3840),
        "window_o": (3840, 4096),
        "full_qk": (8704, 3840),
        "full_o": (3840, 8192),
        "head": (262144, 3840),
    },
    "Llama-3.1-8B": {
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "attn_qkv": (6144, 4096),
        "attn_o": (4096, 4096),
        "head": (128256, 4096),
    },
}

SMALL: Final[dict[str, dict[str, Shape]]] = {
    QWEN_27B: {"gdn_ba": (96, 5120), "gdn_in_ba": (16480, 5120)},
    "Qwen3.5-4B": {"gdn_ba": (64, 2560), "gdn_in_ba": (12352, 2560)},
}
"""The second input projection of gated delta networks, alone and below the first: no part of the
benchmarks' means, which are of projections that take time."""


def distinct() -> list[Shape]:
    """Every shape of the models once, smallest first."""
    tables = (*MODELS.values(), *SMALL.values())
    found = {shape for shapes in tables for shape in shapes.values()}
    return sorted(found, key=lambda shape: (shape[0] * shape[1], shape))
