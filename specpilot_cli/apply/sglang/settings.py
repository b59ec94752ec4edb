"""What the user may change of an SGLang recipe, and what became of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SystemChoice = Literal["stock", "tuned", "both"]


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """Which systems are started, where, and from what.

    target, drafter: folder or hub id in place of the recipe's. gpu: the profile to plan for where
    the machine has no GPU. prompts: unseen prompts in place of the recipe's. python: interpreter
    of the environment that SGLang is installed in.
    """

    system: SystemChoice = "both"
    first_port: int | None = None
    host: str = "127.0.0.1"
    python: str = sys.executable
    prompts_per_benchmark: int | None = None
    prompts: Path | None = None
    target: str | None = None
    drafter: str | None = None
    gpu: str | None = None
