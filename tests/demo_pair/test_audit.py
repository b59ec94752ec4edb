"""`token-force` on real servers: the injected fault is rejected, lossless systems are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.schema.outputs import OutputRecord
from tests.demo_pair.conftest import SERVERS

pytestmark = pytest.mark.slow

PROMPTS = 16  # unseen, two of each kind
FAULT_AFTER = 48
FAULT_EVERY = 7

Answer = tuple[int, dict[str, Any]]
Audit = Callable[..., Answer]


@pytest.fixture(scope="module")
def audit(server: Callable[[str], str], demo: Any, specpilot_json: Any, prompt_file: Any) -> Audit:
    """Audits a server by name against the stock chain; plain decoding scores and calibrates."""

    def run(
        system: str, *more: object, stock: object = "", ar: object = "", scorer: str = ""
    ) -> Answer:
        code, answer = specpilot_json(
            "token-force", "--system", server(system) if system in SERVERS else system,
            "--stock", stock or server("chain"),
            "--scorer", scorer or server("ar"), "--ar", ar or server("ar"),
            "--prompts", prompt_file(demo.prompts("unseen", PROMPTS)),
            "--tokenizer", demo.target, *more,
        )  # fmt: skip
        assert answer["command"] == "token-force"
        assert answer["results"]["system"]["n_requests"] == PROMPTS
        return code, answer

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first audit leaves the answers of stock and of plain decoding."""
    return tmp_path_factory.mktemp("audit") / "answers"


@pytest.fixture(scope="module")
def tree_audit(audit: Audit, saved: Path) -> Answer:
    """The audit of the lossless tree."""
    return audit("tree", "--save-outputs", saved)


def _check_accepted(answer: dict[str, Any]) -> None:
    results = answer["results"]
    assert answer["verdict"] == "accept"
    assert results["reasons"] == []
    # near-ties may count as mismatches, but rounding makes them rare and keeps them small
    for role in ("system", "stock"):
        assert results[role]["mismatch_rate_pct"] < 0.5
        assert results["event_rule"][role]["n_large_margin"] == 0
    assert results["system"]["n_tokens"] > 80 * PROMPTS
    assert results["threshold"]["calibrated"]
    assert results["threshold"]["delta_nats"] == 0.125


def test_tree_is_accepted(tree_audit: Answer) -> None:
    code, answer = tree_audit
    assert code == 0
    _check_accepted(answer)
    assert answer["environment"]["engines"]["system"]["specpilot"]["mode"] == "tree"
    # a fault as large as the injected one would not have been accepted
    assert answer["results"]["smallest_fault_caught"]["rate_difference_pct"] < 5


def test_tree_on_w12_weights_is_accepted(audit: Audit, tree_audit: Answer, saved: Path) -> None:
    """Against the recorded answers of stock: the other form of the command."""
    code, answer = audit("w12-tree", stock=saved / "stock.jsonl", ar=saved / "ar.jsonl")
    assert code == 0
    _check_accepted(answer)
    about = answer["environment"]["engines"]["system"]["specpilot"]
    assert (about["mode"], about["weight_format"]) == ("tree", "w12")
    assert answer["results"]["stock"] == tree_audit[1]["results"]["stock"]


@pytest.mark.usefixtures("tree_audit")
def test_injected_fault_is_rejected(audit: Audit, saved: Path, tmp_path: Path) -> None:
    """Bias of 2 on every seventh id after position 48: seen in rate and events, and only there."""
    code, answer = audit(
        "faulty-tree", "--audit-limit", 24, "--save-outputs", tmp_path, ar=saved / "ar.jsonl"
    )
    assert code == 1
    results = answer["results"]
    assert answer["verdict"] == "reject"
    assert results["rate_rule"]["rejects"]
    assert results["event_rule"]["rejects"]
    assert results["event_rule"]["stock"]["n_unexplained"] == 0
    assert results["system"]["mismatch_rate_pct"] > results["stock"]["mismatch_rate_pct"] + 2
    about = answer["environment"]["engines"]["system"]["specpilot"]
    assert about["fault"]["after_output_position"] == FAULT_AFTER
    _check_events_show_the_fault(results["worst_events"])

    pairs = [
        (system.output_ids, stock.output_ids)
        for system, stock in zip(*(_outputs(tmp_path, r) for r in ("system", "stock")), strict=True)
    ]
    early = [one[:FAULT_AFTER] != other[:FAULT_AFTER] for one, other in pairs]
    assert sum(early) <= 1  # a near-tie at most
    assert sum(one != other for one, other in pairs) > PROMPTS // 2


@pytest.mark.usefixtures("tree_audit")
@pytest.mark.parametrize("name", ["low-precision", "stale-state", "temperature"])
def test_faults_of_other_kinds_are_rejected(
    audit: Audit, server: Callable[[str], str], saved: Path, name: str
) -> None:
    """Against recorded stock, with live stock for the audit; eight requests in flight."""
    code, answer = audit(
        name, "--audit-limit", 24, "--probe", server("chain"), "--concurrency", 8,
        stock=saved / "stock.jsonl", ar=saved / "ar.jsonl",
    )  # fmt: skip
    assert code == 1
    results = answer["results"]
    assert results["event_rule"]["audit_clauses"] == ["record", "prefill_length", "path", "margin"]
    assert results["event_rule"]["stock"]["n_unexplained"] == 0
    assert answer["environment"]["engines"]["system"]["specpilot"]["fault"]["kind"] == name


@pytest.mark.usefixtures("tree_audit")
def test_temperature_that_leaks_in_under_load_is_not_there_for_one_request(
    audit: Audit, saved: Path
) -> None:
    """Why audits run at the number of requests that is served."""
    code, answer = audit(
        "temperature", "--concurrency", 1, stock=saved / "stock.jsonl", ar=saved / "ar.jsonl"
    )
    assert code == 0
    assert answer["results"]["system"]["mean_requests_in_flight"] < 1.1


@pytest.mark.parametrize("engine", ["reference", "transformers"])
def test_a_model_folder_scores_as_the_server_does(
    audit: Audit, tree_audit: Answer, saved: Path, demo: Any, engine: str
) -> None:
    """Recorded answers and a scorer in this process: no server at all."""
    code, answer = audit(
        str(saved / "system.jsonl"), stock=saved / "stock.jsonl", ar=saved / "ar.jsonl",
        scorer=f"{engine}:{demo.target}",
    )  # fmt: skip
    assert code == 0
    mine, served = (a["results"] for a in (answer, tree_audit[1]))
    for role in ("system", "stock"):
        assert mine[role]["n_tokens"] == served[role]["n_tokens"]
        # a near-tie of two tokens may fall the other way
        assert abs(mine[role]["n_mismatches"] - served[role]["n_mismatches"]) <= 1


def _check_events_show_the_fault(events: list[dict[str, Any]]) -> None:
    """The largest margins the audit lists are the injected bias itself."""
    assert events
    for event in events:
        assert event["position"] >= FAULT_AFTER
        assert event["token_id"] % FAULT_EVERY == 0
        assert event["argmax_id"] % FAULT_EVERY != 0
        assert event["margin_nats"] <= 2.0 + 1e-3
        assert event["token_text"] is not None


def _outputs(folder: Path, role: str) -> list[OutputRecord]:
    return read_jsonl(folder / f"{role}.jsonl", OutputRecord)
