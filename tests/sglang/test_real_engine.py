"""specpilot's plugin in the real SGLang, on a CPU: same outputs as stock, and what it reports.

Three servers of one tiny pair. `stock` is plain DFLASH. `tuned` encodes the same folder as W12 and
has an anchored recorder. `dense` reads a W12 folder, commits one token a step, and records densely.
Stock and tuned run the same GEMMs on the same weights, so their outputs are equal, not just close.
The dense server verifies other blocks of the same outputs, where rounding may flip a near-tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.sglang.info import check_handshake, read_plugin_state
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.main import main
from specpilot_cli.replay.run import replay_accept_lengths
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.schema.plugin_config import PluginConfig, PluginState, RecorderPlugin, W12Plugin
from specpilot_cli.schema.prompts import Prompt
from tests.sglang.cpu_engine.models import BLOCK, LAYERS, TOP_K, UNENCODABLE, TinyPair
from tests.sglang.cpu_engine.server import CpuServer, start_together

pytestmark = pytest.mark.slow

NEW_TOKENS = 48
NEAR_TIE_NATS = 0.25  # two BF16 logits of this model that rounding can swap
PROMPTS = [
    Prompt(request_id=f"r{number}", benchmark="tiny", text=text, max_new_tokens=NEW_TOKENS)
    for number, text in enumerate(
        ("def add(a, b):", "Once upon", "1, 2, 3,", "key: value", "The", "for i in", "It is", "x =")
    )
]
SpecPilot = Callable[..., tuple[int, dict[str, Any]]]


@dataclass(frozen=True)
class Servers:
    """Running servers, by name, and what the plugin was asked for."""

    processes: dict[str, ServerProcess]
    asked: dict[str, PluginConfig]

    def url(self, name: str) -> str:
        return self.processes[name].base_url

    def state(self, name: str) -> PluginState | None:
        with HttpEngine(self.url(name)) as engine:
            return read_plugin_state(engine.server_info())


@pytest.fixture(scope="module")
def w12_pair(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """The same pair with its target converted by the command."""
    folder = tmp_path_factory.mktemp("w12") / "target"
    assert main(["convert-w12", str(tiny_pair.target), "-o", str(folder), "--quiet"]) == 0
    return replace(tiny_pair, target=folder)


@pytest.fixture(scope="module")
def servers(
    tiny_pair: TinyPair, w12_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """`stock`, `tuned` and `dense`."""
    folder = tmp_path_factory.mktemp("servers")
    raw = {name: str(folder / name) for name in ("tuned", "dense")}
    asked = {
        "tuned": PluginConfig(
            w12=W12Plugin(), recorder=RecorderPlugin(mode="anchored", folder=raw["tuned"])
        ),
        "dense": PluginConfig(
            w12=W12Plugin(), recorder=RecorderPlugin(mode="dense", folder=raw["dense"])
        ),
    }
    planned = [
        CpuServer("stock"),
        CpuServer("tuned", plugin=asked["tuned"], arguments=("--quantization", "w12")),
        CpuServer(
            "dense",
            plugin=asked["dense"],
            environment={
                "SGLANG_SIMULATE_ACC_LEN": "1",
                "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
            },
        ),
    ]
    processes = {
        server.name: server.process(w12_pair if server.name == "dense" else tiny_pair, folder)
        for server in planned
    }
    with ExitStack() as stack:
        start_together(stack, list(processes.values()))
        yield Servers(processes, asked)


@pytest.fixture(scope="module")
def answers(servers: Servers) -> dict[str, list[Generation]]:
    """One request after the other, so that every step has the same shape on each server."""
    requests = [
        GenerateRequest(p.request_id, (), p.max_new_tokens, text=p.text, ignore_eos=True)
        for p in PROMPTS
    ]
    found = {}
    for name in servers.processes:
        with HttpEngine(servers.url(name)) as engine:
            found[name] = engine.generate_many(requests, concurrency=1)
    return found


def test_stock_has_no_plugin(servers: Servers, specpilot_json: SpecPilot) -> None:
    """The entry point is installed for all three servers, and does nothing in this one."""
    assert servers.state("stock") is None
    words = ("apply", "check", "--url", servers.url("stock"))
    code, answer = specpilot_json(*words, "--expect", "w12")
    assert (code, answer["verdict"], answer["results"]["missing"]) == (1, "no", ["w12"])
    assert answer["results"]["facts"]["version"] == "0.5.23"
    assert answer["results"]["facts"]["speculative_algorithm"] == "DFLASH"


@pytest.mark.parametrize("name", ["tuned", "dense"])
def test_the_handshake_passes(servers: Servers, name: str) -> None:
    state = servers.state(name)
    config = servers.processes[name].log_path.with_name(f"{name}.plugin.json")
    check_handshake(servers.asked[name], state, name=name, config_sha256=sha256_file(config))
    assert state is not None
    assert set(state.active) == set(servers.asked[name].asked())


@pytest.mark.parametrize(("name", "checkpoint"), [("tuned", "bf16"), ("dense", "w12")])
def test_w12_says_which_layers_it_encoded(servers: Servers, name: str, checkpoint: str) -> None:
    """Four linears a layer and the head; one of them cannot be encoded and stays BF16."""
    state = servers.state(name)
    assert state is not None
    facts = state.active["w12"]
    assert facts["checkpoint"] == checkpoint
    assert facts["verified"]
    assert facts["layers"] == 4 * LAYERS + 1 - 1
    (kept,) = facts["kept_bf16"]
    assert kept.startswith(UNENCODABLE)
    assert facts["bf16_bytes"] == 2 * facts["weights"]
    assert 0.75 < facts["encoded_bytes"] / facts["bf16_bytes"] < 0.78  # 12 of 16 bits, and escapes


def test_w12_outputs_are_stocks(answers: dict[str, list[Generation]]) -> None:
    stock, tuned = answers["stock"], answers["tuned"]
    assert [a.output_ids for a in tuned] == [a.output_ids for a in stock]
    assert [a.verify_steps for a in tuned] == [a.verify_steps for a in stock]
    # speculation is at work, and the outputs are worth comparing
    steps = sum(a.verify_steps or 0 for a in stock)
    assert 1.3 < len(stock) * (NEW_TOKENS - 1) / steps < BLOCK
    assert len({a.output_ids for a in stock}) == len(PROMPTS)
    assert min(len(set(a.output_ids)) for a in stock) >= 4


def test_forced_scores_are_stocks(servers: Servers, answers: dict[str, list[Generation]]) -> None:
    """The scores of W12 weights are stock's to the last bit, and agree with the decoding."""
    differing = 0
    with HttpEngine(servers.url("stock")) as stock, HttpEngine(servers.url("tuned")) as tuned:
        for answer in answers["stock"]:
            ids = answer.prompt_ids + answer.output_ids
            exact = stock.score(ids, len(answer.prompt_ids))
            ours = tuned.score(ids, len(answer.prompt_ids))
            np.testing.assert_array_equal(ours.token_logprobs, exact.token_logprobs)
            np.testing.assert_array_equal(ours.argmax_ids, exact.argmax_ids)
            np.testing.assert_array_equal(ours.argmax_logprobs, exact.argmax_logprobs)
            assert exact.margins.max() <= NEAR_TIE_NATS
            differing += int(np.count_nonzero(exact.argmax_ids != answer.output_ids))
    assert differing < 0.02 * len(PROMPTS) * NEW_TOKENS


def test_dense_outputs_are_stocks_up_to_near_ties(
    servers: Servers, answers: dict[str, list[Generation]]
) -> None:
    equal = 0
    with HttpEngine(servers.url("stock")) as stock:
        for ours, theirs in zip(answers["dense"], answers["stock"], strict=True):
            assert ours.verify_steps == NEW_TOKENS - 1  # one token a step
            if ours.output_ids == theirs.output_ids:
                equal += 1
                continue
            scores = stock.score(ours.prompt_ids + ours.output_ids, len(ours.prompt_ids))
            assert scores.margins.max() <= NEAR_TIE_NATS
    assert equal >= len(PROMPTS) // 2


@dataclass(frozen=True)
class Recorded:
    """What `specpilot record --url` wrote, and printed."""

    recording: LatticeRecording
    outputs: list[OutputRecord]
    results: dict[str, Any]


@pytest.fixture(scope="module")
def record(
    servers: Servers,
    specpilot_json: SpecPilot,
    prompt_file: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Recorded]:
    """Records the prompts on a server by name, four requests at once."""
    folder = tmp_path_factory.mktemp("recordings")

    def run(name: str) -> Recorded:
        lattice, outputs = folder / f"{name}.safetensors", folder / f"{name}.jsonl"
        code, answer = specpilot_json(
            "record", "--url", servers.url(name), "--prompts", prompt_file(PROMPTS),
            "-o", lattice, "--outputs", outputs, "--concurrency", 4, "--quiet",
        )  # fmt: skip
        assert code == 0
        return Recorded(
            read_lattice(lattice), list(read_jsonl(outputs, OutputRecord)), answer["results"]
        )

    return run


def _check_shape(recorded: Recorded, mode: str) -> None:
    recording = recorded.recording
    assert recording.metadata.mode == mode
    assert [r.request_id for r in recording.metadata.requests] == [p.request_id for p in PROMPTS]
    assert recorded.results["server"]["dropped"] == []
    assert (recording.n_positions, recording.n_candidates) == (BLOCK - 1, TOP_K)
    for number, output in enumerate(recorded.outputs):
        assert tuple(recording.output(number)) == output.output_ids
        assert tuple(recording.prompt(number)) == output.prompt_ids


def test_a_dense_recording_replays_to_stocks_steps(
    record: Callable[[str], Recorded], answers: dict[str, list[Generation]]
) -> None:
    """A lattice at every position; walking stock's chain over them takes the steps stock took."""
    recorded = record("dense")
    _check_shape(recorded, "dense")
    assert recorded.recording.n_steps == sum(len(o.output_ids) - 1 for o in recorded.outputs)
    replayed = replay_accept_lengths(recorded.recording, "chain")
    served = {a.request_id: a for a in answers["stock"]}
    pairs = [
        (len(lengths), served[output.request_id].verify_steps)
        for lengths, output in zip(replayed, recorded.outputs, strict=True)
        if output.output_ids == served[output.request_id].output_ids
    ]
    assert len(pairs) >= len(PROMPTS) // 2
    ours, theirs = (sum(steps or 0 for steps in column) for column in zip(*pairs, strict=True))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_an_anchored_recording_holds_the_steps_that_were_served(
    record: Callable[[str], Recorded],
) -> None:
    """One lattice for each verify pass; stock's own choices explain every step that follows."""
    recorded = record("tuned")
    _check_shape(recorded, "anchored")
    recording = recorded.recording
    for number, output in enumerate(recorded.outputs):
        mine = recording.step_request == number
        places = recording.step_position[mine].tolist()
        assert len(places) == output.verify_steps
        assert places[0] == 0
        last = len(output.output_ids) - 1
        for place, next_place, choice in zip(
            places, [*places[1:], last], recording.stock_choice[mine], strict=True
        ):
            truth = output.output_ids[place + 1 : place + BLOCK]
            accepted = next(
                (
                    i
                    for i, pair in enumerate(zip(truth, choice, strict=False))
                    if len(set(pair)) > 1
                ),
                len(truth),
            )
            assert next_place == min(place + accepted + 1, last)


def test_token_force_accepts_w12(
    servers: Servers, specpilot_json: SpecPilot, prompt_file: Callable[..., Path]
) -> None:
    """Four requests at once on both, where batches differ and rounding may flip near-ties."""
    code, answer = specpilot_json(
        "token-force", "--system", servers.url("tuned"), "--stock", servers.url("stock"),
        "--scorer", servers.url("stock"), "--delta", NEAR_TIE_NATS, "--concurrency", 4,
        "--prompts", prompt_file(PROMPTS), "--split", NEW_TOKENS // 2,
    )  # fmt: skip
    assert (code, answer["verdict"]) == (0, "accept")
    results = answer["results"]
    assert results["system"]["n_requests"] == len(PROMPTS)
    assert results["system"]["n_tokens"] == len(PROMPTS) * NEW_TOKENS
    assert results["system"]["mismatch_rate_pct"] < 2
