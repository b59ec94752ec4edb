"""A small language whose truth is known: logits of a prefix, and systems that decode it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from specpilot_cli.schema.outputs import OutputRecord
from tests.unit.token_force.cli import N_REQUESTS, N_TOKENS
from tests.unit.token_force.logit_scorer import LogitScorer

VOCABULARY = 64


@lru_cache(maxsize=200_000)
def true_logits(tail: tuple[int, ...], length: int) -> np.ndarray:
    """float64 [64]; depends on the last three tokens and the length, so text never loops."""
    return np.random.default_rng((*tail, length)).normal(scale=3.0, size=VOCABULARY)


def logits_of(prefix: Sequence[int]) -> np.ndarray:
    return true_logits(tuple(int(token) for token in prefix[-3:]), len(prefix))


@dataclass(frozen=True)
class System:
    """Greedy decoding with rounding noise, and a fault if asked for.

    noise: standard deviation of each logit's rounding error. bias: added to every 7th id from
    output position `after` on (paper §6.2).
    """

    seed: int
    noise: float = 0.004
    bias: float = 0.0
    after: int = 0
    prompt_length: int = 4

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        tail = tuple(int(token) for token in prefix[-3:])
        rng = np.random.default_rng((self.seed, *tail, len(prefix)))
        logits = logits_of(prefix) + rng.normal(scale=self.noise, size=VOCABULARY)
        if self.bias and len(prefix) - self.prompt_length >= self.after:
            logits[::7] += self.bias
        return logits

    def continue_(self, prefix: Sequence[int], n_tokens: int) -> list[int]:
        ids = [int(token) for token in prefix]
        for _ in range(n_tokens):
            ids.append(int(self.logits(ids).argmax()))
        return ids[len(prefix) :]


@dataclass
class ToyWorld:
    """Prompts, systems and their recorded answers."""

    n_requests: int = 24
    n_tokens: int = 96
    scorer: LogitScorer = field(default_factory=lambda: LogitScorer(logits_of))

    def prompts(self) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(11)
        return [
            tuple(int(token) for token in rng.integers(0, VOCABULARY, size=4))
            for _ in range(self.n_requests)
        ]

    def record(self, system: System) -> list[OutputRecord]:
        return [
            OutputRecord(
                request_id=f"r{index}",
                benchmark="toy",
                prompt_ids=prompt,
                output_ids=tuple(system.continue_(prompt, self.n_tokens)),
                finish_reason="length",
                max_new_tokens=self.n_tokens,
            )
            for index, prompt in enumerate(self.prompts())
        ]


def log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def serve(system: System) -> Any:
    """A script for `make_server`: SGLang's endpoints on top of a toy system."""

    def script(exchange: Any) -> None:
        body = exchange.body
        if exchange.path == "/server_info":
            exchange.reply({"version": "toy", "model_path": "toy"})
            return
        ids = body.get("input_ids") or [int(byte) % VOCABULARY for byte in body["text"].encode()]
        limit = body["sampling_params"]["max_new_tokens"]
        if limit == 0:
            exchange.reply(_scores(system, ids, body["logprob_start_len"] + 1))
            return
        output = system.continue_(ids, limit)
        events = []
        for end in sorted({1, (limit + 1) // 2, limit}):
            meta: dict[str, Any] = {
                "prompt_tokens": len(ids),
                "completion_tokens": end,
                "finish_reason": {"type": "length", "length": limit} if end == limit else None,
            }
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = [
                    _top(system, [*ids, *output[:i]], body["top_logprobs_num"]) for i in range(end)
                ]
            event = {"output_ids": output[:end], "meta_info": meta}
            if body.get("return_prompt_token_ids"):
                event["prompt_token_ids"] = ids
            events.append(event)
        exchange.stream(events)

    return script


def _top(system: System, prefix: list[int], k: int) -> list[list[Any]]:
    log_probs = log_softmax(system.logits(prefix))
    return [[float(log_probs[i]), int(i), None] for i in np.argsort(-log_probs)[:k]]


def _scores(system: System, ids: list[int], start: int) -> dict[str, Any]:
    rows: list[Any] = [[None, ids[start - 1], None]]
    top: list[Any] = [None]
    for index in range(start, len(ids)):
        log_probs = log_softmax(system.logits(ids[:index]))
        rows.append([float(log_probs[ids[index]]), ids[index], None])
        top.append([[float(log_probs.max()), int(log_probs.argmax()), None]])
    return {
        "output_ids": [],
        "meta_info": {"input_token_logprobs": rows, "input_top_logprobs": top},
    }


@pytest.fixture(scope="session")
def toy() -> ToyWorld:
    return ToyWorld()


@pytest.fixture(scope="session")
def toy_system() -> type[System]:
    return System


@pytest.fixture(scope="session")
def toy_serve() -> Any:
    return serve


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {
            "request_id": f"p{index}",
            "benchmark": "toy",
            "text": f"{index:04d}",
            "max_new_tokens": N_TOKENS,
        }
        for index in range(N_REQUESTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def servers(make_server, toy_system, toy_serve):
    """URLs of stock, AR, scorer, a lossless and a faulty system."""
    systems = {
        "stock": toy_system(1),
        "ar": toy_system(2),
        "scorer": toy_system(0, noise=0.0),
        "lossless": toy_system(3),
        "faulty": toy_system(3, bias=2.0, after=8),
    }
    return {name: make_server(toy_serve(system)) for name, system in systems.items()}
