"""Compile the kernels for GPUs that are not there; one JSON line for each, with what it takes.

Needs Triton, which brings an assembler and a disassembler, and no GPU; `test_compiled.py` starts
it. Arguments: JSON objects as `request` below; without any, everything that is tested.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specpilot_kernels.cubin import kernel_usage
from specpilot_kernels.tree_attention import kernels, plan

POINTERS = {
    "q": "*bf16", "k_pool": "*bf16", "v_pool": "*bf16", "out": "*bf16", "kv_indptr": "*i32",
    "kv_indices": "*i64", "row_slots": "*i64", "ancestors": "*i32", "depths": "*i32",
    "part": "*fp32", "part_log": "*fp32", "pools": "*i64", "path": "*i32", "n_accepted": "*i32",
}  # fmt: skip
FLOATS = ("scale", "cap")
STRIDES = ("q_row_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride",
           "v_head_stride", "slot_words")  # fmt: skip
_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")


def compiled(kernel: Any, constants: dict[str, Any], arch: int, **options: int) -> dict[str, Any]:
    """Registers, stack and shared memory of a kernel, and what its loops over keys spill."""
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = (
            "constexpr" if name in constants
            else POINTERS.get(name, "fp32" if name in FLOATS else "i32")
        )  # fmt: skip
        if name in POINTERS or name in STRIDES:
            aligned[(index,)] = [["tt.divisibility", 16]]
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=positions, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    (usage,) = kernel_usage(built.asm["cubin"]).values()
    return {
        "registers": usage.registers,
        "stack_bytes": usage.stack_bytes,
        "shared_bytes": built.metadata.shared,
        **loops(built.asm["cubin"]),
    }


def loops(cubin: bytes) -> dict[str, Any]:
    """Innermost loops with products of matrices: how many, their length, and spills in them."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(folder / "nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    lines, labels = [], {}
    for line in text.splitlines():
        if line.startswith(".L_x_"):
            labels[line.split(":")[0]] = len(lines)
        elif found := _SASS.match(line):
            lines.append(found[2])
    spans = []
    for number, line in enumerate(lines):
        target = re.search(r"BRA.*?\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], number) < number:
            spans.append((labels[target[1]], number))
    inner = [
        lines[a:b]
        for a, b in spans
        if not any(a <= c and d < b for c, d in spans if (c, d) != (a, b))
    ]
    keys = [span for span in inner if any(re.search("H?G?MMA", line) for line in span)]
    return {
        "loops": [len(span) for span in keys],
        "spills_in_loops": sum("STL" in line or "LDL" in line for span in keys for line in span),
        "wgmma": any("HGMMA" in line for span in keys for line in span),
        "asynchronous_copies": [sum("LDGSTS" in line for line in span) for span in keys],
    }


def requests() -> Iterator[dict[str, Any]]:
    """Every tile that may be chosen; those of Hopper also with window and cap."""
    for head_dim, large, tile in plan.tiles():
        for extras in (False, True) if large and head_dim > 64 else (False,):
            yield {
                "kernel": "attend", "arch": 90 if large else 120, "head_dim": head_dim,
                "tile": asdict(tile), "extras": extras,
            }  # fmt: skip
    yield {"kernel": "combine", "arch": 90, "head_dim": 256}
    yield {"kernel": "compact", "arch": 90}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel: "attend" with a tile, "combine" or "compact"."""
    arch = request["arch"]
    if request["kernel"] == "compact":
        return compiled(kernels.compact, {"STEPS": 32, "CHUNK": 128}, arch, num_warps=4)
    extras = request.get("extras", False)
    tile = plan.Tile(**request.get("tile", {"block_m": 0, "block_n": 64, "value_dim": 0}))
    shared = {
        "GROUP": 6, "HEAD_DIM": request["head_dim"], "BATCH": 8, "BLOCK_N": tile.block_n,
        "LEAST_BLOCKS": 2, "WINDOWED": extras,
    }  # fmt: skip
    if request["kernel"] == "combine":
        return compiled(kernels.combine, {**shared, "SPLITS": 16, "CHUNK": 8}, arch, num_warps=4)
    own = {"WORDS": 2, "VALUE_DIM": tile.value_dim, "BLOCK_M": tile.block_m, "CAPPED": extras}
    return compiled(
        kernels.attend, {**shared, **own}, arch, num_warps=tile.warps, num_stages=tile.stages
    )


if __name__ == "__main__":
    for asked in [json.loads(word) for word in sys.argv[1:]] or requests():
        sys.stdout.write(json.dumps(asked | answer(asked)) + "\n")
