"""δ measured once and kept: what `--calibrate` writes and `--delta FILE` reads.

A calibration belongs to one stock: the file says which scorer and stock it was measured on, and
using it with others is warned of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.token_force.coverage import Coverage, coverage
from specpilot_cli.token_force.result import coverage_json, summary_json, threshold_json
from specpilot_cli.token_force.rules import RateSummary, rate_summary
from specpilot_cli.token_force.scorer import Scorer, score_outputs
from specpilot_cli.token_force.threshold import Departure, Threshold, calibrate
from specpilot_cli.ui import Reporter, SilentReporter

_HINT = "give a number of nats, or the JSON file that --calibrate wrote"
# What has to be the same for δ to hold.
_IDENTITY = ("model_path", "version", "dtype", "quantization", "enable_fp32_lm_head")


@dataclass(frozen=True, slots=True)
class Calibration:
    """δ, and stock's own mismatch rate under the scorer."""

    threshold: Threshold
    stock: RateSummary
    covered: Coverage

    def to_json(self) -> dict[str, Any]:
        """The `results` object of the JSON envelope."""
        return {
            "threshold": threshold_json(self.threshold),
            "stock": {**summary_json(self.stock), **coverage_json(self.covered)},
        }


class _Kept(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _KeptDeparture(_Kept):
    request_id: str
    position: int = Field(ge=0)
    ar_token: int = Field(ge=0)
    stock_token: int = Field(ge=0)
    gap_nats: float = Field(ge=0)


class _KeptThreshold(_Kept):
    delta_nats: float = Field(gt=0, le=5)
    n_prompts: int = Field(ge=1)
    departures: tuple[_KeptDeparture, ...]
    max_gap_nats: float | None
    p99_gap_nats: float | None
    warnings: tuple[str, ...] = ()


class _KeptResults(_Kept):
    threshold: _KeptThreshold


class _KeptDocument(_Kept):
    command: str
    results: _KeptResults
    environment: dict[str, Any]


def run_calibration(
    stock: Sequence[OutputRecord],
    ar: Sequence[OutputRecord],
    scorer: Scorer,
    *,
    reporter: Reporter = SilentReporter(),
) -> Calibration:
    """Measure δ and stock's mismatch rate from stock's and AR's answers to the same prompts."""
    threshold = calibrate(ar, stock, scorer, reporter=reporter)
    for warning in threshold.warnings:
        reporter.warn(warning)
    scored = score_outputs(stock, scorer, label="stock", reporter=reporter)
    return Calibration(threshold, rate_summary(scored), coverage(stock))


def read_calibration(path: Path) -> tuple[Threshold, Mapping[str, Any]]:
    """δ from a file of `--calibrate`, and the engines it was measured on.

    Raises InputError for a file that is none.
    """
    raw = read_json(path)
    try:
        document = _KeptDocument.model_validate(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise InputError(
            f"no calibration: {key}: {problem['msg']}", where=str(path), hint=_HINT
        ) from error
    if document.command != "token-force":
        raise InputError(
            f"a result of `{document.command}`, no calibration", where=str(path), hint=_HINT
        )
    kept = document.results.threshold
    threshold = Threshold(
        delta_nats=kept.delta_nats,
        n_prompts=kept.n_prompts,
        departures=tuple(Departure(**item.model_dump()) for item in kept.departures),
        max_gap_nats=kept.max_gap_nats,
        p99_gap_nats=kept.p99_gap_nats,
        warnings=kept.warnings,
    )
    engines = document.environment.get("engines")
    return threshold, engines if isinstance(engines, dict) else {}


def stranger_warnings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the engines of a calibration and those of this run."""
    found = []
    for role in ("scorer", "stock"):
        before, after = then.get(role), now.get(role)
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue
        for key in _IDENTITY:
            if key in before and key in after and before[key] != after[key]:
                found.append(
                    f"delta was calibrated with {key} `{before[key]}` in the {role}, this run has "
                    f"`{after[key]}`: calibrate again"
                )
        digests = [_digest(side) for side in (before, after)]
        if None not in digests and digests[0] != digests[1]:
            found.append(f"delta was calibrated with other weights in the {role}: calibrate again")
    return found


def _digest(engine: Mapping[str, Any]) -> Any:
    own = engine.get("specpilot")
    return own.get("target_sha256") if isinstance(own, Mapping) else None
