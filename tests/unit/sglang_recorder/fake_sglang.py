"""A small SGLang on the CPU: batched speculative decoding with the functions that are hooked.

Real tensors, real selector arithmetic, a target whose next token is a fixed function of the
sequence. Modules stand under SGLang's names, so that the plugin registers its hooks unchanged.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

VOCABULARY, PADDING, TOP_K, RANK, HIDDEN = 48, 16, 4, 3, 8
EOS = 0


@dataclass
class Request:
    """What the scheduler keeps of a request; `rid` is its name there."""

    rid: str
    prompt: list[int]
    limit: int
    output: list[int] = field(default_factory=list)
    aborted: bool = False

    @property
    def finished(self) -> bool:
        return self.aborted or len(self.output) >= self.limit or EOS in self.output

    def answer(self) -> list[int]:
        """What the client sees: cut at the limit and behind the end token."""
        cut = self.output[: self.limit]
        return cut[: cut.index(EOS) + 1] if EOS in cut else cut


def next_token(sequence: list[int]) -> int:
    """The target: never the end token before the ninth, then when the sum says so."""
    mixed = sum((place + 3) * token for place, token in enumerate(sequence[-5:]))
    token = (mixed * 2654435761 >> 7) % VOCABULARY
    return max(1, token) if mixed % 17 else EOS


class Selector:
    """DFlash2's candidate selector: edges between the candidates of neighbouring positions."""

    def __init__(self, generator: torch.Generator) -> None:
        self.top_k = TOP_K
        self.before = torch.randn(VOCABULARY, RANK, generator=generator)
        self.after = torch.randn(VOCABULARY, RANK, generator=generator)

    def build_lattice(self, ids: Any, unary: Any, anchor: Any) -> torch.Tensor:
        first = anchor[:, None, None].expand(-1, 1, TOP_K)
        previous = torch.cat([first, ids[:, :-1]], dim=1)
        edges = torch.einsum("blpr,blcr->blpc", self.before[previous], self.after[ids])
        return unary[:, :, None] + edges

    def sample_path(self, *, candidate_ids: Any, scores: Any, **_others: Any) -> Any:
        index = scores[:, 0, 0].argmax(-1)
        tokens = [candidate_ids[:, 0].gather(-1, index[:, None])[:, 0]]
        for place in range(1, scores.shape[1]):
            row = scores[:, place].gather(1, index[:, None, None].expand(-1, 1, TOP_K))[:, 0]
            index = row.argmax(-1)
            tokens.append(candidate_ids[:, place].gather(-1, index[:, None])[:, 0])
        return torch.stack(tokens, dim=1), scores


class DraftModel:
    """Hidden states are a fixed function of the committed tokens, so lattices are too."""

    def __init__(self, positions: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.candidate_selector = Selector(generator)
        self.head = torch.randn(VOCABULARY + PADDING, HIDDEN, generator=generator)
        self.table = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.shift = torch.randn(positions, HIDDEN, generator=generator)
        self.lm_head = None

    def hidden(self, sequence: list[int]) -> torch.Tensor:
        state = self.table[torch.tensor(sequence[-6:])].mean(0)
        return torch.tanh(state + self.shift)

    def compute_candidates(self, hidden: torch.Tensor) -> Any:
        logits = sys.modules["sglang.srt.models.dflash"]._project_candidate_logits(
            hidden, self.head, num_org=VOCABULARY, use_quant_head=True
        )
        values, ids = torch.topk(logits, TOP_K, dim=-1)
        return ids, self._transform_unary_logits(values)

    def _transform_unary_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Works in place on float32, as SGLang's does."""
        return logits.float().mul_(1.5).div_(20.0).tanh_().mul_(20.0)


def project_candidate_logits(
    hidden: torch.Tensor, head: torch.Tensor, *, num_org: int, use_quant_head: bool
) -> torch.Tensor:
    logits = hidden @ head.T
    logits[:, num_org:] = float("-inf")
    return logits


def selector_lattice(draft_model: Any, pred_hidden: Any, anchor_token_ids: Any) -> Any:
    bs, positions = pred_hidden.shape[:2]
    ids, unary = draft_model.compute_candidates(pred_hidden.reshape(-1, HIDDEN))
    ids = ids.view(bs, positions, -1)
    scores = draft_model.candidate_selector.build_lattice(
        ids, unary.view(bs, positions, -1), anchor_token_ids
    )
    return ids, scores


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name == "extend"

    def is_idle(self) -> bool:
        return self.name == "idle"


class DFlashWorkerV2:
    """One step: draft a block for each request, accept its prefix, add the target's token."""

    def __init__(self, *, block: int = 4, max_running: int = 4, one_token: bool = False) -> None:
        self.block_size, self.device, self.one_token = block, "cpu", one_token
        self.draft_model = DraftModel(block - 1)
        self.selector: Selector | None = self.draft_model.candidate_selector
        self.model_runner = SimpleNamespace(max_running_requests=max_running)

    def init_cuda_graphs(self) -> None:
        pass

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
        if batch.forward_mode.is_extend():
            for request in batch.reqs:
                request.output.append(next_token(request.prompt + request.output))
            return SimpleNamespace(accept_lens=None)
        if batch.forward_mode.is_idle():
            return SimpleNamespace(accept_lens=torch.empty(0, dtype=torch.int32))
        sequences = [request.prompt + request.output for request in batch.reqs]
        hidden = torch.stack([self.draft_model.hidden(sequence) for sequence in sequences])
        anchor = torch.tensor([sequence[-1] for sequence in sequences])
        ids, scores = sys.modules["sglang.srt.speculative.dflash_worker_v2"]._selector_lattice(
            self.draft_model, hidden, anchor
        )
        drafts, _ = self.draft_model.candidate_selector.sample_path(
            candidate_ids=ids, scores=scores, uniforms=None, temperatures=None, greedy_mask=None
        )
        commits = []
        for request, sequence, draft in zip(batch.reqs, sequences, drafts.tolist(), strict=True):
            accepted: list[int] = []
            for token in [] if self.one_token else draft:
                if next_token(sequence + accepted) != token:
                    break
                accepted.append(token)
            accepted.append(next_token(sequence + accepted))
            request.output.extend(accepted)
            commits.append(len(accepted))
        return SimpleNamespace(accept_lens=torch.tensor(commits, dtype=torch.int32))


class Registry:
    """`HookRegistry`, but hooks take effect when they are registered."""

    def register(self, target: str, hook: Any, hook_type: str) -> None:
        path = target.split(".")
        depth = next(n for n in range(len(path), 0, -1) if ".".join(path[:n]) in sys.modules)
        owner: Any = sys.modules[".".join(path[:depth])]
        for name in path[depth:-1]:
            owner = getattr(owner, name)
        original = getattr(owner, path[-1])
        setattr(owner, path[-1], _wrapped(original, hook, hook_type))


def _wrapped(original: Any, hook: Any, hook_type: str) -> Any:
    def wrapper(*args: Any, **kw: Any) -> Any:
        if hook_type == "AROUND":
            return hook(original, *args, **kw)
        if hook_type == "BEFORE":
            assert hook(*args, **kw) is None
            return original(*args, **kw)
        result = original(*args, **kw)
        replaced = hook(result, *args, **kw)
        return result if replaced is None else replaced

    return wrapper


class HookTypes:
    def __class_getitem__(cls, name: str) -> str:
        return name


def install(monkeypatch: pytest.MonkeyPatch, *, tp_size: int = 1, gather: Any = None) -> None:
    """Put fresh modules under SGLang's names."""
    parallel = SimpleNamespace(tp_size=tp_size, attn_tp_rank=0)
    decode = SimpleNamespace(bs=[1, 2, 6])
    config = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=decode))
    )
    names: dict[str, dict[str, Any]] = {
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: parallel,
            "get_exec": lambda: config,
        },
        "sglang.srt.distributed.communication_op": {"tensor_model_parallel_all_gather": gather},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": Registry(), "HookType": HookTypes},
        "sglang.srt.models.dflash": {
            "_project_candidate_logits": project_candidate_logits,
            "DFlash2DraftModel": _copied(DraftModel),
            "CandidateSelector": _copied(Selector),
        },
        "sglang.srt.speculative.dflash_worker_v2": {
            "_selector_lattice": selector_lattice,
            "DFlashWorkerV2": _copied(DFlashWorkerV2),
        },
        "sglang.srt.speculative.dspark_components.dspark_worker_v2": {
            "DSparkWorkerV2": type(
                "DSparkWorkerV2",
                (),
                {"init_cuda_graphs": lambda self: None, "forward_batch_generation": None},
            )
        },
        "sglang.srt.speculative.dspark_components.dspark_draft": {"draft_markov_block": None},
    }
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


def _copied(cls: type) -> type:
    """A subclass, so that hooks of one test do not stay in the next."""
    return type(cls.__name__, (cls,), {})


def dflash_worker(**options: Any) -> Any:
    """A worker whose classes carry the hooks."""
    models = sys.modules["sglang.srt.models.dflash"]
    worker = sys.modules["sglang.srt.speculative.dflash_worker_v2"].DFlashWorkerV2(**options)
    worker.draft_model.__class__ = models.DFlash2DraftModel
    worker.draft_model.candidate_selector.__class__ = models.CandidateSelector
    worker.init_cuda_graphs()
    return worker


class Scheduler:
    """Admits requests, decodes those that run, and drops the finished one step late.

    late: finished requests stay for one more step, as with overlapped scheduling.
    """

    def __init__(self, worker: Any, *, max_running: int = 4, late: bool = False) -> None:
        self.worker, self.max_running, self.late = worker, max_running, late
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.pop(0)
            self._forward("extend", [request])
            self.running.append(request)

    def step(self) -> None:
        self.admit()
        over = [request for request in self.running if request.finished]
        if not self.late:
            self.running = [request for request in self.running if request not in over]
        if self.running:
            self._forward("decode", list(self.running))
        self.running = [request for request in self.running if request not in over]

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def retract(self, request: Request) -> None:
        """Give up its cache; it will be prefilled again, output and all."""
        self.running.remove(request)
        self.waiting.append(request)

    def _forward(self, mode: str, requests: list[Request]) -> Any:
        lengths = [len(request.prompt) + len(request.output) - 1 for request in requests]
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            is_extend_in_batch=False,
            reqs=requests,
            seq_lens=torch.tensor(lengths),
        )
        return self.worker.forward_batch_generation(batch)
