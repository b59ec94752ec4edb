"""A saved result read back, so that it can be shown again without measuring.

The file is not believed: its verdict is an exit code, so it is worked out again from the single
requests and the A/A sessions, and what does not follow from them is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specpilot_cli import stats
from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.validation import first_in_words
from specpilot_cli.paired_bench.journal import read_finished
from specpilot_cli.paired_bench.promotion import decide
from specpilot_cli.paired_bench.ratios import estimate_gain, log_ratios
from specpilot_cli.paired_bench.types import (
    BASELINE,
    CANDIDATE,
    ENOUGH_AA_SESSIONS,
    GainEstimate,
    Noise,
    PairedBenchSummary,
    TimedRequest,
)
from specpilot_cli.schema.result import SCHEMA_VERSION, Envelope

_HINT = "the file was edited or damaged: measure again"
_ROUNDING = 1e-9


def read_saved(path: Path) -> tuple[Envelope, PairedBenchSummary]:
    """The envelope in `path` and its summary.

    Raises InputError if the file holds another command's result, a damaged one, or one whose
    verdict does not follow from its requests. Keys added by a later version are ignored.
    """
    envelope = read_json_model(path, Envelope)
    if envelope.command != "paired-bench" or envelope.schema_version != SCHEMA_VERSION:
        raise InputError(
            f"`{path}` holds a result of `{envelope.command}`, version "
            f"{envelope.schema_version}, not of `paired-bench`, version {SCHEMA_VERSION}",
            where=str(path),
            hint="give a file that `specpilot paired-bench -o FILE.json` wrote",
        )
    try:
        # strict JSON: "5" is no number, and 1 is no truth value
        summary = TypeAdapter(PairedBenchSummary).validate_json(
            json.dumps(envelope.results), strict=True
        )
        problem = next(_problems(summary, envelope.verdict), None)
    except ValidationError as error:
        key, what = first_in_words(error, "")
        problem = f"{key}`: {what}"
    except (InputError, ValueError, OverflowError) as error:
        problem = f"settings` or requests: {error}"
    if problem is not None:
        raise InputError(f"`results.{problem}", where=str(path), hint=_HINT)
    return envelope, summary


def saved_rows(path: Path, summary: PairedBenchSummary) -> list[TimedRequest]:
    """Every answer behind the result in `path`, from the journal beside it.

    Raises InputError if the journal is not there, is damaged, or gives other gains than `summary`.
    """
    journal = path.with_suffix(".journal.jsonl")
    rows = [row for run in read_finished(journal).values() for row in run.rows]
    try:
        ratios = log_ratios([row for row in rows if row.session == "ab"], CANDIDATE, BASELINE)
    except (ValueError, OverflowError):  # a pair is not complete, or its rates are no numbers
        ratios = {}
    gains = {request: math.exp(z) for values in ratios.values() for request, z in values.items()}
    if summary.requests and not _same(
        gains, {r.request_id: r.gain_ratio for r in summary.requests}
    ):
        raise InputError(
            f"the answers in it are not those of `{path}`", where=str(journal), hint=_HINT
        )
    return rows


def _problems(summary: PairedBenchSummary, verdict: str | None) -> Iterator[str]:
    """What contradicts what, the first thing first."""
    if summary.verdict != verdict:
        yield f"verdict` is {summary.verdict}, the document's is {verdict}"
    rests_on = (summary.gain, summary.noise, summary.decision, summary.client)
    if summary.verdict == "invalid":
        if not summary.reasons or any(part is not None for part in rests_on):
            yield "verdict` is invalid, which takes reasons and leaves no numbers"
        return
    if summary.verdict == "ok":
        if summary.noise is None or summary.gain is not None or summary.decision is not None:
            yield "verdict` is ok, which a calibration has: noise, and no comparison"
            return
        yield from _noise_problems(summary.noise, summary.settings.aa_sessions)
        return
    if summary.gain is None or summary.noise is None or summary.decision is None:
        yield f"verdict` is {summary.verdict} without the numbers it rests on"
        return
    noise, settings = summary.noise, summary.settings
    n_sessions = len(noise.sessions)
    yield from _noise_problems(noise, n_sessions if noise.source else settings.aa_sessions)
    cells: dict[str, list[float]] = {}
    for request in summary.requests:
        cells.setdefault(request.benchmark, []).append(math.log(request.gain_ratio))

    def estimate(values: Mapping[str, Sequence[float]]) -> GainEstimate:
        return estimate_gain(
            values, nu=noise.nu_log, n_sessions=n_sessions, confidence=settings.confidence
        )

    gain = estimate(cells)
    if not _same(asdict(gain), asdict(summary.gain)):
        yield "gain` does not follow from the requests"
    decision = decide(
        gain.lower_bound_ratio,
        nu_log=noise.nu_log,
        identical=all(request.identical for request in summary.requests),
        settings=settings,
    )
    if not _same(asdict(decision), asdict(summary.decision)):
        yield "decision` does not follow from the gain and the noise"
    if decision.verdict != summary.verdict or summary.reasons != (decision.reason,):
        yield f"verdict` is {summary.verdict}, the numbers say {decision.verdict}"
    yield from _part_problems(summary, {name: estimate({name: z}) for name, z in cells.items()})


def _part_problems(summary: PairedBenchSummary, gains: Mapping[str, GainEstimate]) -> Iterator[str]:
    """What tables and figures rest on: every benchmark's gain, and the same systems everywhere."""
    shown = {one.name: one for one in summary.benchmarks}
    if shown.keys() != gains.keys() or len(shown) != len(summary.benchmarks):
        yield "benchmarks` are not those of the requests"
    for name, gain in gains.items():
        same = sum(one.identical for one in summary.requests if one.benchmark == name)
        found = (asdict(shown[name].gain), shown[name].n_requests, shown[name].n_identical)
        if not _same(found, (asdict(gain), gain.n_requests, same)):
            yield f"benchmarks` has another `{name}` than the requests"
    levels = [(level.systems, level.benchmarks) for level in summary.levels]
    for systems, benchmarks in ((summary.systems, summary.benchmarks), *levels):
        names = {one.name for one in systems}
        if not {BASELINE, CANDIDATE} <= names:
            yield "systems` lacks the baseline or the candidate"
        for part in benchmarks:
            if part.rate_tok_per_s.keys() != names or part.tau.keys() != names:
                yield f"benchmarks` names other systems in `{part.name}`"
            if not all(rate > 0.0 for rate in part.rate_tok_per_s.values()):
                yield f"benchmarks` has a rate in `{part.name}` that is not above zero"


def _noise_problems(noise: Noise, n_sessions: int) -> Iterator[str]:
    gains = [session.gain_ratio for session in noise.sessions]
    nu_log = stats.aa_noise([math.log(gain) for gain in gains])
    if not _same(nu_log, noise.nu_log) or len(gains) != n_sessions:
        yield "noise` does not follow from its sessions"
    if noise.provisional != (len(gains) < ENOUGH_AA_SESSIONS):
        yield "noise.provisional` does not follow from the number of sessions"


def _same(one: Any, other: Any) -> bool:
    """Equal up to the rounding of a logarithm and back."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(one == other)
