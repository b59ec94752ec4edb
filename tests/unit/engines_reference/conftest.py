"""A small random pair on disk, and a drafter that knows the truth, for the reference engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from safetensors.torch import save_file

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.process import bind_port
from specpilot_cli.engines.reference.config import DrafterConfig, TargetConfig
from specpilot_cli.engines.reference.drafter import Drafter, LatticeBatch
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.model import TargetModel
from specpilot_cli.engines.reference.server import ReferenceServer, ServerOptions
from specpilot_cli.engines.reference.spec import SpecConfig

VOCAB = 320
CAPTURE = [0, 3, 6]
TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
DRAFTER_CONFIG: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": CAPTURE,
        "selector_rank": 8,
        "selector_top_k": 16,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
    },
}


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its drafter."""

    target: Path
    drafter: Path

    def engine(
        self, mode: str = "ar", *, block: int = 8, nodes: int = 16, scoring: str = "conditional",
        with_drafter: bool = True, fault: LogitFault | None = None,
    ) -> ReferenceEngine:  # fmt: skip
        """An engine on this pair."""
        spec = SpecConfig(mode=mode, block=block, n_nodes=nodes, scoring=scoring)  # type: ignore[arg-type]
        drafter = self.drafter if with_drafter else None
        return ReferenceEngine(self.target, drafter, spec, fault=fault)


def _randomise(module: torch.nn.Module, std: float, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "base_kernel" not in name:
            parameter.data.normal_(0.0, std, generator=generator)


def _save(module: torch.nn.Module, folder: Path, prefix: str, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    tensors = {
        (name if name.startswith("lm_head") else prefix + name): value.to(torch.bfloat16)
        for name, value in module.state_dict().items()
    }
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: ids 1..256 are bytes, 0 ends an output."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0, **{symbol: index + 1 for index, symbol in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random target and drafter as Hugging Face folders, BF16."""
    root = tmp_path_factory.mktemp("pair")
    target, drafter = root / "target", root / "drafter"
    generator = torch.Generator().manual_seed(7)
    for folder, config in ((target, TARGET_CONFIG), (drafter, DRAFTER_CONFIG)):
        config_folder = root / f"{folder.name}-config"
        config_folder.mkdir()
        (config_folder / "config.json").write_text(json.dumps(config))
    model = TargetModel(TargetConfig.from_folder(root / "target-config"), CAPTURE)
    _randomise(model, 0.12, generator)
    _save(model, target, "model.", TARGET_CONFIG)
    config = DrafterConfig.from_folder(root / "drafter-config")
    draft = Drafter(config, model.embed_tokens, model.lm_head, 3 * 64)
    _randomise(draft, 0.12, generator)
    _save(draft, drafter, "", DRAFTER_CONFIG)
    _tokenizer(target)
    return Pair(target, drafter)


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[GenerateRequest]]:
    """Builds random prompts of different lengths that ignore the end token."""

    def build(count: int, *, new_tokens: int = 40, seed: int = 3) -> list[GenerateRequest]:
        rng = np.random.default_rng(seed)
        return [
            GenerateRequest(
                f"r{index}",
                tuple(rng.integers(1, VOCAB - 1, size=5 + 7 * index).tolist()),
                max_new_tokens=new_tokens,
                ignore_eos=True,
            )
            for index in range(count)
        ]

    return build


class KnowingDrafter:
    """Drafts the true continuation among decoys, sometimes behind them, sometimes not at all.

    Its lattice at a position depends on nothing but the sequence and that position, so a live
    engine and a dense recording see equal ones. `sequences` are prompt + greedy output, in the
    order in which the requests are admitted. Stands where a `Drafter` stands.
    """

    def __init__(self, config: DrafterConfig, sequences: Sequence[Sequence[int]]) -> None:
        self.config = config
        self._sequences = [list(sequence) for sequence in sequences]
        self._next = 0

    def new_state(self) -> dict[str, int]:
        index, self._next = self._next % len(self._sequences), self._next + 1
        return {"request": index, "length": 0}

    def append_context(self, state: dict[str, int], features: torch.Tensor) -> None:
        state["length"] += len(features)

    def draft(
        self, states: Sequence[dict[str, int]], anchors: Sequence[int], *, block: int
    ) -> LatticeBatch:
        for state, anchor in zip(states, anchors, strict=True):
            assert self._sequences[state["request"]][state["length"]] == anchor
        return self._batch([(s["request"], s["length"]) for s in states], block)

    def dense_lattices(
        self, features: torch.Tensor, anchors: torch.Tensor, positions: torch.Tensor, *, block: int
    ) -> LatticeBatch:
        first = [int(token) for token in anchors]
        at = [int(p) for p in positions]
        request = next(
            index
            for index, sequence in enumerate(self._sequences)
            if len(sequence) - 2 == len(features) and sequence[at[0]] == first[0]
        )
        return self._batch([(request, position) for position in at], block)

    def _batch(self, places: Sequence[tuple[int, int]], block: int) -> LatticeBatch:
        parts = [self._lattice(request, position, block) for request, position in places]
        ids, scores = (torch.from_numpy(np.stack(x)) for x in zip(*parts, strict=True))
        unary = scores.mean(dim=2)
        return LatticeBatch(ids, scores, unary, unary.logsumexp(-1) + 0.1)

    def _lattice(self, request: int, position: int, block: int) -> tuple[Any, Any]:
        """candidate_ids int64 [L, K] and scores float32 [L, K, K] after `position`."""
        length, top_k = block - 1, self.config.top_k
        rng = np.random.default_rng((request, position))
        ids = np.stack([rng.choice(VOCAB, top_k, replace=False) for _ in range(length)])
        scores = rng.normal(0.0, 1.0, size=(length, top_k, top_k)).astype(np.float32)
        truth = self._sequences[request][position + 1 : position + 1 + length]
        for j, token in enumerate(truth):
            if rng.random() < 0.08 or token in ids[j]:
                continue
            place = int(rng.integers(top_k))
            ids[j, place] = token
            scores[j, :, place] += rng.normal(3.0, 1.5)
        scores[0] = scores[0, :1]
        return ids, scores


@pytest.fixture
def knowing_drafter() -> type[KnowingDrafter]:
    """The class, to be put in an engine's `drafter`."""
    return KnowingDrafter


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., httpx.Client]]:
    """Starts a server for an engine in this process, its options as given; a client bound to it."""
    stops: list[Callable[[], None]] = []

    def start(engine: Any, **options: Any) -> httpx.Client:
        bound = bind_port(0)
        port = bound.getsockname()[1]
        app = ReferenceServer(engine, ServerOptions(port=port, **options)).app()
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)

        def stop() -> None:
            client.close()
            server.should_exit = True
            thread.join(10)

        stops.append(stop)
        deadline = time.monotonic() + 60
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        return client

    yield start
    for stop in stops:
        stop()
