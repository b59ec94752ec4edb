"""`specpilot token-force` from its command line, against local servers."""

from __future__ import annotations

import json

import pytest

from tests.unit.token_force.cli import N_REQUESTS, flags, run


def test_a_lossless_server_is_accepted(servers, prompts, tmp_path):
    done = run(*flags(servers, "lossless"), "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "verdict: accept" in done.stdout
    assert "mismatch %" in done.stdout
    assert "warning" not in done.stderr


def test_a_faulty_server_is_rejected_with_one_json_document(servers, prompts, tmp_path):
    out = tmp_path / "result.json"
    done = run(*flags(servers, "faulty"), "--prompts", prompts, "--json", "-o", out, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(out.read_text())
    assert document["verdict"] == "reject"
    assert document["command"] == "token-force"
    assert document["environment"]["engines"]["scorer"]["version"] == "toy"
    event_rule = document["results"]["event_rule"]
    assert event_rule["rejects"] is True
    assert "path" in event_rule["audit_clauses"]
    assert document["results"]["worst_events"][0]["token_id"] % 7 == 0


def test_exit_zero_keeps_the_verdict(servers, prompts, tmp_path):
    done = run(*flags(servers, "faulty"), "--prompts", prompts, "--exit-zero", cwd=tmp_path)
    assert done.returncode == 0
    assert "verdict: reject" in done.stdout


def test_saved_answers_give_the_same_result_without_the_servers(servers, prompts, tmp_path):
    saved = tmp_path / "answers"
    live = run(
        *flags(servers, "faulty"), "--prompts", prompts, "--save-outputs", saved, "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert live.returncode == 1, live.stderr
    assert sorted(path.name for path in saved.iterdir()) == [
        "ar.jsonl",
        "stock.jsonl",
        "system.jsonl",
    ]
    again = run(
        "--system", saved / "system.jsonl", "--stock", saved / "stock.jsonl",
        "--ar", saved / "ar.jsonl", "--scorer", servers["scorer"].url, "--json", cwd=tmp_path,
    )  # fmt: skip
    assert again.returncode == 1, again.stderr
    first, second = json.loads(live.stdout)["results"], json.loads(again.stdout)["results"]
    for key in ("system", "stock", "rate_rule", "threshold"):
        assert first[key] == second[key]
    assert len(json.loads(again.stdout)["inputs"]) == 3


def test_saved_answers_are_not_overwritten_without_force(servers, prompts, tmp_path):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "ar.jsonl").write_text("precious")
    args = [*flags(servers, "lossless"), "--prompts", prompts, "--save-outputs", "answers"]
    refused = run(*args, cwd=tmp_path)
    assert refused.returncode == 2
    assert "already exists" in refused.stderr
    assert servers["lossless"].seen == []
    assert run(*args, "--force", cwd=tmp_path).returncode == 0
    assert "precious" not in (tmp_path / "answers" / "ar.jsonl").read_text()


def test_every_system_gets_the_ids_the_first_server_made_of_the_text(servers, prompts, tmp_path):
    assert run(*flags(servers, "lossless"), "--prompts", prompts, cwd=tmp_path).returncode == 0
    asked = [body["text"] for body in servers["lossless"].seen if "text" in body]
    assert len(set(asked)) == N_REQUESTS
    assert all("input_ids" in body for body in servers["stock"].seen if body)
    assert not any("text" in body for body in servers["ar"].seen)


def test_a_live_system_is_asked_the_recorded_stocks_questions(servers, prompts, tmp_path):
    saved = tmp_path / "answers"
    run(*flags(servers, "lossless"), "--prompts", prompts, "--save-outputs", saved, cwd=tmp_path)
    done = run(
        "--system", servers["faulty"].url, "--stock", saved / "stock.jsonl",
        "--scorer", servers["scorer"].url, "--delta", "0.25", "--limit", "9", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["results"]["system"]["n_requests"] == 9


def test_too_few_prompts_are_no_verdict(servers, prompts, tmp_path):
    done = run(*flags(servers, "lossless"), "--prompts", prompts, "--limit", "5", cwd=tmp_path)
    assert done.returncode == 4
    assert "5 requests carry no verdict" in done.stderr
    assert "verdict:" not in done.stdout


@pytest.mark.parametrize("role", ["--system", "--stock", "--scorer", "--ar"])
def test_an_unreachable_server_is_the_machines_fault_before_any_work(
    servers, prompts, tmp_path, role
):
    args = flags(servers, "lossless")
    args[args.index(role) + 1] = "http://127.0.0.1:9"
    done = run(*args, "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 3
    name = "AR" if role == "--ar" else role.removeprefix("--")
    assert f"the {name} server at http://127.0.0.1:9 does not answer" in done.stderr
    assert "hint:" in done.stderr
    assert all("sampling_params" not in body for s in servers.values() for body in s.seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--scorer", "scores.jsonl"], "--scorer"),
        (["--system", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--tokenizer", "nowhere"], "no tokenizer"),
        (["--delta", "-1"], "delta"),
        (["-o", "result.pdf"], "unknown format"),
    ],
)
def test_bad_input_is_refused_with_its_place(servers, prompts, tmp_path, change, message):
    done = run(*flags(servers, "lossless"), "--prompts", prompts, *change, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_a_bad_recorded_line_is_named(servers, prompts, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        '{"request_id": "p0", "benchmark": "toy", "prompt_ids": [1], "output_ids": []}\n'
    )
    args = flags(servers, "lossless")
    args[1] = str(bad)
    done = run(*args, "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.jsonl:1" in done.stderr


def test_neither_ar_nor_delta_is_bad_usage(servers, prompts, tmp_path):
    done = run(*flags(servers, "lossless")[:-2], "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 2
    assert "--delta" in done.stderr
