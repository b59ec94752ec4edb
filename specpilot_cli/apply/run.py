"""From a recipe to a verdict.

Phases, each announced: prepare weights, record and replay, time steps, serve, benchmark, audit.
Everything is written into one new folder; `result.json` comes last, so a folder without it is not
a result, and a later run never reads an earlier one's files.
"""

from __future__ import annotations

import importlib.util
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specpilot_cli.apply.gates import bench, bench_settings, force
from specpilot_cli.apply.measure import Measurements, measure
from specpilot_cli.apply.recipes import LoadedRecipe, take_per_benchmark
from specpilot_cli.apply.serving import SystemPlan, launch
from specpilot_cli.convert_w12.convert import Conversion, convert_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.engines.reference.launch import require_engine
from specpilot_cli.engines.reference.spec import LogitFault, SpecConfig
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.paired_bench.types import AR, BASELINE, CANDIDATE, PairedBenchResult
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.ui import Reporter, SilentReporter

RESULT_FILE, REPORT_FILE = "result.json", "report.html"
W12_FOLDER = "target-w12"

RecipeVerdict = Literal["promote", "no", "reject", "invalid"]


@dataclass(frozen=True, slots=True)
class ApplySettings:
    """What the user may change: size of the gates, ports, and a deliberate fault to be caught."""

    prompts_per_benchmark: int | None = None
    first_port: int | None = None
    fault: LogitFault | None = None


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """Everything one run of a recipe found.

    `audit` is None only where the benchmark was invalid, so that there were no answers to audit.
    """

    loaded: LoadedRecipe
    settings: ApplySettings
    folder: Path
    conversion: Conversion | None
    measured: Measurements
    systems: tuple[SystemPlan, ...]
    bench: PairedBenchResult
    audit: TokenForceResult | None

    @property
    def verdict(self) -> RecipeVerdict:
        """`reject` if the audit does; then the benchmark's own word."""
        if self.audit is None or "invalid" in (self.audit.verdict, self.bench.verdict):
            return "invalid"
        if self.audit.verdict == "reject":
            return "reject"
        return self.bench.verdict

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is what it is, most important first."""
        found = list(self.audit.reasons) if self.audit is not None else []
        if self.bench.summary.decision is not None:
            found.append(self.bench.summary.decision.reason)
        return (*found, *self.bench.summary.reasons)


def apply_recipe(
    loaded: LoadedRecipe,
    folder: Path,
    *,
    settings: ApplySettings | None = None,
    reporter: Reporter = SilentReporter(),
) -> RecipeResult:
    """Run the recipe; `folder` must be new or empty.

    Raises `InputError` for a folder in use, `MachineError` for what this machine lacks and for a
    server that does not start or does not run what it was asked to.
    """
    settings = settings or ApplySettings()
    tree = loaded.recipe.tree
    if tree is None:
        raise InputError("this recipe has no best-first-tree mechanism", where=str(loaded.path))
    require_engine()
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError(
            "the report needs matplotlib", hint="pip install 'specpilot[torch,report]'"
        )
    _claim(folder)
    reporter.note(f"1/5 weights: {'W12' if loaded.recipe.uses_w12 else 'as they are'}")
    conversion = _prepare(loaded, folder, reporter)
    reporter.note("2/5 where the speed goes: record, replay and time on dev prompts")
    measured = measure(loaded, tree, folder, reporter=reporter)
    chosen = measured.chosen
    reporter.note(
        f"node budget {chosen.n_nodes}: τ {chosen.tau:.2f} at c {chosen.c:.2f}, predicted "
        f"{chosen.speedup / measured.stock_point.speedup:.3f}× over stock"
    )
    systems = plan_systems(loaded, folder, chosen.n_nodes, settings)
    with ExitStack() as stack:
        reporter.note("3/5 serve: stock, tuned and plain decoding, all resident")
        engines = launch(
            list(systems), loaded.recipe.regime, folder / "logs", stack,
            first_port=settings.first_port, reporter=reporter,
        )  # fmt: skip
        reporter.note("4/5 is it faster? paired benchmark on unseen prompts")
        sizes = bench_settings(loaded, settings.prompts_per_benchmark)
        timed = bench(loaded, engines, sizes, folder, reporter=reporter)
        reporter.note("5/5 is it lossless? token forcing of the timed answers")
        audit = None
        if timed.verdict != "invalid":
            audit = force(loaded, engines, timed, reporter=reporter)
    return RecipeResult(loaded, settings, folder, conversion, measured, systems, timed, audit)


def plan_systems(
    loaded: LoadedRecipe, folder: Path, n_nodes: int, settings: ApplySettings
) -> tuple[SystemPlan, ...]:
    """Stock, tuned and AR servers of a recipe, the tree at `n_nodes`."""
    recipe, tree = loaded.recipe, loaded.recipe.tree
    assert tree is not None  # checked by the caller
    weights = folder / W12_FOLDER if recipe.uses_w12 else loaded.target
    return (
        SystemPlan(
            BASELINE, "stock chain", loaded.target, loaded.drafter,
            SpecConfig("chain", recipe.stock.block), "bf16",
        ),
        SystemPlan(
            CANDIDATE, "tuned", weights, loaded.drafter,
            SpecConfig("tree", tree.block, n_nodes, tree.scoring),
            "w12" if recipe.uses_w12 else "bf16", settings.fault,
        ),
        SystemPlan(AR, "plain decoding", loaded.target, None, SpecConfig("ar"), "bf16"),
    )  # fmt: skip


def _prepare(loaded: LoadedRecipe, folder: Path, reporter: Reporter) -> Conversion | None:
    if not loaded.recipe.uses_w12:
        return None
    source = open_hf_folder(loaded.target)
    return convert_folder(
        source, folder / W12_FOLDER, Selection((), ()), threads=1, force=False, reporter=reporter
    )


def _claim(folder: Path) -> None:
    """Take a new or empty folder; one with content is never written into."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"`{folder}` is in use",
            where="--out",
            hint="name a new folder; results of earlier runs are never overwritten",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create `{folder}`: {error.strerror}", where="--out") from error


def describe_plan(
    loaded: LoadedRecipe, folder: Path, settings: ApplySettings
) -> dict[str, str | int]:
    """What `apply_recipe` would do, checked as far as possible without starting anything."""
    recipe = loaded.recipe
    require_engine()
    tree = recipe.tree
    if tree is None:
        raise InputError("this recipe has no best-first-tree mechanism", where=str(loaded.path))
    sizes = bench_settings(loaded, settings.prompts_per_benchmark)
    unseen = take_per_benchmark(loaded.unseen, sizes.limit or 0)
    nodes = tree.nodes if tree.nodes != "auto" else max(tree.budgets)
    plan: dict[str, str | int] = {
        "folder": str(folder),
        "target": str(loaded.target),
        "drafter": str(loaded.drafter),
        "mechanisms": ", ".join(m.mechanism for m in recipe.mechanisms),
        "node budgets": ", ".join(map(str, tree.budgets if tree.nodes == "auto" else [tree.nodes])),
        "timed prompts": len(unseen),
        "runs": sizes.runs,
        "A/A sessions": sizes.aa_sessions,
    }
    for index, system in enumerate(plan_systems(loaded, folder, nodes, settings)):
        port = 0 if settings.first_port is None else settings.first_port + index
        plan[f"server {system.name}"] = shlex.join(system.command(recipe.regime, port))
    return plan
