"""What is in the rows: lattices, chains, lengths, against the fake server's own arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specpilot_cli.engines.sglang.plugin.recorder_lattice import full_logsumexp
from specpilot_cli.record.shards import collect, read_index
from tests.unit.sglang_recorder import fake_sglang
from tests.unit.sglang_recorder.conftest import Start
from tests.unit.sglang_recorder.fake_sglang import VOCABULARY, Request, next_token


def _requests() -> list[Request]:
    return [Request(f"r{n}", list(range(3 + n, 9 + 2 * n)), 5 + 7 * n) for n in range(5)]


def _rows(recording: Any, requests: list[Request]) -> Any:
    recording.state.facts["recorder"].__self__.close()
    (folder,) = recording.folder.iterdir()
    return collect(folder, read_index(folder), {request.rid for request in requests})


def _expected(worker: Any, sequence: list[int]) -> dict[str, Any]:
    """The lattice behind `sequence`, without any of the hooks."""
    model = worker.draft_model
    hidden = model.hidden(sequence)
    logits = (hidden @ model.head.T)[:, :VOCABULARY].double()
    unary = torch.tanh(logits * 1.5 / 20) * 20
    best, ids = unary.topk(fake_sglang.TOP_K, dim=-1)
    before = torch.cat([torch.full((1, fake_sglang.TOP_K), sequence[-1]), ids[:-1]])
    selector = model.candidate_selector
    edges = selector.before[before].double() @ selector.after[ids].double().transpose(1, 2)
    return {
        "candidate_ids": ids,
        "scores": best[:, None] + edges,
        "unary": best,
        "unary_logsumexp": torch.logsumexp(unary, dim=-1),
    }


@pytest.mark.parametrize(("mode", "late"), [("dense", False), ("dense", True), ("anchored", True)])
def test_every_step_of_a_ragged_batch_has_its_own_lattice(
    start: Start, mode: str, late: bool
) -> None:
    recording = start(mode)
    scheduler = recording.scheduler(late=late)
    requests = _requests()
    scheduler.waiting = list(requests)
    scheduler.run()
    assert max(len(request.output) for request in requests) > 15
    found = _rows(recording, requests)
    for request in requests:
        raw = found[request.rid].joined()
        for row in range(len(raw["anchor"])):
            length = int(raw["prefix_len"][row]) + 1
            sequence = (request.prompt + request.output)[:length]
            assert raw["anchor"][row] == sequence[-1]
            for name, value in _expected(recording.worker, sequence).items():
                np.testing.assert_allclose(raw[name][row], value.numpy(), atol=2e-5, err_msg=name)
            commits = int(raw["commit_len"][row])
            block = [next_token(sequence)]
            while len(block) < commits:
                block.append(next_token(sequence + block))
            assert block[: commits - 1] == raw["stock_choice"][row, : commits - 1].tolist()
        steps = raw["prefix_len"] - len(request.prompt)
        assert steps[0] == 0
        assert np.array_equal(steps[1:], (steps + raw["commit_len"])[:-1])
        last = steps[-1] + raw["commit_len"][-1]
        assert last >= len(request.answer()) - 1


def test_dense_steps_commit_one_token_and_anchored_ones_more(start: Start, tmp_path: Path) -> None:
    commits = {}
    for mode in ("dense", "anchored"):
        recording = start(mode, folder=tmp_path / mode)
        scheduler = recording.scheduler()
        requests = _requests()
        scheduler.waiting = list(requests)
        scheduler.run()
        found = _rows(recording, requests)
        commits[mode] = np.concatenate([found[r.rid].joined()["commit_len"] for r in requests])
    assert np.all(commits["dense"] == 1)
    assert commits["anchored"].max() > 1


def test_the_logsumexp_of_all_ranks_is_gathered(start: Start) -> None:
    other = torch.tensor(2.5)
    seen = []

    def gather(local: torch.Tensor, dim: int) -> torch.Tensor:
        seen.append(local)
        return torch.cat([local, other.expand_as(local)], dim=dim)

    recording = start("dense", tp={"tp_size": 2, "gather": gather})
    scheduler = recording.scheduler()
    scheduler.waiting = [Request("r", [5, 6, 7], 4)]
    request = scheduler.waiting[0]
    scheduler.run()
    raw = _rows(recording, [request])["r"].joined()
    own = _expected(recording.worker, request.prompt + request.output[:1])["unary_logsumexp"]
    np.testing.assert_allclose(
        raw["unary_logsumexp"][0], torch.logaddexp(own, other.double()).numpy(), atol=1e-5
    )
    assert len(seen) == len(raw["anchor"])


def test_the_rows_stay_where_a_captured_graph_writes_them(start: Start) -> None:
    """A replayed graph writes to the addresses it was captured with, whatever the batch is."""
    recording = start("dense", max_running=3)
    recorder = recording.state.facts["recorder"].__self__
    padded = recorder.rows(6)  # graphs are captured for up to six rows here
    scheduler = recording.scheduler()
    scheduler.waiting = [Request("r", [5, 6, 7], 6)]
    scheduler.run()
    again = recorder.rows(2)
    assert padded is not None
    assert again is not None
    assert again[0].data_ptr() == padded[0].data_ptr() == again[1].data_ptr()
    assert recorder.rows(7) is None
    assert "more than the 6" in recording.problems()[0]


def test_logits_of_the_server_are_left_alone() -> None:
    logits = torch.randn(70, 33)
    kept = logits.clone()
    result = full_logsumexp(logits, lambda part: part.mul_(3.0).tanh_())
    assert torch.equal(logits, kept)
    torch.testing.assert_close(result, torch.logsumexp(torch.tanh(3 * kept), dim=-1))


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(3, 1 << 14, dtype=torch.bfloat16)
    torch.testing.assert_close(full_logsumexp(logits), torch.full((3,), float(np.log(1 << 14))))
