"""Start SGLang on a CPU with the tiny pair, from the environment that `scripts/test.sh` makes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.sglang.launch import server_command, server_environment
from specpilot_cli.schema.plugin_config import PluginConfig
from specpilot_cli.schema.sglang_recipe import Argument
from tests.ports import free_port
from tests.sglang.cpu_engine.models import BLOCK, TinyPair

_HERE = Path(__file__).resolve().parent
_SITE = _HERE / "site"
PYTHON = _HERE.parents[2] / ".venv-sglang/bin/python"

ARGUMENTS: Mapping[str, Argument] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    # SGLang takes what others allocate while it loads for its weights: leave room for that
    "mem-fraction-static": 0.9,
    "max-total-tokens": 8192,
    "max-running-requests": 4,
    "disable-radix-cache": True,
    "skip-server-warmup": True,
    "sleep-on-idle": True,  # otherwise every idle server spins on a core
    "speculative-algorithm": "DFLASH",
    "speculative-num-draft-tokens": BLOCK,
}
"""What every server is given, beside its models and ports."""

ENVIRONMENT: Mapping[str, str] = {
    "PYTHONPATH": str(_SITE),
    "PYTHONDONTWRITEBYTECODE": "",  # compiling SGLang takes longer than loading it
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class CpuServer:
    """A server of the tiny pair, DFLASH with the drafter; not started yet.

    plugin: specpilot's configuration, or the text of its file; None for stock. arguments: more
    words for its command line. environment: more variables. site: a folder that its interpreter
    looks into first.
    """

    name: str
    plugin: PluginConfig | str | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    site: Path | None = None

    def process(self, pair: TinyPair, folder: Path) -> ServerProcess:
        """The server as a context manager that keeps its files in `folder`."""
        config = None
        if self.plugin is not None:
            config = folder / f"{self.name}.plugin.json"
            text = self.plugin if isinstance(self.plugin, str) else self.plugin.model_dump_json()
            config.write_text(text, encoding="utf-8")
        port = free_port()
        command = server_command(
            str(PYTHON), str(pair.target), ARGUMENTS, host="127.0.0.1", port=port,
            drafter=str(pair.drafter),
        )  # fmt: skip
        environment = {**ENVIRONMENT, **self.environment}
        if self.site is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(self.site), str(_SITE)])
        return ServerProcess(
            [*command, *self.arguments],
            port=port,
            log_path=folder / f"{self.name}.log",
            name=f"{self.name} server",
            env=server_environment(environment, config),
            ready_timeout_s=600.0,
            stop_timeout_s=1.0,  # a polite end takes SGLang five seconds
        )


def start_together(stack: ExitStack, processes: Sequence[ServerProcess]) -> None:
    """Enter all servers at once: starting one leaves a core idle most of the time.

    All are started; then the first failure, if any, is raised and `stack` ends the others.
    """
    with ThreadPoolExecutor(len(processes)) as pool:
        starting = [pool.submit(stack.enter_context, process) for process in processes]
    for one in starting:
        one.result()


def processes_of(logs: Path) -> dict[int, str]:
    """Running processes that print to the file or folder `logs`: id -> name.

    A server's children inherit that, and nothing that SGLang does to them changes it.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, a zombie, or another user's
            if Path((entry / "fd/1").readlink()).is_relative_to(logs):
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


def left_over(logs: Path) -> dict[int, str]:
    """`processes_of` those that should be gone: a killed process needs a moment to go."""
    deadline = time.monotonic() + 60
    while (found := processes_of(logs)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def changed_sglang(folder: Path, file: str, old: str, new: str) -> Path:
    """Make `folder/sglang`: the installed SGLang, by links, but for one place in one file.

    The distribution's version and everything else stay what they are. Returns `folder`.
    """
    (there,) = (PYTHON.parents[1] / "lib").glob("python3.*/site-packages/sglang")
    here = folder / "sglang"
    for part in Path(file).parts:
        here.mkdir(parents=True)
        # the folder of the file itself gets bytecode of its own
        own = {part, "__pycache__"} if (there / part).is_file() else {part}
        for entry in there.iterdir():
            if entry.name not in own:
                (here / entry.name).symlink_to(entry)
        here, there = here / part, there / part
    text = there.read_text(encoding="utf-8")
    assert text.count(old) == 1
    here.write_text(text.replace(old, new), encoding="utf-8")
    return folder
