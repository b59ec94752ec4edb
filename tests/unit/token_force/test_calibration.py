"""δ measured once and used again, and the options that ask for longer outputs."""

from __future__ import annotations

import json

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.token_force.calibration import read_calibration, stranger_warnings
from specpilot_cli.token_force.sources import Sources
from tests.unit.token_force.cli import N_REQUESTS, flags, run


@pytest.fixture
def calibrated(servers, prompts, tmp_path):
    """The file of a calibration, and what the command printed."""
    path = tmp_path / "delta.json"
    done = run(
        "--calibrate", "--stock", servers["stock"].url, "--ar", servers["ar"].url,
        "--scorer", servers["scorer"].url, "--prompts", prompts, "-o", path, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path, done


def test_a_calibration_measures_delta_and_stocks_rate_and_judges_nobody(calibrated):
    path, done = calibrated
    document = json.loads(path.read_text())
    assert document["verdict"] is None
    threshold = document["results"]["threshold"]
    assert threshold["n_prompts"] == N_REQUESTS
    assert threshold["n_departures"] == len(threshold["departures"])
    assert threshold["delta_nats"] % 0.125 == 0
    assert document["results"]["stock"]["n_requests"] == N_REQUESTS
    assert "delta" in done.stdout
    assert "verdict" not in done.stdout


def test_a_kept_delta_gives_the_verdict_that_ar_gives(servers, prompts, tmp_path, calibrated):
    path, _ = calibrated
    live = run(*flags(servers, "lossless"), "--prompts", prompts, "--json", cwd=tmp_path)
    again = run(
        *flags(servers, "lossless")[:-2], "--delta", path, "--prompts", prompts, "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert again.returncode == live.returncode == 0, again.stderr
    first, second = (json.loads(done.stdout)["results"]["threshold"] for done in (live, again))
    assert first == second
    assert str(path) in [item["path"] for item in json.loads(again.stdout)["inputs"]]
    assert "calibrated with" not in again.stderr


def test_a_delta_of_other_engines_is_warned_of(calibrated):
    threshold, engines = read_calibration(calibrated[0])
    assert threshold.n_prompts == N_REQUESTS
    assert stranger_warnings(engines, engines) == []
    (warning,) = stranger_warnings(engines, {"scorer": {"version": "other"}})
    assert "version `toy` in the scorer" in warning
    weights = [{"stock": {"specpilot": {"target_sha256": digest}}} for digest in "ab"]
    assert "other weights in the stock" in stranger_warnings(*weights)[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "command"),
        ('{"command": "replay", "results": {}, "environment": {}}', "threshold"),
        ("[1]", "no calibration"),
        ("0.25 nats", "JSON"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text, message):
    path = tmp_path / "delta.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_calibration(path)


def test_a_verdict_is_no_calibration_without_prompts_behind_delta(tmp_path):
    path = tmp_path / "delta.json"
    threshold = {
        "delta_nats": 0.25, "n_prompts": None, "departures": [], "max_gap_nats": None,
        "p99_gap_nats": None,
    }  # fmt: skip
    document = {"command": "token-force", "results": {"threshold": threshold}, "environment": {}}
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="n_prompts"):
        read_calibration(path)


URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"system": None}, "--system"),
        ({"calibrate": True}, "--calibrate"),
        ({"calibrate": True, "system": None}, "--ar"),
        ({"calibrate": True, "system": None, "ar": URL, "delta": 0.25}, "--calibrate"),
        ({"probe": URL}, "--probe"),
        ({"stock": "stock.jsonl", "probe": "probe.jsonl"}, "--probe"),
        ({"scorer": "target"}, "--scorer"),
        ({"scorer": "vllm:target"}, "--scorer"),
        ({"scorer": "reference:"}, "--scorer"),
    ],
)
def test_sources_that_do_not_fit_together_are_refused(fields, where):
    given = {"system": URL, "stock": URL, "scorer": URL, "delta": 0.25} | fields
    if "ar" not in fields and fields.get("calibrate"):
        given["delta"] = None
    with pytest.raises(InputError) as caught:
        Sources(**given).check()
    assert caught.value.where == where
    assert caught.value.hint


def test_answers_can_be_longer_than_the_prompts_ask_for(servers, prompts, tmp_path):
    args = [*flags(servers, "lossless"), "--prompts", prompts, "--max-new-tokens", "32"]
    done = run(*args, "--ignore-eos", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"]["system"]
    assert found["longest_output_tokens"] == 32
    assert found["n_tokens"] == 32 * N_REQUESTS
    bodies = [b for b in servers["stock"].seen if b.get("sampling_params")]
    assert all(body["sampling_params"]["ignore_eos"] for body in bodies)


def test_recorded_stock_is_probed_live_where_asked(servers, prompts, tmp_path):
    saved = tmp_path / "answers"
    run(*flags(servers, "faulty"), "--prompts", prompts, "--save-outputs", saved, cwd=tmp_path)
    args = [
        "--system", saved / "system.jsonl", "--stock", saved / "stock.jsonl", "--ar",
        saved / "ar.jsonl", "--scorer", servers["scorer"].url, "--json",
    ]  # fmt: skip
    for more, clauses in (([], 2), (["--probe", servers["stock"].url], 4)):
        done = run(*args, *more, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert len(json.loads(done.stdout)["results"]["event_rule"]["audit_clauses"]) == clauses


def test_a_server_that_runs_fewer_at_one_time_is_warned_of(
    servers, prompts, tmp_path, toy_serve, toy_system
):
    good = servers["lossless"].script

    def script(exchange):
        if exchange.path == "/server_info":
            exchange.reply({"version": "toy", "max_running_requests": 4})
        else:
            good(exchange)

    servers["lossless"].script = script
    done = run(*flags(servers, "lossless"), "--prompts", prompts, cwd=tmp_path)
    assert "system server runs 4 requests at one time, fewer than the 8" in done.stderr


def test_the_page_shows_verdict_bars_and_intervals(servers, prompts, tmp_path):
    page = tmp_path / "audit.html"
    done = run(*flags(servers, "faulty"), "--prompts", prompts, "-o", page, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    text = page.read_text()
    assert text.count("<svg") >= 1
    for words in ("reject", "event rule", "ratio [", "mismatches, stock", "smallest rise caught"):
        assert words in text
