"""DSPARK's lattice against Eq. 1 written out, and its hooks around a drafted block."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specpilot_cli.engines.sglang.plugin.recorder_core import Recorder
from specpilot_cli.engines.sglang.plugin.recorder_dspark import (
    DsparkHooks,
    head_refusal,
    markov_lattice,
    unsupported,
)
from specpilot_cli.record.join import check_stock, join_request, no_steps, stock_outside
from specpilot_cli.record.shards import collect, read_index
from specpilot_cli.schema.plugin_config import RecorderPlugin
from tests.unit.sglang_recorder import fake_sglang

VOCABULARY, RANK, GAMMA = 60, 5, 4


class VanillaMarkov(torch.nn.Module):
    """The parts of SGLang's head that the recorder reads."""

    vocab_shard = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.markov_w1 = torch.nn.Embedding(VOCABULARY, RANK)
        self.markov_w2 = torch.nn.Linear(RANK, VOCABULARY, bias=False)

    def logits(self, base: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Eq. 1: base logits [.., V] of one position, corrected for the token before it."""
        return base + self.markov_w2(self.markov_w1(previous))


def greedy_block(
    *, markov_head: Any, base_logits: torch.Tensor, anchor_tokens: torch.Tensor, **_others: Any
) -> Any:
    """Stock's draft: argmax over the whole vocabulary, position by position."""
    tokens = [anchor_tokens]
    for place in range(base_logits.shape[1]):
        tokens.append(markov_head.logits(base_logits[:, place], tokens[-1]).argmax(-1))
    return torch.stack(tokens[1:], dim=1), None


def _best(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.topk(logits, top_k, dim=-1)
    return found.values, found.indices


@torch.no_grad()
def test_edges_are_equation_one() -> None:
    head, base = VanillaMarkov(), torch.randn(2, GAMMA, VOCABULARY)
    anchor = torch.tensor([7, 31])
    lattice = markov_lattice(head, base, anchor, _best, top_k=6)
    for request in range(2):
        for place in range(GAMMA):
            ids = lattice["candidate_ids"][request, place]
            assert ids.tolist() == base[request, place].topk(6).indices.tolist()
            for p in range(6):
                before = (
                    lattice["candidate_ids"][request, place - 1, p] if place else anchor[request]
                )
                torch.testing.assert_close(
                    lattice["scores"][request, place, p],
                    head.logits(base[request, place], before)[ids],
                )
    torch.testing.assert_close(lattice["unary_logsumexp"], torch.logsumexp(base, -1))


def test_heads_that_need_more_than_a_pair_are_refused() -> None:
    head = VanillaMarkov()
    assert head_refusal(head) is None
    assert "`RNNHead`" in str(head_refusal(type("RNNHead", (), {})()))
    head.vocab_shard = object()  # type: ignore[assignment]
    assert "SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD=0" in str(head_refusal(head))


def _worker(head: Any) -> Any:
    return SimpleNamespace(
        _hosts_draft=True, gamma=GAMMA, device="cpu", _draft_sampler=None,
        draft_model=SimpleNamespace(markov_head=head),
        model_runner=SimpleNamespace(max_running_requests=3),
    )  # fmt: skip


@pytest.fixture
def recorder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    fake_sglang.install(monkeypatch)
    sys.modules["sglang.srt.models.dflash"]._radix_topk = _best  # type: ignore[attr-defined]
    config = RecorderPlugin(mode="anchored", folder=str(tmp_path / "s"))
    return Recorder(config, engine="sglang 0.5.23", environ={})


@torch.no_grad()
def test_dense_steps_offer_the_server_a_token_it_will_reject(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sglang.install(monkeypatch)
    sys.modules["sglang.srt.models.dflash"]._radix_topk = _best  # type: ignore[attr-defined]
    config = RecorderPlugin(mode="dense", folder=str(tmp_path / "s"))
    recorder = Recorder(config, engine="sglang 0.5.23", environ={})
    hooks = DsparkHooks(recorder)
    hooks.open(lambda _worker: None, _worker(VanillaMarkov()))
    base = torch.randn(2, GAMMA, VOCABULARY)
    given: dict[str, Any] = {
        "markov_head": VanillaMarkov(),
        "base_logits": base,
        "anchor_tokens": torch.tensor([1, 2]),
    }
    plain, _ = greedy_block(**given)
    offered, logits = hooks.block(greedy_block, **given)
    assert logits is None
    assert offered[:, 0].tolist() == base[:, 0].argmin(-1).tolist()
    assert torch.equal(offered[:, 1:], plain[:, 1:])
    rows, layout = recorder.rows(2), recorder.layout
    assert rows is not None
    assert layout is not None
    assert torch.equal(rows[0][:, layout.stock].long(), plain), "recorded is what stock drafted"
    recorder.close()


def test_simulated_acceptance_of_dspark_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sglang.install(monkeypatch)
    config = RecorderPlugin(mode="dense", folder=str(tmp_path / "s"))
    recorder = Recorder(config, engine="e", environ={"SGLANG_SIMULATE_ACC_LEN": "1"})
    DsparkHooks(recorder).open(lambda _worker: None, _worker(VanillaMarkov()))
    assert "other tokens than the target's" in str(recorder.facts())


@torch.no_grad()
def test_blocks_are_recorded_with_stocks_own_choice(recorder: Recorder, tmp_path: Any) -> None:
    """Sharp biases make stock leave the sixteen best base tokens; that is recorded as it is."""
    head = VanillaMarkov()
    head.markov_w2.weight.mul_(8.0)
    hooks = DsparkHooks(recorder)
    worker = _worker(head)
    hooks.open(lambda _worker: None, worker)
    base = torch.randn(2, GAMMA, VOCABULARY, generator=torch.Generator().manual_seed(5))
    anchor = torch.tensor([7, 31])
    drafts: list[torch.Tensor] = []

    def forward(_worker: Any, _batch: Any) -> Any:
        drafted, _ = hooks.block(
            greedy_block, markov_head=head, base_logits=base, anchor_tokens=anchor, noise=None
        )
        drafts.append(drafted)
        return SimpleNamespace(accept_lens=torch.tensor([2, 1], dtype=torch.int32))

    batch = SimpleNamespace(
        forward_mode=fake_sglang.Mode("decode"), is_extend_in_batch=False,
        reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")],
        seq_lens=torch.tensor([9, 12]),
    )  # fmt: skip
    hooks.step(forward, worker, batch)
    recorder.close()
    (folder,) = (tmp_path / "s").iterdir()
    index = read_index(folder)
    assert (index.algorithm, index.block, index.positions) == ("DSPARK", GAMMA, GAMMA)
    rows = collect(folder, index, {"a", "b"})
    steps = [
        join_request(
            rows[name], prompt_len=length, output_ids=[token, 1, 2][: commits + 1], mode="anchored",
            empty=no_steps(GAMMA, 16),
        )
        for name, length, token, commits in (("a", 9, 7, 2), ("b", 12, 31, 1))
    ]  # fmt: skip
    both = {key: np.concatenate([part[key] for part in steps]) for key in steps[0]}
    assert both["stock_choice"].tolist() == drafts[0].tolist()
    assert 0 < stock_outside(both).mean() < 1
    check_stock(both, "DSPARK")


def test_a_megakernel_or_an_unknown_head_is_a_problem(recorder: Recorder) -> None:
    worker = _worker(VanillaMarkov())
    worker._draft_sampler = SimpleNamespace(_megakernel_steps=object())
    DsparkHooks(recorder).open(lambda _worker: "kept", worker)
    assert "megakernel" in str(recorder.facts())


def test_older_versions_say_what_they_lack(recorder: Recorder) -> None:
    ((target, kind, refuse),) = unsupported(recorder)
    assert target.endswith("DSparkWorkerV2.init_cuda_graphs")
    assert kind == "BEFORE"
    assert refuse(None) is None
    assert "needs SGLang 0.5.22" in str(recorder.facts())
