"""`serve`, `record` and `profile` as processes: files, exit codes, no server left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.process import ServerProcess, bind_port, check_port_free
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve
from tests.ports import free_port

DEADLINE_S = 60.0


def _run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specpilot_cli", *(str(argument) for argument in arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **options
    )


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # before it is opened, or while it is read
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt set of three lines."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"request_id": f"q{i}", "benchmark": "b", "text": text, "max_new_tokens": 20}
        for i, text in enumerate(("one", "two words", "def f():\n    return"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestServe:
    """`specpilot serve` under `ServerProcess`, as commands start it."""

    def test_tree_server_with_a_fault(self, pair: Any, tmp_path: Path) -> None:
        port = free_port()
        spec = SpecConfig(mode="tree", block=16, n_nodes=12, scoring="marginal")
        command = serve_command(
            pair.target, pair.drafter, spec, port=port, max_running=3, fault=LogitFault(4, 5, 1.5)
        )
        prompt = tuple(range(2, 30))
        request = GenerateRequest("x", prompt, max_new_tokens=16, ignore_eos=True)
        with (
            ServerProcess(command, port=port, log_path=tmp_path / "log") as server,
            HttpEngine(server.base_url) as client,
        ):
            info = client.server_info()
            generation = client.generate(request)
            pid = info["pid"]
        own = info["specpilot"]
        assert (own["mode"], own["nodes"], own["scoring"]) == ("tree", 12, "marginal")
        assert own["fault"]["after_output_position"] == 4
        assert (own["fault"]["every_token_ids"], own["fault"]["bias"]) == (5, 1.5)
        assert info["max_running_requests"] == 3
        engine = pair.engine("ar", fault=LogitFault(4, 5, 1.5))
        assert generation.output_ids == engine.generate([request])[0].output_ids
        assert _gone(pid)

    def test_killing_the_parent_leaves_no_server(self, pair: Any, tmp_path: Path) -> None:
        port = free_port()
        command = serve_command(pair.target, None, SpecConfig(), port=port)
        program = f"""
            import pathlib, time
            from specpilot_cli.engines.process import ServerProcess
            folder = pathlib.Path({str(tmp_path)!r})
            with ServerProcess({command!r}, port={port}, log_path=folder / "log"):
                (folder / "ready").touch()
                time.sleep(600)
        """
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as parent:
            deadline = time.monotonic() + DEADLINE_S
            while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            info = httpx.get(f"http://127.0.0.1:{port}/server_info", trust_env=False).json()
            parent.kill()
        assert _gone(info["pid"])
        check_port_free(port)

    def test_occupied_port_fails_before_loading(self, tmp_path: Path) -> None:
        with bind_port(0) as taken:
            taken.listen()
            port = taken.getsockname()[1]
            done = _run("serve", "--target", tmp_path / "no-model", "--port", port)
        assert done.returncode == 3
        assert f"port {port}" in done.stderr
        assert "hint:" in done.stderr

    def test_missing_model(self, tmp_path: Path) -> None:
        done = _run("serve", "--target", tmp_path / "no-model", "--port", free_port())
        assert done.returncode == 2
        assert "config.json" in done.stderr

    def test_interrupt(self, pair: Any) -> None:
        port = free_port()
        command = serve_command(pair.target, None, SpecConfig(), port=port)
        with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            server.send_signal(signal.SIGINT)
            _, stderr = server.communicate(timeout=DEADLINE_S)
        assert server.returncode == 130
        assert b"Traceback" not in stderr


class TestRecord:
    """`specpilot record`."""

    def test_files(self, pair: Any, prompts: Path, tmp_path: Path) -> None:
        lattice, outputs = tmp_path / "l.safetensors", tmp_path / "o.jsonl"
        done = _run(
            "record", "--target", pair.target, "--drafter", pair.drafter, "--prompts", prompts,
            "-o", lattice, "--outputs", outputs, "--limit", 2, "--block", 8, "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)["results"]
        recording = read_lattice(lattice)
        records = read_jsonl(outputs, OutputRecord)
        assert [record.request_id for record in records] == ["q0", "q1"]
        assert recording.n_positions == results["positions"] == 7
        assert recording.output(1).tolist() == list(records[1].output_ids)
        assert results["lattice_bytes"] == lattice.stat().st_size

    def test_refuses_to_overwrite_before_any_work(self, prompts: Path, tmp_path: Path) -> None:
        lattice = tmp_path / "l.safetensors"
        lattice.write_text("precious")
        done = _run(
            "record", "--target", "none", "--drafter", "none", "--prompts", prompts, "-o", lattice
        )
        assert done.returncode == 2
        assert "already exists" in done.stderr
        assert lattice.read_text() == "precious"

    def test_bad_prompt_line(self, pair: Any, tmp_path: Path) -> None:
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"request_id": "a"}\n')
        done = _run(
            "record", "--target", pair.target, "--drafter", pair.drafter, "--prompts", bad,
            "-o", tmp_path / "l.safetensors",
        )  # fmt: skip
        assert done.returncode == 2
        assert f"{bad}:1" in done.stderr


class TestProfile:
    """`specpilot profile`."""

    def test_files(self, pair: Any, prompts: Path, tmp_path: Path) -> None:
        step, times = tmp_path / "step.json", tmp_path / "times.json"
        done = _run(
            "profile", "--target", pair.target, "--drafter", pair.drafter, "--prompts", prompts,
            "-o", step, "--step-times", times, "--rows", "1,8,16", "--steps", 3, "--repeats", 2,
            "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)["results"]
        profile = read_json_model(step, StepProfile)
        curve = read_json_model(times, StepTimeCurve)
        assert (profile.mode, profile.rows) == ("chain", 8)
        assert profile.device.peaks is not None
        assert [point.rows for point in curve.points] == [8, 16]
        assert results["step_profile"]["t_step_s"] == profile.t_step_s

    def test_without_a_drafter(self, pair: Any) -> None:
        done = _run("profile", "--target", pair.target, "--steps", 2, "--repeats", 1)
        assert done.returncode == 0, done.stderr
        assert "target_gemm" in done.stdout

    def test_step_times_need_a_drafter(self, pair: Any, tmp_path: Path) -> None:
        times = tmp_path / "times.json"
        done = _run("profile", "--target", pair.target, "--step-times", times)
        assert done.returncode == 2
        assert "--drafter" in done.stderr

    @pytest.mark.parametrize("rows", ["1,x", "0,8", ""])
    def test_bad_rows(self, rows: str) -> None:
        done = _run("profile", "--target", "none", "--rows", rows)
        assert done.returncode == 2
        assert "--rows" in done.stderr
