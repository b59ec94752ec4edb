"""SGLang recipes on copies of the demo pair, and a fake SGLang to start them with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fake_sglang.install import install

_RECIPE = """\
schema_version: 1
name: small
title: Demo target on a fake SGLang
engine: sglang
engine_versions: {{from_version: 0.5.20, below: 0.5.24, pinned: 0.5.23}}
models:
  target: {models}/target
{drafter}device: cpu
regime:
  requests: 1
  context: 1024
arguments:
  common:
    max-total-tokens: 4096
    mem-fraction-static: 0.3
    chunked-prefill-size: 256
    max-running-requests: 2
    disable-radix-cache: true
{speculation}  stock:
    page-size: 1
environment:
  SGLANG_TEST: "1"
mechanisms:
  - mechanism: w12
{gates}ready_timeout_s: {ready_s}
"""
QWEN_27B = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "full_attention_interval": 4, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "attn_output_gate": True,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
}  # fmt: skip
"""The configuration of Qwen3.8-27B, as far as it is read."""

_SPECULATION = """\
    speculative-algorithm: DFLASH
    speculative-num-draft-tokens: 8
"""
_GATES = """\
prompts:
  unseen: unseen.jsonl
gates:
  paired_bench:
    prompts_per_benchmark: 2
    aa_sessions: 1
    warmup: 1
  token_force:
    split_position: 16
    probe_offsets: [0]
"""


@pytest.fixture
def sglang_recipe(repo: Path, tmp_path: Path) -> Callable[..., Path]:
    """`sglang_recipe(drafter=, gates=, ready_s=, edit={old: new})`: a recipe's folder."""

    def make(
        *,
        drafter: bool = False,
        gates: bool = False,
        ready_s: float = 20.0,
        edit: dict[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / "recipe"
        folder.mkdir()
        demo = repo / "recipes/demo-cpu"
        text = _RECIPE.format(
            models=demo,
            drafter=f"  drafter: {demo}/drafter\n" if drafter else "",
            speculation=_SPECULATION if drafter else "",
            gates=_GATES if gates else "",
            ready_s=ready_s,
        )
        for old, new in (edit or {}).items():
            assert old in text
            text = text.replace(old, new)
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        (folder / "unseen.jsonl").write_text(_prompts(demo), encoding="utf-8")
        return folder

    return make


def _prompts(demo: Path) -> str:
    """Three prompts of each of four kinds, with short answers."""
    lines = (demo / "prompts/unseen.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    kinds = ("code", "prose", "records", "stories")
    chosen = [row for k in kinds for row in [r for r in rows if r["benchmark"] == k][:3]]
    return "".join(json.dumps({**row, "max_new_tokens": 32}) + "\n" for row in chosen)


@dataclass(frozen=True, slots=True)
class FakeSglang:
    """Runs `specpilot` so that the SGLang it finds is the fake one."""

    folder: Path
    site: Path
    repo: Path

    def environment(self, behaviour: dict[str, Any]) -> dict[str, str]:
        """The variables of a run; the fake's behaviour is one of them."""
        paths = [str(self.site), str(self.repo), str(self.repo / "kernels")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "FAKE_SGLANG": json.dumps(behaviour),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str, code: str = "", **behaviour: Any) -> subprocess.Popen[str]:
        """`specpilot WORDS` in the background; Python `code` runs before."""
        program = (
            f"import sys\n{code}\nfrom specpilot_cli.main import main\nsys.exit(main(sys.argv[1:]))"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program, *words],
            cwd=self.folder,
            env=self.environment(behaviour),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *words: str, code: str = "", **behaviour: Any
    ) -> subprocess.CompletedProcess[str]:
        """`specpilot WORDS`, for at most two minutes."""
        process = self.start(*words, code=code, **behaviour)
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def servers(self) -> list[int]:
        """The fake servers that run, without their guards and children."""

        def words(pid: int) -> list[bytes]:
            with suppress(OSError):  # gone meanwhile
                return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return []

        found = [pid for pid in self._running() if b"sglang.launch_server" in words(pid)]
        return [pid for pid in found if b"--" not in words(pid)]

    def left_over(self) -> list[int]:
        """Processes that still run in this test's environment, after a moment to go."""
        deadline = time.monotonic() + 30
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _running(self) -> list[int]:
        marker, found = str(self.site).encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state != "Z" and marker in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # gone, or another user's
        return found


@pytest.fixture
def fake(repo: Path, tmp_path: Path) -> Iterator[FakeSglang]:
    """A fake SGLang 0.5.23 with specpilot's entry point; nothing of it survives the test."""
    runner = FakeSglang(tmp_path, install(tmp_path / "site"), repo)
    yield runner
    for pid in runner.left_over():
        os.kill(pid, signal.SIGKILL)
