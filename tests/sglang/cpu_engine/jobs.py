"""Jobs for `in_process`, and what they answer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specpilot_cli.record.join import join_request, no_steps
from specpilot_cli.record.shards import collect, read_index
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording, LatticeRequest
from specpilot_cli.schema.plugin_config import PluginConfig
from tests.sglang.cpu_engine.models import TinyPair
from tests.sglang.cpu_engine.server import ENVIRONMENT, PYTHON

_SCRIPT = Path(__file__).with_name("in_process.py")
_ARGUMENTS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.9",
    "--skip-server-warmup",
)  # fmt: skip
DENSE = {"SGLANG_SIMULATE_ACC_LEN": "1", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
"""What a dense recording needs of DFLASH."""


@dataclass(frozen=True, slots=True)
class Job:
    """One engine and its requests; see `in_process`."""

    name: str
    requests: Sequence[dict[str, Any]]
    arguments: Sequence[str] = ()
    plugin: PluginConfig | None = None
    environment: dict[str, str] = field(default_factory=dict)
    running: int = 4
    tokens: int = 8192
    radix: bool = False
    dtype: str = "float32"

    def document(self, target: Path) -> dict[str, Any]:
        """As the process reads it."""
        words = [
            "--model-path", str(target), *_ARGUMENTS, "--dtype", self.dtype,
            "--max-running-requests", str(self.running), "--max-total-tokens", str(self.tokens),
        ]  # fmt: skip
        if not self.radix:
            words.append("--disable-radix-cache")
        return {
            "name": self.name,
            "arguments": [*words, *self.arguments],
            "plugin": None if self.plugin is None else self.plugin.model_dump(),
            "environment": self.environment,
            "requests": list(self.requests),
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got: `accepted` has the tokens that each of its decode steps committed."""

    output_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    cached: int
    finish: str
    retractions: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A job's answers by request, and what the plugin said of itself."""

    answers: dict[str, Answer]
    state: dict[str, Any] | None

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Output tokens by request."""
        return {rid: answer.output_ids for rid, answer in self.answers.items()}


def run_jobs(pair: TinyPair, jobs: Sequence[Job], log: Path) -> dict[str, Done]:
    """Run them one after the other; AssertionError with its traceback if one failed."""
    paths = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "kernels")]
    environment = {**os.environ, **ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, ENVIRONMENT["PYTHONPATH"]])
    environment.pop("SPECPILOT_PLUGIN", None)
    with log.open("w") as errors:
        done = subprocess.run(
            [str(PYTHON), str(_SCRIPT)],
            input=json.dumps([job.document(pair.target) for job in jobs]),
            stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, check=False,
        )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    broken = [f"{answer['name']}:\n{answer['error']}" for answer in found if "error" in answer]
    assert not broken, "\n".join(broken)
    assert len(found) == len(jobs), log.read_text()[-3000:]
    return {answer["name"]: _done(answer) for answer in found}


def _done(answer: dict[str, Any]) -> Done:
    answers = {
        rid: Answer(
            tuple(one["output_ids"]), tuple(one["accepted"]), one["cached"], one["finish"],
            one["retractions"], tuple(one["logprobs"]),
        )
        for rid, one in answer["requests"].items()
    }  # fmt: skip
    return Done(answers, answer["state"])


def recording(requests: Sequence[dict[str, Any]], done: Done) -> LatticeRecording:
    """The lattice recording that `specpilot record` would write of a recording job's shards."""
    assert done.state is not None
    assert done.state["problems"] == []
    folder = Path(done.state["active"]["recorder"]["folder"])
    index = read_index(folder)
    rows = collect(folder, index, [request["rid"] for request in requests])
    outputs = [done.answers[request["rid"]].output_ids for request in requests]
    parts = [
        join_request(
            rows.get(request["rid"]), prompt_len=len(request["input_ids"]), output_ids=output,
            mode=index.mode, empty=no_steps(index.positions, index.candidates),
        )
        for request, output in zip(requests, outputs, strict=True)
    ]  # fmt: skip
    counts = [len(part["step_position"]) for part in parts]
    prompts = [request["input_ids"] for request in requests]
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode=index.mode,
            block=index.block,
            engine=index.engine,
            requests=[
                LatticeRequest(request_id=request["rid"], benchmark="tiny") for request in requests
            ],
            target_sha256="0" * 64,
            drafter_sha256="0" * 64,
            drafter_kind="dspark" if index.algorithm == "DSPARK" else "dflash2",
        ),
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]),
        output_ids=np.concatenate(outputs).astype(np.int32),
        output_offsets=np.cumsum([0, *map(len, outputs)]),
        step_request=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    )
