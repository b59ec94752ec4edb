"""`recipe.yaml` of an SGLang deployment: models, server arguments of stock and tuned, gates."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.plugin_config import (
    TREE_ALGORITHM,
    PluginConfig,
    TreePlugin,
    W12Plugin,
)
from specpilot_cli.schema.recipe import PairedBenchGate, RecipeName, TokenForceGate

Argument = bool | int | float | str | tuple[int | str, ...]
"""Value of a server option: true is the bare flag, a list gives it several values."""

Version = Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
# Options that specpilot gives itself, under every name that SGLang knows them by.
_OWNED = {
    "model-path": "models.target", "model": "models.target", "host": "--host", "port": "--port",
    "speculative-draft-model-path": "models.drafter", "speculative-draft-model": "models.drafter",
    "revision": "models.target (`owner/name@revision`)",
    "speculative-draft-model-revision": "models.drafter (`owner/name@revision`)",
    "quantization": "the mechanism `w12`", "tp": "tensor_parallel", "tp-size": "tensor_parallel",
    "tensor-parallel-size": "tensor_parallel", "device": "device",
}  # fmt: skip
SECRET = re.compile(r"(api|admin).*key|token$|password|secret|keyfile", re.IGNORECASE)


class SglangModels(FileModel):
    """What is served: folders, relative to the recipe's own, or hub ids `owner/name[@revision]`.

    A path begins with `.` or `/`; anything else is a hub id. target_w12: the target converted
    beforehand, for the tuned system alone; without it W12 is made of `target` while loading.
    target_profile, drafter_profile: names of bundled model profiles. A model of another shape is
    refused; where the model is not at hand they stand in for its configuration.
    """

    target: str
    target_w12: str | None = None
    drafter: str | None = None
    target_profile: str | None = None
    drafter_profile: str | None = None


class SglangArguments(FileModel):
    """Options of `sglang.launch_server` without their dashes.

    `common` goes to every server; `stock` and `tuned` add to it, or replace one of its values.
    """

    common: dict[str, Argument] = Field(default_factory=dict)
    stock: dict[str, Argument] = Field(default_factory=dict)
    tuned: dict[str, Argument] = Field(default_factory=dict)

    @field_validator("common", "stock", "tuned")
    @classmethod
    def _plain_options(cls, value: dict[str, Argument]) -> dict[str, Argument]:
        for name, given in value.items():
            if not _OPTION.fullmatch(name):
                raise ValueError(f"`{name}` is no option name; write it as in `page-size: 64`")
            if name in _OWNED:
                raise ValueError(f"`{name}` is set through {_OWNED[name]}, not here")
            if SECRET.search(name):
                raise ValueError(f"`{name}` holds a secret, which no recipe may")
            if "\0" in str(given):
                raise ValueError(f"`{name}` holds a NUL character, which no argument can")
            if given is False:
                raise ValueError(f"`{name}: false` says nothing: leave the option out")
        return value


class SglangW12(W12Plugin):
    """W12 weights of the target in the server."""

    mechanism: Literal["w12"]

    @property
    def plugin(self) -> W12Plugin:
        """What the plugin is told."""
        return W12Plugin(**self.model_dump(exclude={"mechanism"}))


class SglangTree(TreePlugin):
    """A best-first tree in place of stock's chain; `drafter` is stock's algorithm."""

    mechanism: Literal["best-first-tree"]

    @property
    def plugin(self) -> TreePlugin:
        """What the plugin is told."""
        return TreePlugin(**self.model_dump(exclude={"mechanism"}))


SglangMechanism = Annotated[SglangW12 | SglangTree, Field(discriminator="mechanism")]


class EngineRange(FileModel):
    """Versions of SGLang that the recipe was made for: `from_version` up to below `below`.

    `pinned` is the one that deployments are written for.
    """

    from_version: Version
    below: Version
    pinned: Version

    @model_validator(mode="after")
    def _pinned_inside(self) -> EngineRange:
        if not self.contains(self.pinned):
            raise ValueError(f"pinned {self.pinned} is outside {self}")
        return self

    def contains(self, version: str) -> bool:
        """Whether `version` is inside; a suffix such as `.post1` or `+cu130` does not count."""
        return release(self.from_version) <= release(version) < release(self.below)

    def __str__(self) -> str:
        return f"{self.from_version} to below {self.below}"


class SglangRegime(FileModel):
    """How the deployment is used: `requests` in flight, each with up to `context` tokens."""

    requests: Annotated[int, Field(ge=1)] = 1
    context: Annotated[int, Field(ge=1)]


class SglangGates(FileModel):
    """Sizes of both gates, and the KV tokens each server gets while all of them are resident."""

    paired_bench: PairedBenchGate
    token_force: TokenForceGate = TokenForceGate()
    max_total_tokens: Annotated[int, Field(ge=1)] | None = None


class SglangPrompts(FileModel):
    """Prompts that nothing was tuned on, relative to the recipe's folder."""

    unseen: str


class SglangRecipe(FileModel):
    """One deployment on SGLang and what was validated on it."""

    schema_version: Literal[1]
    name: RecipeName
    title: str
    engine: Literal["sglang"]
    engine_versions: EngineRange
    models: SglangModels
    device: Literal["cuda", "cpu"] = "cuda"
    # Names of bundled GPU profiles; empty for a CPU.
    gpus: tuple[str, ...] = ()
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    regime: SglangRegime
    arguments: SglangArguments = SglangArguments()
    environment: dict[VariableName, str] = Field(default_factory=dict)
    mechanisms: Annotated[tuple[SglangMechanism, ...], Field(min_length=1)]
    prompts: SglangPrompts | None = None
    gates: SglangGates | None = None
    ready_timeout_s: Annotated[float, Field(gt=0)] = 900.0

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name, given in value.items():
            if SECRET.search(name):
                raise ValueError(f"`{name}` holds a secret, which no recipe may")
            if "\0" in given:
                raise ValueError(f"`{name}` holds a NUL character, which no variable can")
            if name.startswith("SPECPILOT_") or name == "SGLANG_PLUGINS":
                raise ValueError(f"`{name}` is set by specpilot, not here")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SglangRecipe:
        every = (self.arguments.common, self.arguments.stock, self.arguments.tuned)
        speculative = any("speculative-algorithm" in group for group in every)
        if speculative != (self.models.drafter is not None):
            raise ValueError("`models.drafter` and the option `speculative-algorithm` go together")
        if (self.device == "cpu") != (not self.gpus):
            raise ValueError("`gpus` names the GPUs of a recipe for cuda, and of no other")
        names = [mechanism.mechanism for mechanism in self.mechanisms]
        if len(set(names)) != len(names):
            raise ValueError(f"mechanism listed twice: {names[0]}")
        if self.w12 is not None and self.w12.drafter and self.models.drafter is None:
            raise ValueError("`drafter: true` of w12 needs a drafter")
        self._check_tree(every)
        return self

    def _check_tree(self, every: tuple[dict[str, Argument], ...]) -> None:
        """The tuned server gets its algorithm from the tree, whose chain stock serves."""
        algorithms = [group.get("speculative-algorithm") for group in every]
        if TREE_ALGORITHM in algorithms:
            raise ValueError(f"`{TREE_ALGORITHM}` is set through the mechanism `best-first-tree`")
        if self.tree is None:
            return
        if self.models.drafter is None:
            raise ValueError("`best-first-tree` needs a drafter")
        if self.tree.drafter not in algorithms:
            raise ValueError(f"stock does not serve the tree's drafter with {self.tree.drafter}")
        if self.tensor_parallel > 1:
            raise ValueError("`best-first-tree` does not work with tensor parallelism yet")

    @property
    def w12(self) -> SglangW12 | None:
        """The W12 mechanism, if the recipe has it."""
        return next((m for m in self.mechanisms if isinstance(m, SglangW12)), None)

    @property
    def tree(self) -> SglangTree | None:
        """The tree mechanism, if the recipe has it."""
        return next((m for m in self.mechanisms if isinstance(m, SglangTree)), None)

    @property
    def plugin_config(self) -> PluginConfig:
        """What the plugin of the tuned server is asked for."""
        return PluginConfig(
            w12=None if self.w12 is None else self.w12.plugin,
            tree=None if self.tree is None else self.tree.plugin,
        )


def release(version: str) -> tuple[int, ...]:
    """`0.5.23.post1+cu130` → (0, 5, 23)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
