"""Servers with OpenAI's completions API and vLLM's ids, from end to end."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.openai_client import OpenAiEngine, is_openai
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from tests.unit.token_force.cli import flags, run
from tests.unit.token_force.conftest import VOCABULARY, log_softmax


def completions(system, *, spoil=lambda reply: reply):
    """A script for `make_server`: vLLM's form of `/v1/completions` on top of a toy system."""

    def script(exchange):
        if exchange.path == "/v1/models":
            exchange.reply({"object": "list", "data": [{"id": "toy"}]})
            return
        body = exchange.body
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else [ord(c) % VOCABULARY for c in prompt]
        output = system.continue_(ids, body["max_tokens"])
        choice = {
            "index": 0, "text": "words", "finish_reason": "length", "token_ids": output,
            "prompt_token_ids": ids, "logprobs": None,
        }  # fmt: skip
        if body.get("prompt_logprobs"):
            rows = [log_softmax(system.logits(ids[:i])) for i in range(1, len(ids))]
            pairs = zip(rows, ids[1:], strict=True)
            found = [{str(i): {"logprob": float(r[i])} for i in (t, r.argmax())} for r, t in pairs]
            choice["prompt_logprobs"] = [None, *found]
        if body.get("logprobs"):
            tops = []
            for at in range(len(output)):
                row = log_softmax(system.logits([*ids, *output[:at]]))
                best = np.argsort(-row)[: body["logprobs"]]
                tops.append({f"token_id:{i}": float(row[i]) for i in best})
            choice["logprobs"] = {"top_logprobs": tops}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(output)}
        exchange.reply(spoil({"choices": [choice], "usage": usage}))

    return script


@pytest.fixture
def openai_servers(servers, toy_system):
    """All five roles on the other API."""
    systems = {
        "stock": toy_system(1), "ar": toy_system(2), "scorer": toy_system(0, noise=0.0),
        "lossless": toy_system(3), "faulty": toy_system(3, bias=2.0, after=8),
    }  # fmt: skip
    for name, system in systems.items():
        servers[name].script = completions(system)
    return servers


@pytest.mark.parametrize(("system", "code"), [("lossless", 0), ("faulty", 1)])
def test_an_audit_over_the_other_api_has_the_same_verdict(
    openai_servers, prompts, tmp_path, system, code
):
    args = [f"{a}/v1" if a.startswith("http") else a for a in flags(openai_servers, system)]
    done = run(*args, "--prompts", prompts, "--json", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    assert document["environment"]["engines"]["scorer"]["api"] == "openai"
    assert "margin" in document["results"]["event_rule"]["audit_clauses"]
    body = next(body for body in openai_servers[system].seen if body.get("prompt"))
    assert (body["temperature"], body["top_k"], body["repetition_penalty"]) == (0, 1, 1.0)


def without(*keys):
    def spoil(reply):
        for key in keys:
            reply["choices"][0].pop(key)
        return reply

    return spoil


def changed(**fields):
    def spoil(reply):
        reply["choices"][0].update(fields)
        return reply

    return spoil


def row_of(value, key=None):
    def spoil(reply):
        row = reply["choices"][0]["prompt_logprobs"][2]
        row[key or next(iter(row))] = {"logprob": value}
        return reply

    return spoil


def nan_row(reply):
    for row in reply["choices"][0]["prompt_logprobs"][1:]:
        next(iter(row.values()))["logprob"] = float("nan")
    return reply


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (without("token_ids"), MachineError, "reports no token ids of its answers"),
        (changed(token_ids=[1, 2]), MeasurementInvalid, "completion tokens"),
        (changed(token_ids=["a"] * 6), MeasurementInvalid, "no token id"),
        (changed(finish_reason="abort"), MeasurementInvalid, "aborted"),
        (lambda reply: {"choices": []}, MeasurementInvalid, "one choice"),
        (lambda reply: {"error": {"message": "overloaded"}}, MeasurementInvalid, "overloaded"),
    ],
)
def test_a_broken_answer_is_refused(make_server, toy_system, spoil, error, message):
    server = make_server(completions(toy_system(1), spoil=spoil))
    with (
        OpenAiEngine(f"{server.url}/v1", 10) as engine,
        pytest.raises(error, match=message) as caught,
    ):
        engine.generate_many([GenerateRequest("r-1", (1, 2, 3), 6)], concurrency=1)
    assert "r-1" in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("prompt_logprobs"), "no `prompt_logprobs`"),
        (changed(prompt_logprobs=[None, {}, {}, {}]), "not a number"),
        (changed(prompt_logprobs=[None, *[{"60": {"logprob": -1.0}}] * 3]), "leaves out"),
        (changed(prompt_logprobs=[None, 1, 2, 3]), "a row of"),
        (nan_row, "not a number"),
        (row_of(-(10**400)), "a row of"),
        (row_of(None), "a row of"),
        (row_of(0.5), "above zero"),
        (row_of(-0.001, "9" * 5000), "a row of"),
        (row_of(-0.001, str(10**30)), "names token"),
    ],
)
def test_broken_scores_are_refused(make_server, toy_system, spoil, message):
    server = make_server(completions(toy_system(1), spoil=spoil))
    with (
        OpenAiEngine(f"{server.url}/v1", 10) as engine,
        pytest.raises(MeasurementInvalid, match=message) as caught,
    ):
        engine.score((1, 2, 3, 4), 1)
    assert server.url in str(caught.value.where)


def test_text_prompts_need_the_servers_ids(make_server, toy_system):
    server = make_server(completions(toy_system(1), spoil=without("prompt_token_ids")))
    with (
        OpenAiEngine(f"{server.url}/v1", 10) as engine,
        pytest.raises(MachineError, match="of a prompt sent as text"),
    ):
        engine.generate_many([GenerateRequest("r", (), 6, text="abc")], concurrency=1)


def trickle(exchange):
    exchange.open_stream()
    for _ in range(40):
        exchange.raw(b" ")
        time.sleep(0.05)


def test_who_is_no_such_server_is_named(make_server):
    server = make_server(lambda exchange: exchange.reply({"data": []}))
    with OpenAiEngine(f"{server.url}/v1", 10) as engine:
        for answer in (b"[" * 5000, b'{"data": [{"id": "\\ud800"}]}', b"1", b'{"data": 5}'):
            server.script = lambda exchange, raw=answer: exchange.reply(raw)
            with pytest.raises(MachineError, match="names no model"):
                engine.health()
        with pytest.raises(InputError, match="cannot score from"):
            engine.score((1, 2), 0)
    with (
        OpenAiEngine("http://127.0.0.1:9/v1", 10) as engine,
        pytest.raises(MachineError, match="does not answer"),
    ):
        engine.health()
    server.script = trickle
    with (
        OpenAiEngine(f"{server.url}/v1", 0.3) as engine,
        pytest.raises(MachineError, match=r"did not answer /models within 0\.3 s"),
    ):
        engine.health()
    assert is_openai("http://host:8000/v1/")
    assert not is_openai("http://host:30000")
