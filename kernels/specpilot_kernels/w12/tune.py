"""Measure which way of multiplying is fastest for a shape on this GPU, and store the answer.

    tune.tune([(5120, 6144)])            # for every later process on this machine

Plans are described in `plans`. A new plan changes which algorithm serves some numbers of rows,
so results may differ from before in their last bit.
"""

from __future__ import annotations

from functools import partial

import torch

from specpilot_kernels.timing import Work, in_turns
from specpilot_kernels.w12 import gemm, plans, prefill, selfcheck
from specpilot_kernels.w12.plans import Plan
from specpilot_kernels.w12.shapes import Shape
from specpilot_kernels.w12.weight import W12Weight

KERNEL_ROWS = (8, 16, 32, 48, 64)
PASSES_ROWS = (128, 192, 256, 320, 384, 512)
_NOISE = 0.98
"""Slower than cuBLAS is what repeats show to be slower: below this ratio."""


def tune(shapes: list[Shape]) -> dict[Shape, Plan]:
    """Measure each weight shape [out, in] and store its plan in the cache folder.

    Needs free device memory for some copies of the largest, about 14 GB for a 250,000-word head.
    Errors as in `gemm.gemm`.
    """
    measured = {shape: measure(shape) for shape in shapes}
    gpu = torch.cuda.get_device_name()
    plans.store(gpu, {plans.shape_name(*shape): plan for shape, plan in measured.items()})
    return measured


def measure(shape: Shape) -> Plan:
    """Return the best plan for one shape on the current GPU, by measurement."""
    return choose(*measurements(shape))


def measurements(shape: Shape) -> tuple[dict[int, float], dict[int, tuple[float, float]]]:
    """Return what `choose` takes for one shape, measured on the current GPU."""
    weights = selfcheck.normal_weights(shape)
    weight = W12Weight.from_bits(weights)
    x = torch.empty((max(PASSES_ROWS), shape[1]), dtype=torch.bfloat16, device="cuda").normal_()
    copies = selfcheck.cold_copies(weight.records.nbytes)
    speeds = selfcheck.speed(weight, weights, x, KERNEL_ROWS, copies=copies)
    ratios = {speed.rows: speed.ratio for speed in speeds}
    several = [selfcheck.copy_of(weight) for _ in range(copies)]
    times = {rows: _prefill_times(x[:rows], several) for rows in PASSES_ROWS}
    return ratios, times


def choose(ratios: dict[int, float], times: dict[int, tuple[float, float]]) -> Plan:
    """Return the plan that measurements ask for.

    ratios: rows -> cuBLAS's time / the GEMM's. times: rows -> seconds of repeated passes and of
    decoding. Both limits are those up to which the first way won at every number of rows.
    """
    passes_rows = gemm.MAX_ROWS
    for rows, (passes, decoding) in sorted(times.items()):
        if passes > decoding:
            break
        passes_rows = rows
    return Plan(kernel_rows(ratios), passes_rows)


def kernel_rows(ratios: dict[int, float]) -> int:
    """Return `Plan.kernel_rows` for measured rows -> cuBLAS's time / the GEMM's."""
    found = 0
    for rows, ratio in sorted(ratios.items()):
        if ratio < _NOISE:
            break
        found = rows
    return found


def _prefill_times(x: torch.Tensor, several: list[W12Weight]) -> tuple[float, float]:
    """Seconds of `prefill.in_passes` and of `prefill.by_decoding`, cold L2."""
    out = torch.empty((x.shape[0], several[0].out_features), dtype=x.dtype, device=x.device)
    works: dict[str, list[Work]] = {
        "passes": [partial(prefill.in_passes, x, weight, None, out) for weight in several],
        "decoding": [partial(prefill.by_decoding, x, weight, None, out) for weight in several],
    }
    times = in_turns(works)
    return times["passes"], times["decoding"]
