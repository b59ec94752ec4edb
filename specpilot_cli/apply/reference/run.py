"""From a checked recipe to a verdict, in five announced phases.

Prepare weights; record, replay and time; serve; benchmark; audit. The caller owns the folder
(`folder.py`) and writes `result.json` into it last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.apply.folder import LOGS
from specpilot_cli.apply.gates import RecipeVerdict, bench, force, judge
from specpilot_cli.apply.phases import Phases
from specpilot_cli.apply.recipes import LoadedRecipe
from specpilot_cli.apply.reference.measure import Measurements, measure
from specpilot_cli.apply.reference.preflight import ApplySettings, CheckedRecipe
from specpilot_cli.apply.reference.systems import SystemPlan
from specpilot_cli.apply.serving import launch
from specpilot_cli.convert_w12.convert import Conversion, convert_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.paired_bench.types import AR, BASELINE, CANDIDATE, PairedBenchResult
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.ui import Reporter, SilentReporter

W12_FOLDER = "target-w12"


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """Everything one run of a recipe found.

    `audit` is None only where the benchmark was invalid, so that there were no answers to audit.
    phases_s: wall seconds of each phase.
    """

    checked: CheckedRecipe
    folder: Path
    conversion: Conversion | None
    measured: Measurements
    systems: tuple[SystemPlan, ...]
    bench: PairedBenchResult
    audit: TokenForceResult | None
    phases_s: dict[str, float]

    @property
    def loaded(self) -> LoadedRecipe:
        """The recipe and the paths of what it names."""
        return self.checked.loaded

    @property
    def settings(self) -> ApplySettings:
        """What the user changed."""
        return self.checked.settings

    @property
    def verdict(self) -> RecipeVerdict:
        """See `judge`."""
        return judge(self.bench.verdict, None if self.audit is None else self.audit.verdict)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is what it is: the audit's reasons if they decided, else the gain's."""
        if self.audit is not None and self.audit.verdict != "accept":
            return self.audit.reasons
        return self.bench.summary.reasons


def apply_recipe(
    checked: CheckedRecipe, folder: Path, *, reporter: Reporter = SilentReporter()
) -> RecipeResult:
    """Run the recipe in `folder`, which is the caller's, empty but for its marker.

    Raises `InputError` for models that do not load, `MachineError` for a server that does not
    start, dies, or does not run what it was asked to, `MeasurementInvalid` for an audit that
    carries no verdict. No server outlives the call.
    """
    phases = Phases(reporter, total=5)
    phases.begin("weights", f"weights: {_weights_text(checked)}")
    conversion = prepare(checked, folder, reporter)
    phases.begin("measure", "where the speed goes: record, replay and time on dev prompts")
    measured = measure(checked, folder, reporter=reporter)
    _announce_budget(measured, reporter)
    systems = plan_systems(checked, folder, measured.chosen.n_nodes)
    phases.begin("serve", "serve: stock, tuned and plain decoding, all resident")
    first_port, audit = checked.settings.first_port, None
    with launch(systems, folder / LOGS, first_port=first_port, reporter=reporter) as fleet:
        phases.begin("paired_bench", "is it faster? paired benchmark on unseen prompts")
        timed = bench(checked.gates, fleet, folder, reporter=reporter)
        if timed.verdict != "invalid":
            phases.begin("token_force", "is it lossless? token forcing of the timed answers")
            audit = force(checked.gates, fleet, timed, reporter=reporter)
        phases.end()
    return RecipeResult(
        checked, folder, conversion, measured, systems, timed, audit, phases.seconds
    )


def _weights_text(checked: CheckedRecipe) -> str:
    return "W12" if checked.loaded.recipe.uses_w12 else "as they are"


def _announce_budget(measured: Measurements, reporter: Reporter) -> None:
    chosen, stock = measured.chosen, measured.stock_point
    reporter.note(
        f"node budget {chosen.n_nodes}: τ {chosen.tau:.2f} at c {chosen.c:.2f}, predicted "
        f"{chosen.speedup / stock.speedup:.3f}× over stock"
    )


def plan_systems(checked: CheckedRecipe, folder: Path, n_nodes: int) -> tuple[SystemPlan, ...]:
    """Stock, tuned and AR servers of a recipe, the tree at `n_nodes`."""
    loaded, recipe, tree = checked.loaded, checked.loaded.recipe, checked.tree
    weights = folder / W12_FOLDER if recipe.uses_w12 else loaded.target
    return (
        SystemPlan(
            BASELINE, "stock chain", loaded.target, loaded.drafter,
            SpecConfig("chain", recipe.stock.block), "bf16", regime=recipe.regime,
        ),
        SystemPlan(
            CANDIDATE, "tuned", weights, loaded.drafter,
            SpecConfig("tree", tree.block, n_nodes, tree.scoring),
            "w12" if recipe.uses_w12 else "bf16", checked.settings.fault, recipe.regime,
        ),
        SystemPlan(
            AR, "plain decoding", loaded.target, None, SpecConfig("ar"), "bf16",
            regime=recipe.regime,
        ),
    )  # fmt: skip


def prepare(checked: CheckedRecipe, folder: Path, reporter: Reporter) -> Conversion | None:
    """The target in W12 in `folder`, if the recipe has it."""
    if not checked.loaded.recipe.uses_w12:
        return None
    return convert_folder(
        checked.source, folder / W12_FOLDER, Selection((), ()), threads=1, force=False,
        reporter=reporter,
    )  # fmt: skip
