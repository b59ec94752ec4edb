"""Every tile of the kernels compiles, fits its GPU, and spills nothing where time is spent."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from triton_programs import lines_of

from specpilot_kernels.tree_attention import plan

_SHARED_LIMIT = {90: 227 * 1024, 120: 99 * 1024}
_REGISTERS = 65_536
# Spilled once for each request, before and after its loops.
_STACK_LIMIT = 128


def _attend(head_dim: int, arch: int, *, extras: bool = False) -> str:
    """The tile for many rows on a GPU of that kind; extras: window and cap."""
    tile = [t for dim, large, t in plan.tiles() if dim == head_dim and large == (arch == 90)][-1]
    wanted = {"kernel": "attend", "arch": arch, "head_dim": head_dim, "tile": asdict(tile)}
    return json.dumps(wanted | {"extras": extras})


def _holds(line: dict[str, Any]) -> None:
    tile = line.get("tile", {"warps": 4, "resident": 1})
    assert line["shared_bytes"] * tile["resident"] <= _SHARED_LIMIT[line["arch"]], line
    taken = -(-line["registers"] // 8) * 8 * 32 * tile["warps"] * tile["resident"]
    assert taken <= _REGISTERS, line
    assert line["spills_in_loops"] == 0, line
    assert line["stack_bytes"] <= _STACK_LIMIT, line
    if line["kernel"] == "attend":
        assert len(line["loops"]) == 2  # the prefix's and the tree's
        assert line["wgmma"] == (line["arch"] == 90)
        assert min(line["asynchronous_copies"]) > 0, line


def test_main_tiles_compile_without_spills() -> None:
    asked = (
        _attend(256, 90), _attend(128, 90, extras=True), _attend(512, 90), _attend(256, 120),
        json.dumps({"kernel": "combine", "arch": 90, "head_dim": 256}),
        json.dumps({"kernel": "compact", "arch": 90}),
    )  # fmt: skip
    lines = lines_of("compiled.py", *asked)
    assert len(lines) == len(asked)
    for line in lines:
        _holds(line)


@pytest.mark.slow
@pytest.mark.extended
def test_every_tile_compiles_without_spills() -> None:
    lines = lines_of("compiled.py")
    assert len(lines) > len(plan.tiles())
    for line in lines:
        _holds(line)
