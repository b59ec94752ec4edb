"""The HTTP server: SGLang's shapes, clear refusals, several requests in flight, aborts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.reference.faults import LogitFault

PROMPT = list(range(3, 20))
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}

Client = httpx.Client
Serve = Callable[[Any], Client]


@pytest.fixture(scope="module")
def plain(pair: Any, serve: Serve) -> Client:
    """A server without speculation."""
    return serve(pair.engine("ar", with_drafter=False))


@pytest.fixture(scope="module")
def tree(pair: Any, serve: Serve) -> Client:
    """A server with best-first trees of 16 nodes."""
    return serve(pair.engine("tree", block=16, nodes=16))


@pytest.fixture(scope="module")
def expected(pair: Any) -> tuple[int, ...]:
    """Greedy output of `PROMPT`."""
    request = GenerateRequest("x", tuple(PROMPT), max_new_tokens=12, ignore_eos=True)
    [result] = pair.engine("ar", with_drafter=False).generate([request])
    return result.output_ids


def _post(client: Client, **body: Any) -> httpx.Response:
    return client.post("/generate", json=body)


def _events(client: Client, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/generate", json={"stream": True, **body}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_health(plain: Client) -> None:
    assert plain.get("/health").status_code == 200


def test_generate_without_speculation(plain: Client, expected: tuple[int, ...]) -> None:
    reply = _post(plain, input_ids=PROMPT, sampling_params=GREEDY).json()
    assert tuple(reply["output_ids"]) == expected
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (17, 12, 0)
    assert 0 < meta["e2e_latency"] < 30
    assert "spec_verify_ct" not in meta


def test_generate_with_a_tree(tree: Client, expected: tuple[int, ...]) -> None:
    reply = _post(tree, input_ids=PROMPT, sampling_params=GREEDY, rid="mine").json()
    assert tuple(reply["output_ids"]) == expected
    meta = reply["meta_info"]
    assert meta["id"] == "mine"
    steps, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    assert steps + correct >= 11
    assert meta["spec_accept_length"] == pytest.approx(12 / steps)
    assert meta["spec_num_proposed_drafts"] == 16 * steps
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == steps
    assert sum(n * count for n, count in enumerate(histogram)) == correct


def test_text_is_tokenised_by_the_server(plain: Client) -> None:
    body = {"text": "hello wörld", "sampling_params": GREEDY, "return_prompt_token_ids": True}
    reply = _post(plain, **body).json()
    assert len(reply["prompt_token_ids"]) == len("hello wörld".encode())
    again = _post(plain, input_ids=reply["prompt_token_ids"], sampling_params=GREEDY).json()
    assert again["output_ids"] == reply["output_ids"]
    assert isinstance(reply["text"], str)
    assert "prompt_token_ids" not in again


def test_list_of_prompts(tree: Client, expected: tuple[int, ...]) -> None:
    prompts = [[5, 6, 7], PROMPT, [9]]
    params = [{**GREEDY, "max_new_tokens": n} for n in (3, 12, 5)]
    replies = _post(tree, input_ids=prompts, sampling_params=params).json()
    assert [len(reply["output_ids"]) for reply in replies] == [3, 12, 5]
    assert tuple(replies[1]["output_ids"]) == expected


def test_stream_is_cumulative(tree: Client, expected: tuple[int, ...]) -> None:
    chunks = _events(tree, input_ids=PROMPT, sampling_params=GREEDY)
    assert tuple(chunks[-1]["output_ids"]) == expected
    for before, after in itertools.pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert all(c["meta_info"]["completion_tokens"] == len(c["output_ids"]) for c in chunks)


def test_streamed_list_carries_the_index(plain: Client) -> None:
    chunks = _events(plain, input_ids=[[5, 6], [9]], sampling_params=GREEDY)
    last = {chunk["index"]: chunk for chunk in chunks}
    assert sorted(last) == [0, 1]
    assert all(len(chunk["output_ids"]) == 12 for chunk in last.values())


def test_streamed_text_holds_no_broken_characters(plain: Client) -> None:
    params = {**GREEDY, "max_new_tokens": 60}
    chunks = _events(plain, text="text", sampling_params=params)
    assert all(not chunk["text"].endswith("\ufffd") for chunk in chunks[:-1])


class TestScoring:
    """Teacher forcing through `/generate`, as audits use it."""

    def _score(self, client: Client, ids: list[int], start: int, top: int = 2) -> Any:
        return _post(
            client,
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=top,
        ).json()

    def test_rows(self, plain: Client, pair: Any) -> None:
        ids = [*PROMPT, 44, 45, 46]
        reply = self._score(plain, ids, 10)
        meta = reply["meta_info"]
        rows, top = meta["input_token_logprobs"], meta["input_top_logprobs"]
        assert len(rows) == len(top) == len(ids) - 10
        assert rows[0] == [None, ids[10], None]
        assert top[0] is None
        assert [row[1] for row in rows] == ids[10:]
        scores = pair.engine("ar", with_drafter=False).score(ids, 10, top_k=2)
        assert [row[0] for row in rows[1:]] == pytest.approx(scores.logprobs, abs=1e-5)
        assert [[entry[1] for entry in row] for row in top[1:]] == scores.top_ids

    def test_without_new_tokens(self, plain: Client) -> None:
        reply = self._score(plain, PROMPT, 0)
        assert reply["output_ids"] == []
        assert reply["meta_info"]["completion_tokens"] == 0
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert reply["meta_info"]["output_token_logprobs_length"] == 1

    @pytest.mark.parametrize("server", ["plain", "tree"])
    def test_output_logprobs(
        self, server: str, expected: tuple[int, ...], request: pytest.FixtureRequest
    ) -> None:
        client = request.getfixturevalue(server)
        body = {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
        reply = _post(client, input_ids=PROMPT, sampling_params=GREEDY, **body).json()
        meta = reply["meta_info"]
        assert meta["input_token_logprobs"] == []
        rows = meta["output_token_logprobs"]
        assert tuple(row[1] for row in rows) == expected
        assert all(isinstance(row[2], str) for row in rows)
        assert [row[0][:2] for row in meta["output_top_logprobs"]] == [row[:2] for row in rows]
        forced = self._score(client, [*PROMPT, *expected], len(PROMPT) - 1)
        forced_rows = forced["meta_info"]["input_token_logprobs"][1:]
        assert [row[0] for row in rows] == pytest.approx([r[0] for r in forced_rows], abs=1e-4)

    def test_a_fault_does_not_reach_it(self, pair: Any, serve: Serve, plain: Client) -> None:
        faulty = serve(pair.engine("ar", fault=LogitFault(after=0)))
        honest = self._score(plain, PROMPT, 0)["meta_info"]
        scored = self._score(faulty, PROMPT, 0)["meta_info"]
        assert scored["input_token_logprobs"] == honest["input_token_logprobs"]
        info = faulty.get("/server_info").json()["specpilot"]
        assert info["fault"] == {
            "kind": "logit_bias",
            "after_output_position": 0,
            "every_token_ids": 7,
            "bias": 2.0,
        }


class TestRefusals:
    """Every bad request is a 400 with SGLang's error object; the server goes on."""

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({}, "text or input_ids"),
            ({"text": "a", "input_ids": [1]}, "text or input_ids"),
            ({"input_ids": []}, "no token"),
            ({"input_ids": [[]]}, "no token"),
            ({"input_ids": [1, "2"]}, "input_ids"),
            ({"input_ids": [True]}, "input_ids"),
            ({"input_ids": [1, [2]]}, "input_ids"),
            ({"input_ids": [4000]}, "outside the vocabulary"),
            ({"input_ids": [-1]}, "outside the vocabulary"),
            ({"input_ids": [1] * 512}, "longer than the model's context length"),
            ({"input_ids": [1] * 505}, "maximum context length"),
            ({"input_ids": [1], "temprature": 0}, "temprature"),
            ({"input_ids": [1], "return_hidden_states": True}, "return_hidden_states"),
            ({"input_ids": [1], "logprob_start_len": 5, "return_logprob": True}, "logprob_start"),
            ({"input_ids": [1], "top_logprobs_num": -1, "return_logprob": True}, "top_logprobs"),
            ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1 entries for 2"),
            ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "same id twice"),
        ],
    )
    def test_bodies(self, plain: Client, body: dict[str, Any], message: str) -> None:
        response = _post(plain, **{"sampling_params": GREEDY, **body})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({}, "temperature must be 0"),
            ({"temperature": 0.7}, "temperature must be 0, got 0.7"),
            ({"temperature": 0, "n": 2}, "sampling_params"),
            ({"temperature": 0, "stop": ["x"]}, "stop"),
            ({"temperature": 0, "repetition_penalty": 1.1}, "repetition_penalty"),
            ({"temperature": 0, "max_new_tokens": -1}, "max_new_tokens"),
            ({"temperature": 0, "max_tokens": 4}, "max_tokens"),
        ],
    )
    def test_sampling_params(self, plain: Client, params: dict[str, Any], message: str) -> None:
        response = _post(plain, input_ids=[1], sampling_params=params)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]

    @pytest.mark.parametrize("raw", [
        b"{", b"\xff\xfe", b"[1]", b'"text"', b"", b"[" * 100_000, b'{"input_ids": [1], "a": NaN}',
        b'{"text": "\\ud800"}', b'{"rid": "a", "rid": "b", "input_ids": [1]}',
        b'{"input_ids": [1], "sampling_params": {"temperature": 0, "temperature": 1}}',
        b'{"input_ids": [1], "sampling_params": {"temperature": 0, "top_p": 1e999}}',
    ], ids=lambda raw: repr(raw[-24:]))  # fmt: skip
    def test_not_a_json_object(self, plain: Client, raw: bytes) -> None:
        response = plain.post("/generate", content=raw)
        assert response.status_code == 400
        assert "error" in response.json()

    def test_unknown_path_and_method(self, plain: Client) -> None:
        assert plain.get("/generate_everything").status_code == 404
        assert plain.get("/generate").status_code == 405

    def test_the_server_still_answers(self, plain: Client, expected: tuple[int, ...]) -> None:
        _post(plain, input_ids=[4000])
        reply = _post(plain, input_ids=PROMPT, sampling_params=GREEDY).json()
        assert tuple(reply["output_ids"]) == expected


class TestConcurrency:
    """Several requests in flight, and clients that leave."""

    def test_parallel_answers_equal_single_ones(
        self, tree: Client, pair: Any, requests_of: Any
    ) -> None:
        requests = requests_of(6, new_tokens=24)
        single = pair.engine("ar", with_drafter=False).generate(requests, concurrency=1)

        def ask(request: GenerateRequest) -> tuple[int, ...]:
            params = {**GREEDY, "max_new_tokens": 24}
            reply = _post(tree, input_ids=list(request.input_ids), sampling_params=params).json()
            return tuple(reply["output_ids"])

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, requests)) == [result.output_ids for result in single]

    def _wait_idle(self, client: Client) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            state: dict[str, Any] = client.get("/server_info").json()["internal_states"][0]
            if state["num_running_reqs"] + state["num_waiting_reqs"] == 0:
                return state
            time.sleep(0.02)
        raise AssertionError("the server did not become idle")

    def test_a_dropped_stream_is_aborted(self, plain: Client) -> None:
        before = self._wait_idle(plain)["finished_requests"]
        params = {**GREEDY, "max_new_tokens": 480}
        body = {"input_ids": PROMPT, "sampling_params": params, "stream": True}
        with plain.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # dropping the iterator would close the stream
            next(lines)
        state = self._wait_idle(plain)
        assert state["finished_requests"] == before

    def test_a_dropped_request_is_aborted(self, plain: Client) -> None:
        before = self._wait_idle(plain)["finished_requests"]
        params = {**GREEDY, "max_new_tokens": 490}
        with pytest.raises(httpx.ReadTimeout):
            plain.post(
                "/generate", json={"input_ids": PROMPT, "sampling_params": params},
                timeout=httpx.Timeout(30, read=0.1),
            )  # fmt: skip
        assert self._wait_idle(plain)["finished_requests"] == before

    def test_flush_cache_refuses_while_requests_run(self, plain: Client) -> None:
        self._wait_idle(plain)
        assert plain.post("/flush_cache").status_code == 200
        params = {**GREEDY, "max_new_tokens": 480}
        body = {"input_ids": PROMPT, "sampling_params": params, "stream": True, "rid": "busy"}
        with plain.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # dropping the iterator would close the stream
            next(lines)
            assert plain.post("/flush_cache").status_code == 400
            again = _post(plain, input_ids=PROMPT, sampling_params=GREEDY, rid="busy")
            assert again.status_code == 400
            assert "Duplicate request ID" in again.json()["error"]["message"]
        self._wait_idle(plain)
        assert plain.post("/flush_cache").status_code == 200


def test_server_info(tree: Client, pair: Any) -> None:
    _post(tree, input_ids=PROMPT, sampling_params=GREEDY)
    info = tree.get("/server_info").json()
    assert info["engine"] == "specpilot-reference"
    assert info["model_path"] == str(pair.target)
    assert info["speculative_num_draft_tokens"] == 17
    own = info["specpilot"]
    assert (own["mode"], own["block"], own["nodes"], own["rows"]) == ("tree", 16, 16, 17)
    assert own["fault"] is None
    assert len(own["target_sha256"]) == len(own["drafter_sha256"]) == 64
    state = info["internal_states"][0]
    assert state["avg_spec_accept_length"] >= 1
    assert state["last_gen_throughput"] > 0


def test_the_shared_client_understands_it(tree: Client, expected: tuple[int, ...]) -> None:
    with HttpEngine(str(tree.base_url)) as engine:
        engine.health()
        request = GenerateRequest("x", tuple(PROMPT), max_new_tokens=12, ignore_eos=True)
        generation = engine.generate(request)
        assert generation.output_ids == expected
        assert generation.verify_steps
        scores = engine.score([*PROMPT, *expected], len(PROMPT))
        assert tuple(scores.argmax_ids) == expected
        texts = engine.generate_many(
            [replace(request, request_id=f"t{i}", input_ids=(), text="abc") for i in range(3)],
            concurrency=2,
        )
        assert {len(text.prompt_ids) for text in texts} == {3}
        engine.flush_cache()


def test_a_dead_engine_is_reported(pair: Any, serve: Serve) -> None:
    engine = pair.engine("ar", with_drafter=False)
    client = serve(engine)

    def broken(_segments: Any) -> Any:
        raise RuntimeError("no such row")

    engine.model.forward_rows = broken
    response = _post(client, input_ids=PROMPT, sampling_params=GREEDY)
    assert response.status_code == 500
    assert "no such row" in response.json()["error"]["message"]
    assert client.get("/health").status_code == 503
    assert _post(client, input_ids=PROMPT, sampling_params=GREEDY).status_code == 503
