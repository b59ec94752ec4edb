"""Where scores come from: a server, or an engine in this process.

`http://...` is a server with SGLang's endpoints; `reference:DIR` the reference engine and
`transformers:DIR` Hugging Face transformers, both on a local model folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.engines.transformers_scorer import TransformersScorer
from specpilot_cli.errors import InputError
from specpilot_cli.token_force.collect import is_url
from specpilot_cli.token_force.scorer import Scorer

KINDS = ("reference", "transformers")


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A scorer in this process: what computes, and the model's folder."""

    kind: str
    folder: Path


def parse_scorer(source: str) -> LocalSource | None:
    """What `--scorer` names; None is a server's URL. InputError for anything else."""
    if is_url(source):
        return None
    kind, _, folder = source.partition(":")
    if kind not in KINDS or not folder:
        raise InputError(
            f"the scorer must be a server or a model folder with its engine, not `{source}`",
            where="--scorer",
            hint="write it as http://host:port, reference:DIR or transformers:DIR",
        )
    return LocalSource(kind, Path(folder))


def open_local(source: LocalSource) -> tuple[Scorer, Mapping[str, Any]]:
    """Load the model; returns the scorer and what it says about itself."""
    if source.kind == "transformers":
        theirs = TransformersScorer(source.folder)
        return theirs, {**theirs.describe(), "model_path": str(source.folder)}
    from specpilot_cli.engines.reference.launch import require_engine

    require_engine()
    from specpilot_cli.engines.reference.engine import ReferenceEngine
    from specpilot_cli.engines.reference.local import LocalScorer

    engine = ReferenceEngine(source.folder, None)
    about = {"engine": "specpilot-reference", "model_path": str(source.folder)}
    return LocalScorer(engine), {**about, "specpilot": engine.describe()}
