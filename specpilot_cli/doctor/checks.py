"""The checks of `specpilot doctor`. Each looks at one thing and changes nothing.

torch is imported in a child process only: a broken installation must not take doctor with it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from specpilot_cli.doctor.cuda_driver import CudaDevice, cuda_devices
from specpilot_cli.settings import available_cores
from specpilot_cli.units import format_bytes

Requirement = Literal["torch", "gpu", "sglang"]

# First version that the engine plugin was checked against, and the first that it was not.
SGLANG_FROM, SGLANG_BELOW = (0, 5, 20), (0, 5, 24)
# The reference engine loads a copy of both models, weights and states, in float32.
LEAST_MEMORY_BYTES = 2_000_000_000
_IMPORT_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `detail` is what was found, `enables` what it is good for."""

    name: str
    ok: bool
    detail: str
    enables: str
    needed_for: tuple[Requirement, ...] = ()
    fix: str | None = None


def run_checks() -> list[Check]:
    """Every check, in the order they are shown."""
    devices = cuda_devices()
    return [
        _python(),
        _cores(),
        _memory(),
        _numba(),
        _numba_cache(),
        _imported("torch", "the reference engine: serve, record, profile, the demo", ("torch",)),
        _package("tokenizers", "text prompts in the reference engine", ("torch",), "torch"),
        _package("starlette", "the reference engine's HTTP server", ("torch",), "torch"),
        _package("uvicorn", "the reference engine's HTTP server", ("torch",), "torch"),
        _package("transformers", "cross-checking the reference engine", (), "test"),
        _package("matplotlib", "figures in reports", (), "report"),
        _cuda(devices),
        _package("cuda-bindings", "compiling CUDA kernels at first use", ("gpu",), "gpu"),
        _package("nvidia-cuda-nvrtc", "compiling CUDA kernels at first use", ("gpu",), "gpu"),
        _sglang(),
    ]


def missing_for(checks: list[Check], required: Sequence[str]) -> list[Check]:
    """The failed checks that any of `required` needs."""
    return [c for c in checks if not c.ok and any(need in required for need in c.needed_for)]


def _python() -> Check:
    return Check(
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "everything",
        fix="install Python 3.11 or later",
    )


def _cores() -> Check:
    cores = available_cores()
    return Check("cpu cores", cores >= 1, str(cores), "the reference engine, W12 conversion")


def _memory() -> Check:
    n_bytes = memory_bytes()
    return Check(
        "memory",
        n_bytes is None or n_bytes >= LEAST_MEMORY_BYTES,
        "unknown" if n_bytes is None else f"{format_bytes(n_bytes)} available",
        "two engines at once in paired-bench and the demo",
        fix=f"free at least {format_bytes(LEAST_MEMORY_BYTES)}",
    )


def memory_bytes() -> int | None:
    """Memory this process may still take: the machine's free memory, or less in a container."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_cgroup_bytes(name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(max(0, limit - used))
    return min(free, default=None)


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or the word "max"
        return None


def _numba() -> Check:
    enables = "fast W12 conversion and tree replay; without it the numpy code runs"
    try:
        import numba
    # numba refuses numpy versions it does not know with an error of its own choosing.
    except (ImportError, SystemError, RuntimeError) as error:
        return Check("numba", False, str(error).splitlines()[0], enables, fix="pip install numba")
    return Check("numba", True, str(numba.__version__), enables)


def _numba_cache() -> Check:
    folders = _cache_folders()
    usable = next((folder for folder in folders if _writable(folder)), None)
    free = f", {format_bytes(shutil.disk_usage(_existing(usable)).free)} free" if usable else ""
    return Check(
        "cache folder",
        usable is not None,
        f"{usable}{free}" if usable else f"cannot write {folders[0]}",
        "compiled loops are kept between runs",
        fix="set NUMBA_CACHE_DIR to a folder you may write",
    )


def _cache_folders() -> list[Path]:
    """Where numba keeps compiled code, in its own order of preference."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen)]
    spec = importlib.util.find_spec("specpilot_kernels")
    beside = (
        [Path(folder) / "__pycache__" for folder in spec.submodule_search_locations or ()]
        if spec
        else []
    )
    base = os.environ.get("XDG_CACHE_HOME")
    return [*beside, (Path(base) if base else Path.home() / ".cache") / "numba"]


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _writable(folder: Path) -> bool:
    existing = _existing(folder)
    return existing.is_dir() and os.access(existing, os.W_OK)


def _imported(name: str, enables: str, needed_for: tuple[Requirement, ...]) -> Check:
    fix = f"pip install '.[{name}]' in the clone"
    code = f"import {name}; print({name}.__version__)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(name, False, "import did not finish", enables, needed_for, fix)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["import failed"])[-1]
        return Check(name, False, last, enables, needed_for, fix)
    return Check(name, True, done.stdout.strip(), enables, needed_for)


def _package(name: str, enables: str, needed_for: tuple[Requirement, ...], extra: str) -> Check:
    found = _version(name)
    return Check(
        name,
        found is not None,
        found or "not installed",
        enables,
        needed_for,
        None if found else f"pip install '.[{extra}]' in the clone",
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cuda(devices: list[CudaDevice]) -> Check:
    detail = "; ".join(
        f"{d.name}, sm_{d.capability[0]}{d.capability[1]}, {format_bytes(d.memory_bytes)}"
        for d in devices
    )
    return Check(
        "cuda device",
        bool(devices),
        detail or "no device, or no NVIDIA driver",
        "GPU kernels and SGLang",
        ("gpu", "sglang"),
        "run on a machine with an NVIDIA GPU",
    )


def _sglang() -> Check:
    found = _version("sglang")
    lowest, below = (".".join(map(str, v)) for v in (SGLANG_FROM, SGLANG_BELOW))
    fix = f"pip install '.[sglang]' in the clone (sglang>={lowest},<{below})"
    enables = "recipes for real models"
    if found is None:
        return Check("sglang", False, "not installed", enables, ("sglang",), fix)
    ok = SGLANG_FROM <= _release(found) < SGLANG_BELOW
    detail = found if ok else f"{found} is outside the checked range {lowest} to below {below}"
    return Check("sglang", ok, detail, enables, ("sglang",), None if ok else fix)


def _release(text: str) -> tuple[int, ...]:
    """`0.5.23.post1` → (0, 5, 23)."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
