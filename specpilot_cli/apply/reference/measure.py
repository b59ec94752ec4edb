"""What a recipe measures before it serves: lattices, τ(N), c(N), the ceiling, the node budget.

Everything here sees dev prompts only; the gates judge on unseen ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specpilot_cli.apply.recipes import take_per_benchmark
from specpilot_cli.apply.reference.preflight import CheckedRecipe
from specpilot_cli.ceiling.factors import Ceiling, measure_ceiling
from specpilot_cli.ceiling.peaks import peaks_for
from specpilot_cli.ceiling.speedup import (
    SpeedupPoint,
    TauPoint,
    best_budget,
    speedup_at,
    speedup_curve,
)
from specpilot_cli.io.json_file import write_json
from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.replay.run import replay
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve
from specpilot_cli.stats import geometric_mean
from specpilot_cli.ui import Reporter

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.schema.lattice import LatticeRecording

STOCK_LATTICE, TREE_LATTICE = "lattices-stock.safetensors", "lattices-tree.safetensors"


@dataclass(frozen=True, slots=True)
class Projection:
    """The same τ(N) under the recorded step times of another machine; never a measurement."""

    curve: StepTimeCurve
    points: tuple[SpeedupPoint, ...]
    best: SpeedupPoint
    stock: SpeedupPoint


@dataclass(frozen=True, slots=True)
class Measurements:
    """Phase 0 of a recipe.

    stock_row: the released chain on its own block's lattices. trees: every policy on the tree's
    lattices. points: Eq. 3 at each budget under the step times of this run, τ as `balanced_tau`;
    chosen: their best.
    """

    stock_row: ReplayRow
    trees: ReplayResult
    profile: StepProfile
    curve: StepTimeCurve
    stock_point: SpeedupPoint
    points: tuple[SpeedupPoint, ...]
    chosen: SpeedupPoint
    ceiling: Ceiling
    projection: Projection | None


def measure(checked: CheckedRecipe, folder: Path, *, reporter: Reporter) -> Measurements:
    """Record, replay, profile; files go to `folder` (see `docs/apply.md`)."""
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.spec import SpecConfig

    recipe, tree = checked.loaded.recipe, checked.tree
    engine = ReferenceEngine(
        checked.loaded.target,
        checked.loaded.drafter,
        SpecConfig("chain", recipe.stock.block),
        dtype=recipe.regime.dtype,
        threads=recipe.regime.threads,
    )
    stock_lattices, tree_lattices = _record(checked, engine, folder, reporter)
    stock_nodes = recipe.stock.block - 1
    stock_row = replay(stock_lattices, ["chain"], nodes=[stock_nodes]).row("chain", stock_nodes)
    trees = replay(tree_lattices, nodes=tree.measured_nodes, reporter=reporter)
    profile, curve, stock_step_s = _time_steps(checked, engine, reporter)
    write_json(folder / "step-profile.json", profile)
    write_json(folder / "step-times.json", curve)

    policy = "best-first" if tree.scoring == "conditional" else "marginal"
    taus = [TauPoint(n, balanced_tau(trees.row(policy, n))) for n in tree.measured_nodes]
    points = speedup_curve(taus, curve)
    chosen = choose_budget(points, tree.nodes)
    stock_tau = balanced_tau(stock_row)
    ceiling = measure_ceiling(profile, peaks_for(profile), tau=stock_tau, tau_best=chosen.tau)
    return Measurements(
        stock_row=stock_row,
        trees=trees,
        profile=profile,
        curve=curve,
        stock_point=stock_point(stock_nodes, stock_tau, stock_step_s, curve),
        points=points,
        chosen=chosen,
        ceiling=ceiling,
        projection=None
        if checked.projection is None
        else project(checked.projection, points, stock_nodes, stock_tau),
    )


def balanced_tau(row: ReplayRow) -> float:
    """τ of one replay row with every benchmark weighing the same.

    The geometric mean of the benchmarks' own τ: under one step cost, ratios of it are the gains
    that the paired benchmark estimates. The pooled τ would choose for the benchmarks that take
    most steps, which are the ones where no tree helps.
    """
    return geometric_mean([estimate.value for estimate in row.benchmarks.values()])


def choose_budget(points: Sequence[SpeedupPoint], nodes: int | Literal["auto"]) -> SpeedupPoint:
    """The recipe's fixed budget, or with `auto` the one with the largest τ / c."""
    if nodes == "auto":
        return best_budget(points)
    return next(point for point in points if point.n_nodes == nodes)


def _record(
    checked: CheckedRecipe, engine: ReferenceEngine, folder: Path, reporter: Reporter
) -> tuple[LatticeRecording, LatticeRecording]:
    """Dense lattices at the stock block and at the tree's: masked positions see each other, so
    a short block is not a cut long one."""
    from specpilot_cli.engines.reference.record import record_dense

    found = []
    blocks = (checked.loaded.recipe.stock.block, checked.tree.block)
    for block, name in zip(blocks, (STOCK_LATTICE, TREE_LATTICE), strict=True):
        recording = record_dense(engine, checked.dev, block, reporter=reporter).recording
        write_lattice(folder / name, recording)
        found.append(recording)
    return found[0], found[1]


def _time_steps(
    checked: CheckedRecipe, engine: ReferenceEngine, reporter: Reporter
) -> tuple[StepProfile, StepTimeCurve, float]:
    """The stock step by kernel class, tree steps against rows, and the stock step beside them."""
    from specpilot_cli.engines.reference.profiler import (
        Plan,
        describe_device,
        profile_steps,
        step_times_beside_chain,
    )

    recipe = checked.loaded.recipe
    prompts = take_per_benchmark(list(checked.dev), 1)
    plan = Plan(
        prompts=[engine.encode(prompt.text) for prompt in prompts],
        steps=recipe.recording.timed_steps,
        repeats=recipe.recording.timed_blocks,
        concurrency=recipe.regime.requests,
        new_tokens=min(prompt.max_new_tokens for prompt in prompts),
        real_prompts=True,
    )
    device = describe_device(engine)
    profile = profile_steps(engine, plan, device=device, reporter=reporter)
    curve, stock_step_s = step_times_beside_chain(
        engine,
        plan,
        [n + 1 for n in checked.tree.measured_nodes],
        block=checked.tree.block,
        chain_block=recipe.stock.block,
        device=device,
        reporter=reporter,
    )
    return profile, curve, stock_step_s


def stock_point(n_nodes: int, tau: float, step_s: float, curve: StepTimeCurve) -> SpeedupPoint:
    """Eq. 3 of the stock chain from its own timed step, which no tree step stands in for."""
    c = step_s / curve.ar_step_s
    return SpeedupPoint(
        n_nodes=n_nodes,
        rows=n_nodes + 1,
        tau=tau,
        step_s=step_s,
        c=c,
        speedup=tau / c,
        basis="recorded",
    )


def project(
    curve: StepTimeCurve, points: Sequence[SpeedupPoint], stock_nodes: int, stock_tau: float
) -> Projection:
    """The measured τ of every budget, and of stock, at the step times of another machine."""
    moved = speedup_curve([TauPoint(p.n_nodes, p.tau) for p in points], curve)
    return Projection(
        curve, moved, best_budget(moved), speedup_at(curve, stock_nodes, tau=stock_tau)
    )
