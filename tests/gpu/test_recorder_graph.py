"""The recorder under CUDA graphs: replays fill the same rows, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")
core = pytest.importorskip("specpilot_cli.engines.sglang.plugin.recorder_core")
lattice = pytest.importorskip("specpilot_cli.engines.sglang.plugin.recorder_lattice")
shards = pytest.importorskip("specpilot_cli.record.shards")
plugin_config = pytest.importorskip("specpilot_cli.schema.plugin_config")

pytestmark = pytest.mark.gpu

L, K, VOCABULARY, PADDED = 7, 16, 151_936, 4


class CapturedDraft:
    """A draft in a CUDA graph for `PADDED` requests: logits in, lattice rows out."""

    def __init__(self, recorder: Any) -> None:
        self.logits = torch.zeros(PADDED * L, VOCABULARY, dtype=torch.bfloat16, device="cuda")
        self.edges = torch.zeros(PADDED, L, K, K, device="cuda")
        self.anchor = torch.zeros(PADDED, dtype=torch.int64, device="cuda")
        self._recorder = recorder
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._draft()  # as SGLang does before it captures
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph):
            self._draft()

    def _draft(self) -> None:
        unary, ids = torch.topk(self.logits.float(), K, dim=-1)
        unary, ids = unary.view(PADDED, L, K), ids.view(PADDED, L, K)
        rows = self._recorder.rows(PADDED)
        lattice.write_lattice(
            self._recorder.layout,
            rows,
            anchor=self.anchor,
            candidate_ids=ids,
            scores=unary[:, :, None] + self.edges,
            unary=unary,
            unary_logsumexp=lattice.full_logsumexp(self.logits, lambda part: part.mul_(0.5)),
        )
        rows[0][:, self._recorder.layout.stock].copy_(ids[..., 0])


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Any]:
    config = plugin_config.RecorderPlugin(mode="anchored", folder=str(tmp_path / "shards"))
    made = core.Recorder(config, engine="test", environ={})
    made.open(core.Shape("DFLASH", L + 1, L, K, PADDED), torch.device("cuda", 0), writes=True)
    assert isinstance(made.facts(), dict), made.facts()
    yield made
    made.close()


def test_replayed_graphs_record_each_step_without_a_wait(recorder: Any, tmp_path: Path) -> None:
    """Fifty steps are queued faster than the device runs them; each keeps its own lattice."""
    draft = CapturedDraft(recorder)
    generator = torch.Generator(device="cuda").manual_seed(11)
    sizes = [1 + step % 3 for step in range(50)]
    steps = len(sizes)
    logits = torch.randn(
        steps, PADDED * L, VOCABULARY, generator=generator, device="cuda", dtype=torch.bfloat16
    )
    edges = torch.randn(steps, PADDED, L, K, K, generator=generator, device="cuda")
    prefix = torch.arange(PADDED, device="cuda") * 100
    commits = torch.arange(PADDED, device="cuda", dtype=torch.int32) + 1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, size in enumerate(sizes):
            assert recorder.begin((prefix + step)[:size])
            draft.logits.copy_(logits[step])
            draft.edges.copy_(edges[step])
            draft.anchor.fill_(step)
            draft.graph.replay()
            recorder.finish([f"r{row}" for row in range(size)], commits[:size])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorder.close()
    facts = recorder.facts()
    assert (facts["steps"], facts["lattices"], facts["dropped_steps"]) == (steps, sum(sizes), 0)
    (folder,) = (tmp_path / "shards").iterdir()
    rows = shards.collect(folder, shards.read_index(folder), {"r0", "r1", "r2"})
    for row in range(3):
        found = rows[f"r{row}"].joined()
        taken = [step for step, size in enumerate(sizes) if size > row]
        assert found["anchor"].tolist() == taken
        assert found["prefix_len"].tolist() == [100 * row + step for step in taken]
        assert set(found["commit_len"].tolist()) == {row + 1}
        for place, step in enumerate(taken):
            own = logits[step].view(PADDED, L, VOCABULARY)[row].float()
            _check({name: part[place] for name, part in found.items()}, own, edges[step, row])


def _check(got: dict[str, Any], logits: Any, edges: Any) -> None:
    """One recorded lattice against logits float32 [L, V] and edges [L, K, K] on the device."""
    unary = torch.topk(logits, K, dim=-1).values
    norm = torch.logsumexp(0.5 * logits, dim=-1)
    assert np.array_equal(got["unary"], unary.cpu().numpy())
    assert np.array_equal(got["scores"], (unary[:, None] + edges).cpu().numpy())
    np.testing.assert_allclose(got["unary_logsumexp"], norm.cpu().numpy(), atol=1e-5)
    ids = torch.from_numpy(got["candidate_ids"]).long().cuda()
    assert torch.equal(logits.gather(-1, ids), unary)
    assert got["stock_choice"].tolist() == got["candidate_ids"][:, 0].tolist()
