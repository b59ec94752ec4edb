"""What the checks find out before a run: sizes, prompts, and the servers that will be started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot_cli.apply.reference.dry_run import plan_run
from specpilot_cli.apply.reference.preflight import ApplySettings, CheckedRecipe
from specpilot_cli.apply.reference.run import plan_systems
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.errors import InputError, MachineError

Check = Callable[..., CheckedRecipe]
WITHOUT_W12 = {"  - mechanism: w12\n": ""}


def test_sizes_are_the_recipes(checked: Check) -> None:
    found = checked()
    assert (found.gates.bench.limit, found.gates.bench.aa_limit, found.gates.bench.runs) == (
        2,
        2,
        2,
    )
    assert found.gates.n_timed == 8
    # two timed prompts and one for the warm-up, of four kinds
    assert len(found.gates.unseen) == 12
    assert len(found.dev) == 4
    assert found.gates.audit.split_position == 32
    assert found.projection is not None


def test_limit_changes_the_timed_prompts_only(checked: Check) -> None:
    found = checked(ApplySettings(prompts_per_benchmark=4), timed=5)
    assert found.gates.n_timed == 16
    assert len(found.dev) == 4
    assert found.gates.bench.aa_limit == 2


def test_aa_sessions_never_use_more_prompts_than_the_comparison(checked: Check) -> None:
    found = checked(
        ApplySettings(prompts_per_benchmark=2), timed=5, edit={"aa_prompts_per_benchmark: 2": ""}
    )
    assert found.gates.bench.aa_limit is None


def test_stock_tuned_and_plain(checked: Check, tmp_path: Path) -> None:
    found = checked(ApplySettings(fault=LogitFault(48)))
    stock, tuned, plain = plan_systems(found, tmp_path / "run", 16)
    target, drafter = found.loaded.target, found.loaded.drafter
    assert (stock.name, stock.target, stock.drafter) == ("baseline", target, drafter)
    assert (stock.spec, stock.weight_format) == (SpecConfig("chain", 8), "bf16")
    assert (tuned.name, tuned.target) == ("candidate", tmp_path / "run" / "target-w12")
    assert tuned.spec == SpecConfig("tree", 16, 16, "conditional")
    assert tuned.weight_format == "w12"
    assert (plain.name, plain.target, plain.drafter) == ("ar", target, None)
    assert plain.spec.mode == "ar"
    # the deliberate fault is in the tuned system alone: stock and the scorer judge it
    assert [plan.fault for plan in (stock, tuned, plain)] == [None, LogitFault(48), None]


def test_without_w12_the_tuned_system_reads_the_same_weights(
    checked: Check, tmp_path: Path
) -> None:
    found = checked(edit=WITHOUT_W12 | {"nodes: auto": "nodes: auto\n    scoring: marginal"})
    tuned = plan_systems(found, tmp_path, 8)[1]
    assert tuned.target == found.loaded.target
    assert tuned.weight_format == "bf16"
    assert tuned.spec.scoring == "marginal"


def test_plan_names_ports_and_budget_only_where_they_are_known(
    checked: Check, tmp_path: Path
) -> None:
    open_plan = plan_run(checked(), tmp_path / "run")
    assert open_plan.nodes is None
    assert open_plan.node_budgets == (8, 16)
    assert [server.port for server in open_plan.servers] == [None] * 3
    assert all("--port PORT" in server.command for server in open_plan.servers)
    assert "--nodes NODES" in open_plan.servers[1].command
    assert not (tmp_path / "run").exists()


def test_plan_of_a_fixed_budget_on_given_ports(checked: Check, tmp_path: Path) -> None:
    fault = LogitFault(0, 5, 1.5)
    plan = plan_run(checked(ApplySettings(None, 23456, fault), nodes="12"), tmp_path)
    assert plan.nodes == 12
    assert plan.node_budgets == (8, 12, 16)
    assert [server.port for server in plan.servers] == [23456, 23457, 23458]
    assert "--nodes 12 " in plan.servers[1].command
    assert "--fault logit-bias:after=0,every=5,bias=1.5" in plan.servers[1].command
    assert plan.fault == fault


def test_context_is_the_targets(checked: Check) -> None:
    with pytest.raises(InputError, match=r"does not fit: \d+ tokens and 5000 new ones in a cont"):
        checked(new_tokens=5000)


def test_matplotlib_is_asked_for_first(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(MachineError, match="matplotlib") as error:
        checked()
    assert error.value.hint == "pip install '.[torch,report]' in the clone"
