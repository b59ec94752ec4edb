"""`specpilot doctor --kernels`: are this GPU's kernels right, and how fast are they?"""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.ui import Reporter
from specpilot_cli.units import format_bytes

ROWS = (1, 8, 32, 64)
_HINT = "needs an NVIDIA GPU and pip install 'specpilot[gpu]'"


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The W12 product of one projection.

    ratios: by rows, how many times faster than cuBLAS with BF16 weights; cold L2.
    errors: what is wrong with the results; empty if nothing. skipped: why it was not tried.
    kernel_rows, passes_rows: the plan that now holds for the shape.
    """

    projection: str
    out_features: int
    in_features: int
    ratios: dict[int, float]
    errors: tuple[str, ...]
    skipped: str | None
    kernel_rows: int
    passes_rows: int


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Every projection of a model on a GPU."""

    gpu: str
    model: str
    rows: tuple[KernelRow, ...]

    @property
    def verdict(self) -> str:
        """`mismatch` if any result was wrong."""
        return "mismatch" if any(row.errors for row in self.rows) else "ok"


def check_kernels(model: str, *, tune: bool, reporter: Reporter) -> KernelReport:
    """Check and time the W12 product for the projections of a model.

    tune: also measure which way is fastest at which number of rows and store that. InputError for
    an unknown model, MachineError without a usable GPU.
    """
    from specpilot_kernels.build import GpuError
    from specpilot_kernels.w12.shapes import MODELS

    if model not in MODELS:
        raise InputError(f"no shapes are known of `{model}`", hint=f"one of {', '.join(MODELS)}")
    try:
        return _check(model, tune, reporter)
    except ImportError as error:
        raise MachineError(f"kernels cannot run: {error}", hint=_HINT) from error
    except GpuError as error:
        raise MachineError(str(error), hint=_HINT) from error


def _check(model: str, tune: bool, reporter: Reporter) -> KernelReport:
    from specpilot_kernels.w12 import gemm, selfcheck
    from specpilot_kernels.w12.shapes import MODELS

    gpu = gemm.gpu_name()
    reporter.note(f"{gpu}: compiling kernels, unless they are in the cache")
    gemm.warm()
    shapes = MODELS[model]
    rows: list[KernelRow] = []
    for done, (name, shape) in enumerate(shapes.items()):
        reporter.progress("projections", done, len(shapes))
        need, free = selfcheck.needed_bytes(shape), selfcheck.free_bytes()
        if need > free:
            rows.append(_row(gpu, name, shape, skipped=f"needs {format_bytes(need)} of memory"))
            continue
        if tune:
            _tune(shape)
        found = selfcheck.examine(shape, ROWS)
        ratios = {speed.rows: speed.ratio for speed in found.speeds}
        rows.append(_row(gpu, name, shape, ratios=ratios, errors=found.errors))
    reporter.progress("projections", len(shapes), len(shapes))
    return KernelReport(gpu, model, tuple(rows))


def _tune(shape: tuple[int, int]) -> None:
    from specpilot_kernels.w12 import tune

    tune.tune([shape])


def _row(
    gpu: str,
    name: str,
    shape: tuple[int, int],
    *,
    ratios: dict[int, float] | None = None,
    errors: tuple[str, ...] = (),
    skipped: str | None = None,
) -> KernelRow:
    from specpilot_kernels.w12 import plans

    plan = plans.plan_for(gpu, *shape)
    return KernelRow(
        name, *shape, ratios or {}, errors, skipped, plan.kernel_rows, plan.passes_rows
    )
