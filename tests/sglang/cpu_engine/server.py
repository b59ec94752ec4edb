"""Start SGLang on a CPU with the tiny pair, from the environment that `scripts/test.sh` makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.sglang.launch import server_command, server_environment
from specpilot_cli.schema.plugin_config import PluginConfig
from tests.ports import free_port
from tests.sglang.cpu_engine.models import TinyPair

_HERE = Path(__file__).resolve().parent
_REPO = _HERE.parents[2]
SITE = _HERE / "site"
PYTHON = _REPO / ".venv-sglang/bin/python"

_ARGUMENTS = {
    "device": "cpu",
    "mem-fraction-static": 0.1,
    "max-total-tokens": 8192,
    "max-running-requests": 4,
    "disable-radix-cache": True,
    "skip-server-warmup": True,
}
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class CpuServer:
    """One server of the tiny pair, not started yet.

    speculate: DFLASH with the drafter instead of one token a step. plugin: specpilot's
    configuration, None for stock. arguments: more words for its command line. site: more folders
    for its PYTHONPATH, before the stand-ins.
    """

    name: str
    speculate: bool = True
    plugin: PluginConfig | None = None
    arguments: Sequence[str] = ()
    site: Sequence[Path] = ()

    def process(self, pair: TinyPair, folder: Path) -> ServerProcess:
        """The server as a context manager that keeps its files in `folder`."""
        config = None
        if self.plugin is not None:
            config = folder / f"{self.name}.plugin.json"
            config.write_text(self.plugin.model_dump_json(), encoding="utf-8")
        port = free_port()
        speculation = {"speculative-algorithm": "DFLASH"} if self.speculate else {}
        command = server_command(
            str(PYTHON), str(pair.target), {**_ARGUMENTS, **speculation}, host="127.0.0.1",
            port=port, drafter=str(pair.drafter) if self.speculate else None,
        )  # fmt: skip
        path = os.pathsep.join(map(str, (*self.site, SITE, _REPO, _REPO / "kernels")))
        return ServerProcess(
            [*command, *self.arguments],
            port=port,
            log_path=folder / f"{self.name}.log",
            name=f"{self.name} server",
            env={**server_environment(_ENVIRONMENT, config), "PYTHONPATH": path},
            ready_timeout_s=180.0,
        )


def start_together(stack: ExitStack, processes: Sequence[ServerProcess]) -> None:
    """Enter all servers at once: starting one leaves a core idle most of the time.

    All are started; then the first failure, if any, is raised and `stack` ends the others.
    """
    with ThreadPoolExecutor(len(processes)) as pool:
        starting = [pool.submit(stack.enter_context, process) for process in processes]
    for one in starting:
        one.result()
