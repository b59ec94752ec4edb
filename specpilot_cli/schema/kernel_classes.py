"""Which kernels an engine runs for what: `profiles/kernel_classes/NAME.yaml`.

The step span that holds a kernel says most: a drafter's matrix product and the target's have one
name. Names decide within the target's spans and outside of all spans.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.gpu_profile import ProfileName, Sentence

SpanRole = Literal["target", "drafter", "prefill", "idle"]
FamilyName = Literal[
    "gemm", "gemm_reduce", "head", "recurrent", "attention", "drafter", "tree", "prefill", "rest"
]
Pattern = Annotated[str, StringConstraints(min_length=2)]


class KernelFamily(FileModel):
    """Names of one kind of kernel: Python regular expressions, searched, case-sensitive.

    `gemm` and `gemm_reduce` (the second half of a split product) are the target's or the drafter's
    as the span says; the last product of a target span is the LM head. `w12` marks products that
    read 12-bit weights.
    """

    family: FamilyName
    patterns: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    w12: bool = False
    source: Sentence

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`{pattern}` is no regular expression: {error}") from error
        return patterns


class KernelClasses(FileModel):
    """Span kinds and kernel families of one engine; the first family that matches wins."""

    schema_version: Literal[1]
    name: ProfileName
    title: Sentence
    spans: Annotated[dict[str, SpanRole], Field(min_length=1)]
    families: Annotated[tuple[KernelFamily, ...], Field(min_length=1)]
