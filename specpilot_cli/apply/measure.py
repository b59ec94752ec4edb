"""What a recipe measures before it serves: lattices, τ(N), c(N), the ceiling, the node budget.

Everything here sees dev prompts only; the gates judge on unseen ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specpilot_cli.apply.recipes import LoadedRecipe, take_per_benchmark
from specpilot_cli.ceiling.factors import Ceiling, measure_ceiling
from specpilot_cli.ceiling.peaks import peaks_for
from specpilot_cli.ceiling.speedup import (
    SpeedupPoint,
    TauPoint,
    best_budget,
    speedup_at,
    speedup_curve,
)
from specpilot_cli.ceiling.step_times import load_step_times
from specpilot_cli.io.json_file import write_json
from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.replay.result import ReplayResult, ReplayRow
from specpilot_cli.replay.run import replay
from specpilot_cli.schema.recipe import TreeMechanism
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve
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
    lattices. points: Eq. 3 at each budget under the step times of this run; chosen: their best.
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


def measure(
    loaded: LoadedRecipe, tree: TreeMechanism, folder: Path, *, reporter: Reporter
) -> Measurements:
    """Record, replay, profile; files go to `folder` (see `docs/apply.md`)."""
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.spec import SpecConfig

    recipe = loaded.recipe
    engine = ReferenceEngine(
        loaded.target,
        loaded.drafter,
        SpecConfig("chain", recipe.stock.block),
        dtype=recipe.regime.dtype,
        threads=recipe.regime.threads,
    )
    stock_lattices, tree_lattices = _record(loaded, tree, engine, folder, reporter)
    stock_nodes = recipe.stock.block - 1
    stock_row = replay(stock_lattices, ["chain"], nodes=[stock_nodes]).row("chain", stock_nodes)
    budgets = sorted(set(tree.budgets) | ({tree.nodes} if tree.nodes != "auto" else set()))
    trees = replay(tree_lattices, nodes=budgets, reporter=reporter)
    profile, curve = _time_steps(loaded, tree, engine, budgets, reporter)
    write_json(folder / "step-profile.json", profile, force=True)
    write_json(folder / "step-times.json", curve, force=True)

    policy = "best-first" if tree.scoring == "conditional" else "marginal"
    taus = trees.curve(policy)
    points = speedup_curve([TauPoint(n, taus[n]) for n in budgets], curve)
    chosen = (
        best_budget(points)
        if tree.nodes == "auto"
        else next(p for p in points if p.n_nodes == tree.nodes)
    )
    stock_point = _stock_point(stock_row, profile, curve)
    ceiling = measure_ceiling(
        profile, peaks_for(profile), tau=stock_row.tau.value, tau_best=chosen.tau
    )
    projection = (
        None if recipe.projection is None else _project(recipe.projection, points, stock_row)
    )
    return Measurements(
        stock_row, trees, profile, curve, stock_point, points, chosen, ceiling, projection
    )


def _record(
    loaded: LoadedRecipe,
    tree: TreeMechanism,
    engine: ReferenceEngine,
    folder: Path,
    reporter: Reporter,
) -> tuple[LatticeRecording, LatticeRecording]:
    """Dense lattices at the stock block and at the tree's: masked positions see each other, so
    a short block is not a cut long one."""
    from specpilot_cli.engines.reference.record import record_dense

    prompts = take_per_benchmark(loaded.dev, loaded.recipe.recording.prompts_per_benchmark)
    found = []
    for block, name in ((loaded.recipe.stock.block, STOCK_LATTICE), (tree.block, TREE_LATTICE)):
        recording = record_dense(engine, prompts, block, reporter=reporter).recording
        write_lattice(folder / name, recording, force=True)
        found.append(recording)
    return found[0], found[1]


def _time_steps(
    loaded: LoadedRecipe,
    tree: TreeMechanism,
    engine: ReferenceEngine,
    budgets: list[int],
    reporter: Reporter,
) -> tuple[StepProfile, StepTimeCurve]:
    from specpilot_cli.engines.reference.profiler import (
        Plan,
        describe_device,
        profile_steps,
        step_time_curve,
    )

    recording = loaded.recipe.recording
    prompts = take_per_benchmark(loaded.dev, 1)
    plan = Plan(
        prompts=[engine.encode(prompt.text) for prompt in prompts],
        steps=recording.timed_steps,
        repeats=recording.timed_blocks,
        concurrency=loaded.recipe.regime.requests,
        new_tokens=min(prompt.max_new_tokens for prompt in prompts),
        real_prompts=True,
    )
    device = describe_device(engine)
    profile = profile_steps(engine, plan, device=device, reporter=reporter)
    curve = step_time_curve(
        engine, plan, [n + 1 for n in budgets], block=tree.block, device=device, reporter=reporter
    )
    return profile, curve


def _stock_point(row: ReplayRow, profile: StepProfile, curve: StepTimeCurve) -> SpeedupPoint:
    """Eq. 3 of the stock chain from its own timed step, which no tree step stands in for."""
    c = profile.t_step_s / curve.ar_step_s
    return SpeedupPoint(
        n_nodes=profile.nodes,
        rows=profile.rows,
        tau=row.tau.value,
        step_s=profile.t_step_s,
        c=c,
        speedup=row.tau.value / c,
        basis="recorded",
    )


def _project(name: str, points: tuple[SpeedupPoint, ...], stock: ReplayRow) -> Projection:
    curve = load_step_times(name)
    moved = speedup_curve([TauPoint(p.n_nodes, p.tau) for p in points], curve)
    now = speedup_at(curve, stock.nodes or 0, tau=stock.tau.value)
    return Projection(curve, moved, best_budget(moved), now)
