"""A program with SGLang's command line and endpoints, for tests of whoever starts one.

`FAKE_SGLANG` (JSON) says how it behaves. It decodes greedily from a fixed rule, so that answers and
forced scores agree, and keeps a child process as SGLang keeps its scheduler.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BEHAVIOUR: dict[str, Any] = {
    "start_s": 0.2,  # until it answers
    "says": [],  # lines of its log
    "dies": None,  # "at start"; a number: after so many requests; "on signal": ignores SIGTERM
    "version": "0.5.23",
    "plugin": "right",  # absent, inactive, unverified, other file, uninvited, nonsense
    "serves": None,  # another model than the one asked for
    "healthy_checks": 10**9,  # how many times `/health` says so
    "wrong_every": 0,  # tuned: every n-th token is another one
    "s_per_token": {"": 0.0},  # by value of --quantization
} | json.loads(os.environ.get("FAKE_SGLANG", "{}"))
VOCABULARY = 1000


def options(words: list[str]) -> dict[str, Any]:
    """`--name value` pairs; a name without a value is true."""
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            following = words[index + 1 : index + 2]
            bare = not following or following[0].startswith("--")
            found[word[2:].replace("-", "_")] = True if bare else following[0]
    return found


OPTIONS = options(sys.argv[1:])
served = 0
started_s = time.monotonic()


def next_token(ids: list[int]) -> int:
    """What the model says: a fixed function of the last two tokens."""
    return (31 * ids[-1] + 7 * ids[-2 if len(ids) > 1 else -1] + 5) % VOCABULARY


def decode(prompt: list[int], count: int) -> list[int]:
    """Greedy output; a faulty server changes some tokens and goes on from them."""
    ids, every = list(prompt), BEHAVIOUR["wrong_every"] if "quantization" in OPTIONS else 0
    for index in range(count):
        token = next_token(ids)
        wrong = every and index % every == every - 1
        ids.append((token + 1) % VOCABULARY if wrong else token)
    return ids[len(prompt) :]


def plugin_state() -> Any:
    """What specpilot's plugin would report."""
    path, kind = os.environ.get("SPECPILOT_PLUGIN", ""), BEHAVIOUR["plugin"]
    facts = {"layers": 3, "bf16_bytes": 400, "encoded_bytes": 300, "verified": True,
             "kept_bf16": ["conv1d: no matrix"]}  # fmt: skip
    state = {"plugin_version": "0.1.0", "sglang_version": BEHAVIOUR["version"],
             "config_sha256": None, "active": {}, "problems": []}  # fmt: skip
    if kind == "uninvited":
        return {**state, "active": {"w12": facts}}
    if not path or kind == "absent":
        return None
    content = Path(path).read_bytes()
    state["config_sha256"] = hashlib.sha256(content).hexdigest()
    if kind == "inactive":
        return {**state, "problems": ["w12: Linear.apply has another signature in 0.5.99"]}
    if kind == "nonsense":
        return {**state, "active": ["w12"]}
    if kind == "unverified":
        facts["verified"] = False
    if kind == "other file":
        state["config_sha256"] = "0" * 64
    return {**state, "active": {"w12": facts}}


def server_info() -> dict[str, Any]:
    """`/server_info`, as far as specpilot reads it."""
    state: dict[str, Any] = {
        "memory_usage": {"weight": 0.5 if "quantization" in OPTIONS else 1.0, "kvcache": 2.0,
                         "graph": 0.1, "token_capacity": int(OPTIONS.get("max_total_tokens", 5000))
                         + (1000 if "quantization" in OPTIONS else 0)},
        "effective_max_running_requests_per_dp": 8,
    }  # fmt: skip
    own = plugin_state()
    if own is not None:
        state["specpilot"] = own
    tokens = OPTIONS.get("speculative_num_draft_tokens")
    return {
        "version": BEHAVIOUR["version"],
        "model_path": BEHAVIOUR["serves"] or OPTIONS["model_path"],
        "speculative_draft_model_path": OPTIONS.get("speculative_draft_model_path"),
        "speculative_algorithm": OPTIONS.get("speculative_algorithm"),
        "speculative_num_draft_tokens": None if tokens is None else int(tokens),
        "quantization": OPTIONS.get("quantization"),
        "internal_states": [state],
    }


def score(ids: list[int], start: int) -> dict[str, Any]:
    """Forced log-probabilities: near certain of its own token, and of no other."""
    forced: list[Any] = [[None, ids[start], None]]
    best: list[Any] = [None]
    for position in range(start + 1, len(ids)):
        own = next_token(ids[:position])
        forced.append([-0.01 if ids[position] == own else -6.0, ids[position], None])
        best.append([[-0.01, own, None]])
    return {"input_token_logprobs": forced, "input_top_logprobs": best}


class Handler(BaseHTTPRequestHandler):
    """SGLang's endpoints."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Its log holds what the behaviour says."""

    def reply(self, status: int, body: Any) -> None:
        """One JSON document."""
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """`/health` and `/server_info`."""
        if time.monotonic() - started_s < BEHAVIOUR["start_s"]:
            self.reply(503, {})
        elif self.path == "/server_info":
            self.reply(200, server_info())
        else:
            BEHAVIOUR["healthy_checks"] -= 1
            self.reply(200 if BEHAVIOUR["healthy_checks"] >= 0 else 503, {})

    def do_POST(self) -> None:
        """`/generate` and `/flush_cache`."""
        global served
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        if self.path != "/generate":
            self.reply(200, {})
            return
        served += 1
        if isinstance(BEHAVIOUR["dies"], int) and served > BEHAVIOUR["dies"]:
            print("Scheduler hit an exception: CUDA error: unspecified launch failure", flush=True)
            os._exit(137)
        prompt = body["input_ids"]
        count = body["sampling_params"]["max_new_tokens"]
        if count == 0:
            meta = {**score(prompt, body["logprob_start_len"]), "prompt_tokens": len(prompt),
                    "completion_tokens": 1, "finish_reason": {"type": "length"}}  # fmt: skip
            self.reply(200, {"output_ids": [0], "meta_info": meta})
            return
        self.stream(prompt, decode(prompt, count))

    def stream(self, prompt: list[int], output: list[int]) -> None:
        """One chunk with every token, after the time that they take."""
        speed = BEHAVIOUR["s_per_token"]
        time.sleep(speed.get(OPTIONS.get("quantization", ""), 0.0) * len(output))
        meta = {"prompt_tokens": len(prompt), "completion_tokens": len(output), "cached_tokens": 0,
                "finish_reason": {"type": "length", "length": len(output)}}  # fmt: skip
        if "speculative_algorithm" in OPTIONS:
            meta["spec_verify_ct"] = max(1, (len(output) - 1) // 2)
        chunk = json.dumps({"text": "", "output_ids": output, "meta_info": meta})
        content = f"data: {chunk}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Start as SGLang does: log, child process, port."""
    for line in BEHAVIOUR["says"]:
        print(line, flush=True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)  # fake-scheduler"])
    if BEHAVIOUR["dies"] == "at start":
        sys.exit(3)
    server = ThreadingHTTPServer((OPTIONS["host"], int(OPTIONS["port"])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
