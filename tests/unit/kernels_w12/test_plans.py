"""Plans are read back as they were stored, the machine's own before the shipped ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specpilot_kernels.w12 import plans
from specpilot_kernels.w12.plans import BadPlans, Plan


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPILOT_CACHE", str(tmp_path))
    plans.plan_for.cache_clear()


def test_what_was_stored_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.json"
    plans.store("GPU A", {"128x64": Plan(48, 256), "256x64": Plan(16, 64)}, shipped)
    monkeypatch.setattr(plans, "_SHIPPED", shipped)
    assert plans.plan_for("GPU A", 128, 64) == Plan(48, 256)
    assert plans.store("GPU A", {"128x64": Plan(8, 64)}) == tmp_path / "w12_plans.json"
    assert plans.plan_for("GPU A", 128, 64) == Plan(8, 64)
    assert plans.plan_for("GPU A", 256, 64) == Plan(16, 64)
    assert plans.plan_for("GPU A", 64, 128) == plans.DEFAULT
    assert plans.plan_for("GPU B", 128, 64) == plans.DEFAULT


def test_storing_keeps_what_is_there() -> None:
    plans.store("GPU A", {"128x64": Plan(8, 64)})
    plans.store("GPU A", {"256x64": Plan(16, 64)})
    path = plans.store("GPU B", {"128x64": Plan(32, 64)})
    assert plans.read(path) == {
        "GPU A": {"128x64": Plan(8, 64), "256x64": Plan(16, 64)},
        "GPU B": {"128x64": Plan(32, 64)},
    }
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_shipped_file_is_well_formed() -> None:
    plans.read(plans._SHIPPED)
    assert plans._SHIPPED.is_file()


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"GPU": {"1x1": {"rows": 8}}}', '{"GPU": {"1x1": {"kernel_rows": 65}}}',
     '{"GPU": {"1x1": {"passes_rows": 63}}}', '{"GPU": {"1x1": {"kernel_rows": "8"}}}',
     '{"GPU": 3}'],
)  # fmt: skip
def test_a_damaged_file_is_named(content: str) -> None:
    path = plans.cache_file()
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadPlans, match=r"w12_plans\.json"):
        plans.plan_for("GPU", 1, 1)


def test_the_file_is_plain_json() -> None:
    path = plans.store("GPU", {"1x1": Plan()})
    assert json.loads(path.read_text()) == {"GPU": {"1x1": {"kernel_rows": 64, "passes_rows": 128}}}
