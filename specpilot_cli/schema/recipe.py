"""`recipe.yaml`: mechanisms bound to one deployment, with the gates that judge them.

What both engines' recipes share, and the reference engine's own; `sglang_recipe.py` has SGLang's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from specpilot_cli.schema.base import FileModel

ENGINES = ("reference", "sglang")

RecipeName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
Nodes = Annotated[int, Field(ge=1, le=1024)]


class RecipeModels(FileModel):
    """Target and drafter folders, relative to the recipe's own folder."""

    target: str
    drafter: str


class RecipePrompts(FileModel):
    """Prompt files: `dev` is recorded and tuned on, `unseen` is kept for the gates."""

    dev: str
    unseen: str


class RecipeRegime(FileModel):
    """How the deployment is served. `requests` in flight; `threads` per server process."""

    requests: Annotated[int, Field(ge=1)] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Annotated[int, Field(ge=1)] = 1


class StockSystem(FileModel):
    """The baseline: the chain that the drafter's release would serve."""

    block: Annotated[int, Field(ge=2)]


class W12Mechanism(FileModel):
    """Target weights in the lossless 12-bit format, decoded to their exact BF16 values."""

    mechanism: Literal["w12"]


class TreeMechanism(FileModel):
    """Best-first tree on the drafter's lattice.

    `nodes: auto` measures τ(N) and c(N) and takes the budget with the largest τ / c.
    """

    mechanism: Literal["best-first-tree"]
    block: Annotated[int, Field(ge=2)]
    scoring: Literal["conditional", "marginal"] = "conditional"
    nodes: Nodes | Literal["auto"] = "auto"
    budgets: Annotated[tuple[Nodes, ...], Field(min_length=1)] = (8, 16, 32, 63)

    @property
    def measured_nodes(self) -> tuple[int, ...]:
        """Every node budget that is replayed and timed, rising; a fixed one among them."""
        fixed = () if self.nodes == "auto" else (self.nodes,)
        return tuple(sorted({*self.budgets, *fixed}))


Mechanism = Annotated[W12Mechanism | TreeMechanism, Field(discriminator="mechanism")]


class RecordingPlan(FileModel):
    """How many dev prompts of each benchmark are recorded, and how long steps are timed."""

    prompts_per_benchmark: Annotated[int, Field(ge=1)] = 4
    timed_steps: Annotated[int, Field(ge=2)] = 10
    timed_blocks: Annotated[int, Field(ge=2)] = 5


class PairedBenchGate(FileModel):
    """Sizes of the paired benchmark; see `paired-bench`. An even number of runs swaps orders."""

    prompts_per_benchmark: Annotated[int, Field(ge=2)]
    runs: Annotated[int, Field(ge=2, multiple_of=2)] = 2
    aa_sessions: Annotated[int, Field(ge=1)] = 1
    aa_prompts_per_benchmark: Annotated[int, Field(ge=2)] | None = None
    warmup: Annotated[int, Field(ge=1)] = 8


class TokenForceGate(FileModel):
    """Sizes of the token-forcing audit; see `token-force`."""

    split_position: Annotated[int, Field(ge=1)] | None = None
    audit_limit: Annotated[int, Field(ge=1)] = 200
    probe_offsets: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0, 4, 32)


class RecipeGates(FileModel):
    """Both gates are always run: a gain without the audit is no result."""

    paired_bench: PairedBenchGate
    token_force: TokenForceGate = TokenForceGate()


class RecipeHead(FileModel):
    """What is read first, so that a recipe for something else is told apart from a wrong one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: int
    engine: str

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"this version of specpilot reads recipes of version 1, not {value}")
        return value

    @field_validator("engine")
    @classmethod
    def _supported_engine(cls, value: str) -> str:
        if value not in ENGINES:
            known = " or ".join(f"`{name}`" for name in ENGINES)
            raise ValueError(f"unknown engine `{value}`, expected {known}")
        return value


class Recipe(FileModel):
    """One deployment on the reference engine and what was validated on it."""

    schema_version: Literal[1]
    name: RecipeName
    title: str
    engine: Literal["reference"]
    models: RecipeModels
    prompts: RecipePrompts
    regime: RecipeRegime = RecipeRegime()
    stock: StockSystem
    mechanisms: Annotated[tuple[Mechanism, ...], Field(min_length=1)]
    recording: RecordingPlan = RecordingPlan()
    gates: RecipeGates
    # Step times of another machine, by the name of a bundled curve, for a labelled projection.
    projection: str | None = None

    @model_validator(mode="after")
    def _each_mechanism_once(self) -> Recipe:
        names = [m.mechanism for m in self.mechanisms]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"mechanism listed twice: {', '.join(doubled)}")
        return self

    @property
    def tree(self) -> TreeMechanism | None:
        """The tree mechanism, if the recipe has one."""
        return next((m for m in self.mechanisms if isinstance(m, TreeMechanism)), None)

    @property
    def uses_w12(self) -> bool:
        """Whether the target is served from W12 weights."""
        return any(isinstance(m, W12Mechanism) for m in self.mechanisms)
