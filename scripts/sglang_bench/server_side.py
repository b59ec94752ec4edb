"""An SGLang plugin of the measurements: random weights that are the same in every server.

SGLang's dummy loader gives all matrices of one shape the same numbers, and norms of a thousandth,
so that all logits are about zero. `fill` draws every matrix from N(0, 0.02), seeded by its name:
outputs of two servers can be compared, and the exponents spread as in trained weights.

`$SPECPILOT_BENCH_GATE` names a file: worker processes of the server import everything and then
wait until it is there, so that servers start in a chosen order without paying for their imports.
Both are independent of specpilot's own plugin, and stock servers are measured with them too.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

GATE_ENV = "SPECPILOT_BENCH_GATE"
STD = 0.02
_TARGET = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
_SCHEDULER = "sglang.srt.managers.scheduler"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
_HEAVY = (_SCHEDULER, "sglang.srt.model_loader.loader", "sglang.srt.models.registry")
_POLL_S, _GIVE_UP_S = 0.1, 900.0


def register() -> None:
    """The entry point of group `sglang.srt.plugins`."""
    if _DETOKENIZER in sys.modules and _SCHEDULER not in sys.modules:
        return  # that process holds no model and need not wait
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, fill, HookType.REPLACE)
    gate = os.environ.get(GATE_ENV)
    if gate and multiprocessing.parent_process() is not None:
        for name in _HEAVY:
            importlib.import_module(name)
        wait_for(Path(gate))


def wait_for(gate: Path) -> None:
    """Note this process beside the gate, and return once the gate is there.

    TimeoutError after fifteen minutes, so that a forgotten server ends by itself.
    """
    with contextlib.suppress(OSError):
        gate.with_name(f"{gate.name}.{os.getpid()}.waits").touch()
    deadline = time.monotonic() + _GIVE_UP_S
    while not gate.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{gate} was never opened")
        time.sleep(_POLL_S)


def fill(model: Any, *_: Any, **__: Any) -> None:
    """Fill every floating-point parameter of `model`; the replaced function's arguments.

    Matrices (two dimensions or more) N(0, 0.02), vectors of norms 1 + N(0, 0.02), other vectors
    N(0, 0.02). A name is seeded by its own text, so layers differ and servers do not.
    """
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor):
            continue
        if torch.finfo(tensor.dtype).bits < 16:
            raise TypeError(f"{name} is {tensor.dtype}: only BF16 models are measured")
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        tensor.normal_(0.0, STD, generator=generator)
        if tensor.dim() < 2 and "norm" in name:
            tensor.add_(1.0)
