"""Resume at run granularity: what was measured stays, what was cut off is measured again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from virtual_engines import FakeClock, FakeEngine, constant, prompts

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.paired_bench.run import JournalFile, run_paired_bench
from specpilot_cli.paired_bench.saved import saved_rows
from specpilot_cli.paired_bench.types import PairedBenchResult, PairedBenchSettings

SETTINGS = PairedBenchSettings(aa_sessions=1)


class Killed(BaseException):
    """Stands for the process ending there."""


def engines(kill_at: int | None = None, candidate_rate: float = 105.0) -> dict[str, FakeEngine]:
    """Two engines; serving the `kill_at`-th request of the candidate ends the process."""
    clock = FakeClock()
    candidate = FakeEngine(clock, constant(candidate_rate))

    def before(request: GenerateRequest) -> None:
        if kill_at is not None and len(candidate.served) == kill_at:
            raise Killed

    candidate.before = before
    return {"baseline": FakeEngine(clock, constant(100.0)), "candidate": candidate}


def bench(
    systems: dict[str, FakeEngine], journal: JournalFile, settings: PairedBenchSettings = SETTINGS
) -> PairedBenchResult:
    return run_paired_bench(
        systems,
        prompts(),
        settings=settings,
        journal=journal,
        clock=systems["baseline"].clock,
        cpu_clock=lambda: 0.0,
    )


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


# 14 timed requests; the candidate serves 2 for warm-up and 14 in each run.
IN_SECOND_RUN = 2 + 14 + 5


def test_a_killed_benchmark_resumes_at_its_run_and_gives_the_same_result(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    with pytest.raises(Killed):
        bench(engines(kill_at=IN_SECOND_RUN), JournalFile(path))
    assert kinds(path).count("run_end") == 3  # two A/A runs and one of the comparison

    resumed = engines()
    result = bench(resumed, JournalFile(path, resume=True))
    whole = bench(engines(), JournalFile(tmp_path / "whole.jsonl"))
    assert len(resumed["candidate"].served) == 2 + 14
    assert result.verdict == "promote"
    assert result.summary.gain == whole.summary.gain
    assert result.summary.decision == whole.summary.decision
    assert len(result.rows) == len(whole.rows)


def test_a_line_cut_off_in_the_middle_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    with pytest.raises(Killed):
        bench(engines(kill_at=IN_SECOND_RUN), JournalFile(path))
    path.write_bytes(path.read_bytes() + b'{"kind":"request","sess')
    assert bench(engines(), JournalFile(path, resume=True)).verdict == "promote"
    assert kinds(path).count("run_end") == 4  # and every line parses


def test_a_finished_benchmark_resumes_without_serving_a_timed_request(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    first = bench(engines(), JournalFile(path))
    again = engines()
    second = bench(again, JournalFile(path, resume=True))
    assert len(again["candidate"].served) == 2
    assert second.summary.gain == first.summary.gain
    assert second.rows == first.rows


def test_an_invalid_benchmark_does_not_resume(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    broken = engines()

    def fail(request: GenerateRequest) -> None:
        if len(broken["candidate"].served) == 5:
            raise MeasurementInvalid("the stream broke")

    broken["candidate"].before = fail
    assert bench(broken, JournalFile(path)).verdict == "invalid"
    assert kinds(path)[-1] == "failure"
    with pytest.raises(MeasurementInvalid, match=r"already invalid.*the stream broke"):
        bench(engines(), JournalFile(path, resume=True))
    assert bench(engines(), JournalFile(path, force=True)).verdict == "promote"


def test_an_existing_journal_is_neither_continued_nor_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    bench(engines(), JournalFile(path))
    before = path.read_bytes()
    with pytest.raises(InputError, match="already exists"):
        bench(engines(), JournalFile(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: (s, dataclasses.replace(SETTINGS, batches=(2,))), "settings"),
        (lambda s: (s | {"ar": s["baseline"]}, SETTINGS), "systems"),
        (lambda s: (_with_info(s, {"version": "other"}), SETTINGS), "candidate.version"),
        (
            lambda s: (_with_info(s, {"version": "fake", "specpilot": {"n_nodes": 32}}), SETTINGS),
            "candidate.specpilot",
        ),
    ],
    ids=["settings", "systems", "server", "mechanisms"],
)
def test_another_benchmark_does_not_continue_the_journal(
    tmp_path: Path, change: Any, words: str
) -> None:
    path = tmp_path / "bench.jsonl"
    bench(engines(), JournalFile(path))
    systems, settings = change(engines())
    with pytest.raises(InputError, match=words):
        bench(systems, JournalFile(path, resume=True), settings)


def test_a_restarted_server_on_another_port_continues(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    bench(engines(), JournalFile(path))
    moved = _with_info(engines(), {"version": "fake", "port": 2, "startup_time": 3.0})
    assert bench(moved, JournalFile(path, resume=True)).verdict == "promote"


def test_a_journal_with_lost_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    bench(engines(), JournalFile(path))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(InputError, match="27 of its 28 answers"):
        bench(engines(), JournalFile(path, resume=True))


def _rewritten(path: Path, kind: str, **changed: Any) -> None:
    """Change the first line of a kind in a journal."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line["kind"] == kind).update(changed)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("request", {"last_byte_s": 0.0}, "not in order"),
        ("request", {"completion_tokens": 7}, "not the number of `output_ids`"),
        ("request", {"output_sha256": "0" * 64}, "not those of its hash"),
        ("request", {"finish_reason": "abort"}, "finish_reason"),
        ("request", {"verify_steps": -1}, "verify_steps"),
        ("request", {"system": "candidate"}, "other answers than were asked for"),
        ("request", {"batch": 2}, "other answers than were asked for"),
        ("run_end", {"n_requests": 0}, "n_requests"),
        ("run_end", {"n_requests": 2}, "other answers than were asked for"),
        ("run_end", {"n_requests": 10**6}, "of its 1000000 answers"),
    ],
)
def test_an_edited_journal_does_not_resume(
    tmp_path: Path, kind: str, changed: dict[str, Any], words: str
) -> None:
    path = tmp_path / "bench.jsonl"
    bench(engines(), JournalFile(path))
    _rewritten(path, kind, **changed)
    with pytest.raises(InputError, match=words):
        bench(engines(), JournalFile(path, resume=True))


def test_the_answers_of_another_benchmark_are_not_exported(tmp_path: Path) -> None:
    result, path = tmp_path / "r.json", tmp_path / "r.journal.jsonl"
    summary = bench(engines(), JournalFile(path)).summary
    assert len(saved_rows(result, summary)) == 4 * 28
    other = bench(engines(candidate_rate=120.0), JournalFile(path, force=True)).summary
    assert len(saved_rows(result, other)) == 4 * 28
    with pytest.raises(InputError, match="are not those of"):
        saved_rows(result, summary)


def test_a_foreign_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text('{"request_id": "a"}\n')
    with pytest.raises(InputError) as caught:
        bench(engines(), JournalFile(path, resume=True))
    assert caught.value.where == f"{path}:1"


def _with_info(systems: dict[str, FakeEngine], info: dict[str, Any]) -> dict[str, FakeEngine]:
    systems["candidate"].info = info
    return systems
