"""Both gates as one verdict, in every combination, and the reasons that go with it."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from specpilot_cli.apply.gates import RecipeVerdict, judge
from specpilot_cli.apply.reference.run import RecipeResult
from specpilot_cli.commands.options import exit_code

SPEED = ("promote", "no", "invalid")
AUDIT = ("accept", "reject", "invalid", None)

EXPECTED = {
    ("promote", "accept"): "promote",
    ("no", "accept"): "no",
    ("promote", "reject"): "reject",
    ("no", "reject"): "reject",
}


@pytest.mark.parametrize(("speed", "audit"), list(product(SPEED, AUDIT)))
def test_no_gain_counts_without_the_audit(speed: Any, audit: Any) -> None:
    assert judge(speed, audit) == EXPECTED.get((speed, audit), "invalid")


def test_every_verdict_has_an_exit_code() -> None:
    codes = {verdict: exit_code(verdict) for verdict in get_args(RecipeVerdict)}
    assert codes == {"promote": 0, "no": 1, "reject": 1, "invalid": 4}


def _result(speed: str, audit: str | None) -> RecipeResult:
    summary = SimpleNamespace(reasons=("speed",))
    judged = None if audit is None else SimpleNamespace(verdict=audit, reasons=("audit",))
    parts: list[Any] = [None, None, None, None, (), None, None, {}]
    parts[5] = SimpleNamespace(verdict=speed, summary=summary)
    parts[6] = judged
    return RecipeResult(*parts)


@pytest.mark.parametrize(
    ("speed", "audit", "reasons"),
    [
        ("promote", "accept", ("speed",)),
        ("no", "accept", ("speed",)),
        ("no", "reject", ("audit",)),
        ("promote", "invalid", ("audit",)),
        ("invalid", None, ("speed",)),
    ],
)
def test_reasons_are_those_of_the_gate_that_decided(
    speed: str, audit: str | None, reasons: tuple[str, ...]
) -> None:
    result = _result(speed, audit)
    assert result.reasons == reasons
    assert result.verdict == judge(speed, audit)  # type: ignore[arg-type]
