"""SGLang servers that start beside each other, one after the other where memory is counted.

Every server is launched behind a gate: its processes import SGLang and wait. Opening the gate lets
it load. So imports of many servers overlap, and the free memory that a server sees when it sizes
its pools is the same in every run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglang_bench.load import get_json
from sglang_bench.server_side import GATE_ENV
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.errors import MachineError, SpecPilotError
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.schema.plugin_config import PLUGIN_ENV, PLUGIN_STATE_KEY, PluginConfig

WEIGHTS_PLUGIN, OUR_PLUGIN = "specpilot-bench-weights", "specpilot"
_SHOWN = ("quantization", "bf16_gemm_backend", "speculative_algorithm", "attention_backend",
          "speculative_num_draft_tokens", "max_total_num_tokens", "max_running_requests",
          "mem_fraction_static", "cuda_graph_config", "chunked_prefill_size")  # fmt: skip
_LOG_FACTS = re.compile(
    r"(Load weight (?:begin|end)\..*|Mamba Cache is allocated\..*|KV Cache is allocated\..*"
    r"|Memory pool end\..*|Capture .* end\..*|max_total_num_tokens=.*)"
)
_POOLS_DONE = "Memory pool end."
_PARK_S, _STOP_S, _POLL_S, _FOREVER_S = 120.0, 0.5, 0.1, 3600.0
_LOG_LINES = 15
_PORTS_EACH = 1100
"""SGLang takes another port at random from the thousand above its own."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server to start.

    args: of `sglang.launch_server`, beside those of all servers. plugin: "absent" keeps specpilot's
    plugin away, "inert" loads it without a configuration, a configuration turns it on. real: the
    folder's weights are loaded instead of random ones. without: of the arguments of all servers,
    those that this one does not get.
    """

    name: str
    model: Path
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    plugin: Literal["absent", "inert"] | PluginConfig = "absent"
    real: bool = False
    without: tuple[str, ...] = ()


@dataclass(slots=True)
class Running:
    """A launched server; `failure` is set if it did not become ready."""

    spec: ServerSpec
    process: ServerProcess
    gate: Path
    launched_s: float
    opened_s: float | None = None
    ready_s: float | None = None
    failure: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return self.process.base_url

    @property
    def log(self) -> str:
        try:
            return self.process.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


class Fleet:
    """All servers of a run; `close` ends them."""

    def __init__(
        self, folder: Path, common: Sequence[str], *, first_port: int, ready_s: float = 110.0
    ) -> None:
        self.folder, self.common, self.ready_s = folder, tuple(common), ready_s
        self._port = first_port
        self.running: dict[str, Running] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def launch(self, specs: Iterable[ServerSpec]) -> None:
        """Start servers behind their gates and return at once."""
        for spec in specs:
            self._port += _PORTS_EACH
            gate = self.folder / f"{spec.name}.gate"
            process = ServerProcess(
                self._command(spec, self._port), port=self._port, name=spec.name,
                log_path=self.folder / f"{spec.name}.log", env=self._env(spec, gate),
                ready_timeout_s=_FOREVER_S, stop_timeout_s=_STOP_S,
            )  # fmt: skip
            server = Running(spec, process, gate, time.monotonic())
            self.running[spec.name] = server
            threading.Thread(target=_start, args=(server,), daemon=True).start()

    def wait_parked(self, names: Iterable[str]) -> None:
        """Wait until the processes of these servers are at their gates, or two minutes."""
        deadline = time.monotonic() + _PARK_S
        for name in names:
            server = self.running[name]
            while time.monotonic() < deadline and not server.done.is_set():
                if any(self.folder.glob(f"{server.gate.name}.*.waits")):
                    break
                time.sleep(_POLL_S)

    def open(self, name: str) -> None:
        """Let a server load its model."""
        server = self.running[name]
        server.opened_s = time.monotonic()
        server.gate.touch()

    def wait_pools(self, name: str) -> None:
        """Wait until a server has sized its memory pools (or is ready, or has failed)."""
        server = self.running[name]
        while _POOLS_DONE not in server.log and not server.done.is_set():
            if self._seconds_left(server) <= 0.0:
                return
            time.sleep(_POLL_S)

    def wait_ready(self, name: str) -> dict[str, Any]:
        """Wait for a server and return its facts; MachineError if it failed or takes too long.

        MachineError too if the plugin does not do what its configuration asks for.
        """
        server = self.running[name]
        if not server.done.wait(max(0.0, self._seconds_left(server))):
            end = "\n".join(server.log.splitlines()[-_LOG_LINES:])
            server.process.stop()
            raise MachineError(f"{name} is not ready {self.ready_s:g} s after its gate\n{end}")
        if server.failure is not None:
            raise MachineError(server.failure)
        info = get_json(server.url, "/server_info")
        state = info["internal_states"][0]
        facts = self._facts(server, info, state)
        problem = handshake_problem(server.spec.plugin, state.get(PLUGIN_STATE_KEY))
        if problem is not None:
            raise MachineError(f"{name}: {problem}")
        return facts

    def _seconds_left(self, server: Running) -> float:
        opened_s = server.opened_s or time.monotonic()
        return opened_s + self.ready_s - time.monotonic()

    def stop(self, names: Iterable[str]) -> None:
        """End servers, all at once."""
        threads = [
            threading.Thread(target=self.running.pop(name).process.stop)
            for name in list(names)
            if name in self.running
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """End every server."""
        self.stop(list(self.running))

    def _command(self, spec: ServerSpec, port: int) -> list[str]:
        load = () if spec.real else ("--load-format", "dummy")
        common = [word for word in self.common if word not in spec.without]
        return [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(spec.model),
            "--host", "127.0.0.1", "--port", str(port), *common, *load, *spec.args,
        ]  # fmt: skip

    def _env(self, spec: ServerSpec, gate: Path) -> dict[str, str]:
        extra = os.environ.get("SPECPILOT_BENCH_EXTRA_PLUGINS", "").split()
        names = [WEIGHTS_PLUGIN, *extra, *([] if spec.plugin == "absent" else [OUR_PLUGIN])]
        env = {
            "SGLANG_PLUGINS": ",".join(names), GATE_ENV: str(gate), PLUGIN_ENV: "",
            # readiness must not depend on a generation: the first one compiles kernels
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }  # fmt: skip
        if isinstance(spec.plugin, PluginConfig):
            path = self.folder / f"{spec.name}.plugin.json"
            atomic_write_text(path, spec.plugin.model_dump_json(indent=1) + "\n", force=True)
            env[PLUGIN_ENV] = str(path)
        return {**env, **spec.env}

    def _facts(
        self, server: Running, info: Mapping[str, Any], state: Mapping[str, Any]
    ) -> dict[str, Any]:
        spec, opened = server.spec, server.opened_s or server.launched_s
        return {
            "command": server.process.command[1:],
            "env": {**spec.env, "SGLANG_PLUGINS": self._env(spec, server.gate)["SGLANG_PLUGINS"]},
            "plugin_config": spec.plugin
            if isinstance(spec.plugin, str)
            else json.loads(spec.plugin.model_dump_json()),
            "launch_to_gate_s": opened - server.launched_s,
            "gate_to_ready_s": (server.ready_s or opened) - opened,
            "settings": {key: state.get(key, info.get(key)) for key in _SHOWN},
            "memory_usage": state.get("memory_usage"),
            "plugin_state": state.get(PLUGIN_STATE_KEY),
            "log": _LOG_FACTS.findall(server.log),
        }


def _start(server: Running) -> None:
    try:
        server.process.__enter__()
        server.ready_s = time.monotonic()
    except SpecPilotError as error:
        server.failure = str(error)
    finally:
        server.done.set()


def handshake_problem(
    asked: Literal["absent", "inert"] | PluginConfig, state: Mapping[str, Any] | None
) -> str | None:
    """What is wrong with what the plugin says of itself, or None."""
    if isinstance(asked, str):
        return None if state is None else f"the plugin should be {asked}, but says {dict(state)}"
    if state is None:
        return "the plugin says nothing of itself in /server_info"
    missing = [name for name in asked.asked() if name not in state["active"]]
    if missing or state["problems"]:
        return f"not active: {missing}; problems: {list(state['problems'])}"
    return None


def gpu_state() -> dict[str, str]:
    """nvidia-smi's name, driver, memory in MiB, clocks in MHz, power in W; empty without a GPU."""
    keys = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.mem",
            "power.draw", "temperature.gpu")  # fmt: skip
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(keys, (word.strip() for word in done.stdout.split(",")), strict=False))


def wait_memory_free(most_mib: float, *, timeout_s: float = 10.0) -> None:
    """Wait until at most `most_mib` of the GPU's memory is in use, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        used = gpu_state().get("memory.used")
        if used is None or float(used) <= most_mib:
            return
        time.sleep(0.3)
