"""Compile a `.cu` file of this package to machine code with NVRTC, and keep the result on disk.

No nvcc and no GPU are needed: `build(module, "sm_90a")` works on any machine with the packages of
the `gpu` extra. The compiled code lies in `$SPECPILOT_CACHE/kernels`, else in
`$XDG_CACHE_HOME/specpilot/kernels`, else in `~/.cache/specpilot/kernels`, one file per key. The
key is the hash of the source, of every file it includes by "...", of the options, of the
compiler's version and of the CUDA headers' version, so a stale file is never read. Files are
written beside and renamed, and carry a hash of their content: processes may build the same kernel
at once, and a damaged file is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specpilot_kernels.cubin import NotACubin, Usage, kernel_usage
from specpilot_kernels.registry import KernelModule

_PACKAGE = Path(__file__).resolve().parent
_FILE_FORMAT = 2
_BUILD_THREADS = 8
_INSTALL = "pip install 'specpilot[gpu]'"
_TOOLKIT = ("CUDA_HOME", "CUDA_PATH")
_FIRST_WITH_CACHE = (12, 9)
"""Older versions of NVRTC have no cache of their own, and refuse the option that turns it off."""
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)

_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


class GpuError(RuntimeError):
    """The GPU, its driver or its compiler cannot do the work; base of the errors of this kind."""


class KernelBuildError(GpuError):
    """A kernel could not be compiled; the message ends with the compiler's log."""


class GpuUnavailable(GpuError):
    """This machine cannot run the package's kernels; the message says what it lacks."""


class MissingGpuPackage(GpuUnavailable):
    """A Python package or library that compiling or launching needs is not installed."""


class UnsupportedGpu(GpuUnavailable):
    """No architecture of the module runs on this compute capability."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled module: its machine code and what each kernel in it takes."""

    architecture: str
    cubin: bytes
    usage: Mapping[str, Usage]


def build(module: KernelModule, architecture: str) -> Binary:
    """Return `module` compiled for `architecture` (such as "sm_90a"), from the cache if possible.

    KernelBuildError with the compiler's log if the source does not compile; MissingGpuPackage if
    NVRTC is not installed. Safe to call from several threads and processes.
    """
    key = _key(module, architecture)
    path = cache_folder() / f"{module.name}.{architecture}.{key[:32]}.cubin"
    with _locks[key]:
        stored = _read(path, key)
        if stored is not None:
            return stored
        binary = compile_module(module, architecture)
        _write(path, key, binary)
        return binary


def build_all(modules: Sequence[KernelModule], capability: tuple[int, int]) -> None:
    """Build modules for a GPU of `capability` (major, minor), several at once; see `build`."""
    with ThreadPoolExecutor(_BUILD_THREADS) as pool:
        list(pool.map(lambda module: build(module, architecture_for(module, capability)), modules))


def architecture_for(module: KernelModule, capability: tuple[int, int]) -> str:
    """Return the best of the module's architectures for a GPU of `capability` (major, minor).

    An exact match with a suffix ("sm_90a") is best, then an exact plain one, then the highest
    lower minor version of the same major one. UnsupportedGpu if there is none.
    """
    major, minor = capability
    ranked: list[tuple[int, bool, str]] = []
    for name in module.architectures:
        found = re.fullmatch(r"sm_(\d+)(\d)([af]?)", name)
        if found is None:
            raise ValueError(f"{module.name}: {name!r} is not an architecture")
        its_minor, special = int(found[2]), bool(found[3])
        if int(found[1]) == major and (its_minor == minor or (its_minor < minor and not special)):
            ranked.append((its_minor, special, name))
    if not ranked:
        raise UnsupportedGpu(
            f"kernel {module.name} does not run on compute capability {major}.{minor}; "
            f"it is written for {', '.join(module.architectures)}"
        )
    return max(ranked)[2]


def cache_folder() -> Path:
    """Return the folder of compiled kernels; it may not exist yet."""
    chosen = os.environ.get("SPECPILOT_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specpilot" / "kernels"


def compiler_version() -> str:
    """Return NVRTC's version, such as "13.0"; MissingGpuPackage if it is not installed."""
    major, minor = _nvrtc_version()
    return f"{major}.{minor}"


def compile_module(module: KernelModule, architecture: str) -> Binary:
    """Compile without looking at the cache; errors as in `build`."""
    nvrtc = _nvrtc()
    source = _PACKAGE / module.source
    options = [*_options(module, architecture), f"-I{source.parent}", f"-I{_PACKAGE}"]
    if _nvrtc_version() >= _FIRST_WITH_CACHE:
        options.append("--no-cache")  # one cache is enough, and this one checks what it reads
    headers = _cuda_headers()
    if headers is not None:
        options.append(f"-I{headers}")
    status, program = nvrtc.nvrtcCreateProgram(
        source.read_bytes(), module.source.encode(), 0, [], []
    )
    _require(nvrtc, status, module, architecture)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            hint = "" if headers else f"\nthe CUDA headers were not found: {_INSTALL}"
            raise KernelBuildError(
                f"kernel {module.name} does not compile for {architecture}:\n{log.strip()}{hint}"
            )
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    try:
        usage = kernel_usage(cubin)
    except NotACubin as error:
        raise KernelBuildError(f"{module.source} for {architecture}: {error}") from error
    missing = {entry.name for entry in module.entries} - usage.keys()
    if missing:
        raise KernelBuildError(f"{module.source} defines no kernel {', '.join(sorted(missing))}")
    return Binary(architecture, cubin, usage)


def _options(module: KernelModule, architecture: str) -> list[str]:
    """Options that decide the machine code; include paths are not among them."""
    return [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "-lineinfo",
        *(f"-D{name}={value}" for name, value in module.macros),
    ]


def _key(module: KernelModule, architecture: str) -> str:
    identity = {
        "format": _FILE_FORMAT,
        "sources": _source_hashes(_PACKAGE / module.source),
        "options": _options(module, architecture),
        "nvrtc": compiler_version(),
        "headers": _cuda_header_version(),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _source_hashes(source: Path) -> dict[str, str]:
    """sha256 of a source and of all it includes by "...", by path relative to the package."""
    hashes: dict[str, str] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        name = os.path.relpath(path, _PACKAGE)
        if name in hashes:
            continue
        content = path.read_bytes()
        hashes[name] = hashlib.sha256(content).hexdigest()
        for included in _INCLUDE.findall(content.decode()):
            places = (path.parent / included, source.parent / included, _PACKAGE / included)
            pending += [place.resolve() for place in places if place.is_file()][:1]
    return hashes


def _read(path: Path, key: str) -> Binary | None:
    """Return the cached binary, or None if the file is absent, damaged or of another key."""
    try:
        head, _, cubin = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if header["key"] != key or header["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        return Binary(header["architecture"], cubin, kernel_usage(cubin))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, key: str, binary: Binary) -> None:
    header = {
        "key": key,
        "sha256": hashlib.sha256(binary.cubin).hexdigest(),
        "architecture": binary.architecture,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(json.dumps(header).encode() + b"\n" + binary.cubin)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:  # a full or read-only disk costs time, not the kernel
        warnings.warn(f"compiled kernel not kept in {path.parent}: {error}", stacklevel=3)


@cache
def _nvrtc() -> Any:
    """The NVRTC bindings, once it is sure that the library behind them loads."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingGpuPackage(f"cuda-bindings is not installed: {_INSTALL}") from error
    try:
        status, *_ = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there, the library is not
        raise MissingGpuPackage(f"nvidia-cuda-nvrtc is not installed: {_INSTALL}") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"NVRTC does not start: {status.name}")
    return nvrtc


def _nvrtc_version() -> tuple[int, int]:
    _, major, minor = _nvrtc().nvrtcVersion()
    return major, minor


@cache
def _cuda_headers() -> Path | None:
    """The folder with `cuda_bf16.h`, or None; only sources that include such headers need it."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        found = None
    else:
        found = find_nvidia_header_directory("cudart")
    candidates = [found, *(f"{os.environ[v]}/include" for v in _TOOLKIT if v in os.environ)]
    for folder in candidates:
        if folder and (Path(folder) / "cuda_runtime_api.h").is_file():
            return Path(folder)
    return None


@cache
def _cuda_header_version() -> str | None:
    folder = _cuda_headers()
    if folder is None:
        return None
    text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return found[1] if found else None


def _require(nvrtc: Any, status: Any, module: KernelModule, architecture: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"kernel {module.name} for {architecture}: NVRTC {status.name}")


def _bytes(size_of: Any, fill: Any, program: Any) -> bytes:
    _, size = size_of(program)
    # Not `bytes`: Python keeps one object for each single byte, and an empty log is one byte long.
    content = bytearray(size)
    fill(program, content)
    return bytes(content)


def _text(size_of: Any, fill: Any, program: Any) -> str:
    return _bytes(size_of, fill, program).rstrip(b"\0").decode(errors="replace")
