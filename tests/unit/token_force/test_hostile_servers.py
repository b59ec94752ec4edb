"""Servers that misbehave: the run ends with the reason, and never with a verdict."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from specpilot_cli.token_force.greedy import QUESTIONS
from tests.unit.token_force.cli import flags, run


def hostile(kind, good):
    """A script that behaves as `good` does until request number 4, then not."""
    state = {"asked": 0}

    def script(exchange):
        if exchange.path != "/generate":
            good(exchange)
            return
        state["asked"] += 1
        if state["asked"] < 4:
            good(exchange)
        elif kind == "wrong json":
            exchange.reply(b"<html>bad gateway</html>")
        elif kind == "http 500":
            exchange.reply(b"Internal Server Error", status=500)
        elif kind == "early close":
            exchange.open_stream()
            exchange.raw(b"data: {")
            exchange.drop()
        elif kind == "nan":
            reply_with_nan(exchange, good)
        elif kind == "wrong count":
            reply_with_wrong_count(exchange)
        elif kind == "slow trickle":
            exchange.open_stream()
            for _ in range(100):
                exchange.raw(b": keep-alive\n\n")
                time.sleep(0.1)

    return script


def reply_with_nan(exchange, good):
    class Spoiling:
        path, body = exchange.path, exchange.body

        def stream(self, events):
            exchange.stream(events)

        def reply(self, payload):
            payload["meta_info"]["input_token_logprobs"][2][0] = float("nan")
            exchange.reply(payload)

    good(Spoiling())


def reply_with_wrong_count(exchange):
    limit = exchange.body["sampling_params"]["max_new_tokens"]
    meta = {"prompt_tokens": 4, "completion_tokens": limit + 1, "finish_reason": {"type": "length"}}
    exchange.stream([{"output_ids": [1] * limit, "meta_info": meta}])


KINDS = ["wrong json", "http 500", "early close", "wrong count", "slow trickle"]


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        *[("lossless", kind) for kind in KINDS],
        *[("scorer", kind) for kind in [*KINDS, "nan"]],
        ("stock", "wrong json"),
        ("ar", "http 500"),
    ],
)
def test_a_hostile_server_never_gets_a_verdict(servers, prompts, tmp_path, role, kind):
    servers[role].script = hostile(kind, servers[role].script)
    # The limit ends the trickle; on a loaded machine it may end another request before.
    trickles = kind == "slow trickle"
    args = [*flags(servers, "lossless"), "--prompts", prompts, "--json"]
    done = run(*args, "--timeout", "3" if trickles else "120", cwd=tmp_path)
    assert done.returncode in ((3, 4) if trickles else (4,)), done.stderr
    assert done.stdout == ""
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("role", ["lossless", "scorer", "stock"])
def test_a_server_that_is_started_anew_midway_gives_no_verdict(servers, prompts, tmp_path, role):
    """It answers as before, and has another start behind it."""
    good = servers[role].script
    seeds = itertools.count()

    def script(exchange):
        if exchange.path == "/server_info":
            exchange.reply({"version": "toy", "model_path": "toy", "random_seed": next(seeds)})
        else:
            good(exchange)

    servers[role].script = script
    args = [*flags(servers, "lossless"), "--prompts", prompts, "-o", tmp_path / "r.json"]
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "was started anew during the audit; changed: random_seed" in done.stderr
    assert "verdict" not in done.stdout
    assert not (tmp_path / "r.json").exists()


def test_a_description_that_makes_no_sense_does_no_harm(servers, prompts, tmp_path):
    """Names of files beyond any length, half characters, numbers that are none."""
    good = servers["scorer"].script
    info = {"model_path": "a" * 5000, "version": "\ud800", "max_running_requests": float("nan"),
            "specpilot": [1], "enable_fp32_lm_head": "no"}  # fmt: skip

    def script(exchange):
        exchange.reply(info) if exchange.path == "/server_info" else good(exchange)

    servers["scorer"].script = script
    args = [*flags(servers, "lossless"), "--prompts", prompts, "--json"]
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "accept"


def test_a_server_that_dies_midway_gives_no_verdict(servers, prompts, tmp_path):
    good = servers["scorer"].script
    state = {"asked": 0}

    def script(exchange):
        state["asked"] += exchange.path == "/generate"
        if state["asked"] > 5:
            exchange.drop()
        else:
            good(exchange)

    servers["scorer"].script = script
    done = run(*flags(servers, "lossless"), "--prompts", prompts, cwd=tmp_path)
    assert done.returncode in (3, 4)
    assert "verdict:" not in done.stdout


def test_log_probabilities_that_are_not_finite_void_the_audit_of_stock(servers, prompts, tmp_path):
    """Stock is asked for its own margins at events only, so the system has to have some."""
    good = servers["stock"].script

    class Spoiling:
        def __init__(self, exchange):
            self.path, self.body, self._exchange = exchange.path, exchange.body, exchange

        def reply(self, payload):
            self._exchange.reply(payload)

        def stream(self, events):
            for event in events:
                for row in event["meta_info"].get("output_top_logprobs", []):
                    row[0][0] = float("nan")
            self._exchange.stream(events)

    servers["stock"].script = lambda exchange: good(Spoiling(exchange))
    done = run(*flags(servers, "faulty"), "--prompts", prompts, "--json", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    assert "log-probability" in done.stderr


def no_ids(good):
    """A server that answers in text alone."""

    def script(exchange):
        if exchange.path == "/generate" and exchange.body["sampling_params"]["max_new_tokens"]:
            limit = exchange.body["sampling_params"]["max_new_tokens"]
            meta = {
                "prompt_tokens": 4,
                "completion_tokens": limit,
                "finish_reason": {"type": "length", "length": limit},
            }
            exchange.stream([{"text": "words", "meta_info": meta}])
        else:
            good(exchange)

    return script


@pytest.mark.parametrize("role", ["lossless", "stock", "ar"])
def test_a_server_that_reports_no_ids_is_refused(servers, prompts, tmp_path, role):
    servers[role].script = no_ids(servers[role].script)
    done = run(*flags(servers, "lossless"), "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 3
    assert "the server reports no token ids" in done.stderr
    assert "verdict" not in done.stdout


@dataclass
class Sampler:
    """Decodes a toy system at temperature 1, differently every time."""

    system: object
    calls: object = field(default_factory=itertools.count)

    def continue_(self, prefix, n_tokens):
        rng = np.random.default_rng(next(self.calls))
        ids = list(prefix)
        for _ in range(n_tokens):
            logits = self.system.logits(ids)
            ids.append(int((logits + rng.gumbel(size=len(logits))).argmax()))
        return ids[len(prefix) :]

    def logits(self, prefix):
        return self.system.logits(prefix)


def sampling(toy_serve, system, when):
    """A server that samples at temperature 1 where `when(body)` holds, and is greedy elsewhere."""
    warm, cold = toy_serve(Sampler(system)), toy_serve(system)

    def script(exchange):
        asks = exchange.path == "/generate" and exchange.body["sampling_params"]["max_new_tokens"]
        (warm if asks and when(exchange.body) else cold)(exchange)

    return script


@pytest.mark.parametrize("role", ["lossless", "stock", "ar"])
def test_a_server_that_samples_whatever_it_is_asked_gets_no_verdict(
    servers, prompts, tmp_path, toy_serve, toy_system, role
):
    servers[role].script = sampling(toy_serve, toy_system(3), lambda _: True)
    done = run(*flags(servers, "lossless"), "--prompts", prompts, "--json", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    assert "does not decode greedily" in done.stderr
    name = {"lossless": "system", "ar": "AR"}.get(role, role)
    assert f"the {name} server" in done.stderr


def test_defaults_that_are_not_greedy_do_not_act_where_every_parameter_is_named(
    servers, prompts, tmp_path, toy_serve, toy_system
):
    def leaves_room(body):
        neutral = {"temperature": 0, "top_k": 1, "top_p": 1.0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
        params = body["sampling_params"]
        return any(params.get(key) != value for key, value in neutral.items())

    for role in ("lossless", "stock", "ar"):
        servers[role].script = sampling(toy_serve, toy_system(3), leaves_room)
    done = run(*flags(servers, "lossless"), "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_server_that_samples_under_load_alone_is_rejected(
    servers, prompts, tmp_path, toy_serve, toy_system
):
    """Alone it is greedy, so there is something to audit, and the audit runs under load.

    The requests that are sent alone come first, so load is told by their number and not by time.
    """
    asked = itertools.count()
    servers["lossless"].script = sampling(
        toy_serve, toy_system(3), lambda _: next(asked) >= 2 * QUESTIONS
    )
    done = run(*flags(servers, "lossless"), "--prompts", prompts, "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "reject"
