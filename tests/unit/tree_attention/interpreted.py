"""Run the kernels in Triton's interpreter on every case; one JSON line for each.

Needs torch and Triton, and neither pytest nor a GPU: `test_interpreted.py` starts it with the
interpreter of an environment that has both. The interpreter multiplies no bfloat16, so float32
shows errors of logic at its own precision, and float16 what rounding the weights adds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

import torch
from tree_attention_cases import CASES, Case, make, poisoned_memory, worst

from specpilot_kernels.tree_attention import attention, compact
from specpilot_kernels.tree_attention.plan import Plan, Tile

TILES = {
    "129 rows": Tile(64, 32, 16),
    "129 rows in one chain": Tile(128, 64, 16),
    "group of 6": Tile(32, 16, 8),  # two parts of the values
    "group of 16": Tile(16, 32, 16),
}
LEAST_BLOCKS = {"runs cross requests": 2, "ragged": 3}
HALF = ("window begins in the tree", "cap and window")


def attended(name: str, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Error of the kernels in units of what is allowed."""
    inputs = make(case, dtype)
    plan = Plan(TILES.get(name, Tile(16, 16, 16)), case.splits, LEAST_BLOCKS.get(name, 1))
    with poisoned_memory():
        out = attention.run_kernels(*inputs.tensors, **inputs.options, plan=plan)
    return {"case": name, "dtype": str(dtype).removeprefix("torch."), "error": worst(out, inputs)}


def compacted(path: list[list[int]], accepted: list[int], row_words: int) -> dict[str, Any]:
    """Whether the kernel leaves every pool as indexing does, other slots untouched."""
    generator = torch.Generator().manual_seed(len(path))
    rows = torch.tensor(path, dtype=torch.int32)
    batch, n_slots = len(path), 200
    pools = [torch.randn((n_slots, 2 * row_words), generator=generator).half() for _ in range(4)]
    slots = torch.randperm(n_slots, generator=generator)[: batch * 17].view(batch, 17)
    counts = torch.tensor(accepted, dtype=torch.int32)
    wanted = [pool.clone() for pool in pools]
    compact.compact_reference(wanted, slots, rows, counts)
    compact.run_kernel(compact.KvPools.of(pools), slots, rows, counts)
    same = all(torch.equal(pool, other) for pool, other in zip(pools, wanted, strict=True))
    return {"case": "compact", "path": path, "same": same}


def results() -> Iterator[dict[str, Any]]:
    """Every case in float32, some in float16, then the compaction."""
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.float16) if name in HALF else (torch.float32,):
            yield attended(name, case, dtype)
    shift = [0, *range(2, 17)]
    for path, accepted in (
        ([[0, 2, 3, 7, 8, -1], [0, 1, 4, 5, 6, 7], [0, -1, -1, -1, -1, -1]], [4, 5, 0]),
        ([shift, shift[::-1][-1:] + [-1] * 15], [15, 0]),
        ([[0, 16]], [1]),
        ([[0, 2, 3]], [-1]),
        ([[0]], [0]),
    ):
        for words in (4, 36):
            yield compacted(path, accepted, words)


def main() -> None:
    """Print what `results` gives as it comes."""
    torch.set_num_threads(1)
    for line in results():
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
