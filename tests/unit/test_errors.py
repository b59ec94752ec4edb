from __future__ import annotations

import pytest

from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid, SpecPilotError


@pytest.mark.parametrize(
    ("kind", "code"), [(InputError, 2), (MachineError, 3), (MeasurementInvalid, 4)]
)
def test_each_error_carries_its_documented_exit_code(kind: type[SpecPilotError], code: int) -> None:
    assert kind("x").exit_code == code


def test_text_of_an_error_leads_with_the_place() -> None:
    assert str(InputError("bad number", where="a.yaml:3")) == "a.yaml:3: bad number"
    assert str(InputError("bad number")) == "bad number"
