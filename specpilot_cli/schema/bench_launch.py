"""A launch file: how `paired-bench` starts a server, alone or in every variant of a sweep."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.sglang_recipe import SECRET, Argument, VariableName


class LaunchFile(FileModel):
    """One server: a command of its own, or a system of a recipe, with options added to it.

    command: words, in which `{port}` and `{host}` are filled in. recipe: `NAME:stock`. arguments:
    options without their dashes, added at the end. environment: variables beside the inherited
    ones. sweep: values to try for some options, every combination one variant; `null` leaves the
    option out.
    """

    schema_version: Literal[1]
    command: tuple[str, ...] | None = None
    recipe: str | None = None
    arguments: dict[str, Argument] = Field(default_factory=dict)
    environment: dict[VariableName, str] = Field(default_factory=dict)
    ready_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    sweep: dict[str, Annotated[tuple[Argument | None, ...], Field(min_length=1)]] = Field(
        default_factory=dict
    )

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if SECRET.search(name):
                raise ValueError(
                    f"`{name}` holds a secret, which would end up in results: set it in the shell"
                )
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> LaunchFile:
        if (self.command is None) == (self.recipe is None):
            raise ValueError("give either `command` or `recipe`")
        if self.command is not None and not any("{port}" in word for word in self.command):
            raise ValueError("`command` must hold `{port}`: the port is chosen at the start")
        return self

    def variants(self) -> list[dict[str, Argument]]:
        """The options of every variant of the sweep, in order; one empty one without a sweep."""
        names = list(self.sweep)
        return [
            {name: value for name, value in zip(names, values, strict=True) if value is not None}
            for values in product(*self.sweep.values())
        ]


class SweepVariant(FileModel):
    """One variant as it was timed: its command with `{port}`, and its rate in each pass.

    rate_tok_per_s: geometric mean over the passes; None if it failed, and `failure` says why.
    """

    name: str
    arguments: dict[str, Argument]
    command: tuple[str, ...]
    environment: dict[str, str]
    rate_tok_per_s: float | None
    pass_rates_tok_per_s: tuple[float, ...]
    tau: float | None
    failure: str | None
    server_info: dict[str, Any] = Field(default_factory=dict)


class SweepResult(FileModel):
    """A sweep of stock, fastest variant first; failed ones last."""

    kind: Literal["sweep"] = "sweep"
    batch: int
    n_requests: int
    passes: int
    prompts_sha256: str
    variants: tuple[SweepVariant, ...]

    @property
    def fastest(self) -> SweepVariant:
        """The baseline that a comparison must beat."""
        return self.variants[0]
