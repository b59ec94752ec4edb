"""Compiles a CUDA kernel as C++ with the emulator of one CTA."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from specpilot_kernels import registry

_PACKAGE = Path(registry.__file__).parent
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ [^{;]*\{.*?^\}\n",
    re.DOTALL | re.MULTILINE,
)
_DYNAMIC = re.compile(r"extern __shared__ [^\n]* (\w+)\[\];")


def compile_kernel(module: registry.KernelModule, driver: str, folder: Path) -> ctypes.CDLL:
    """Compile the kernel without its helpers in PTX, which the emulator has."""
    source = "".join(_with_includes(_PACKAGE / module.source, set()))
    source = _FUNCTION.sub(
        lambda found: "" if "asm" in found[0] or "__cvta" in found[0] else found[0], source
    )
    assert "asm" not in source
    source = _DYNAMIC.sub(r"u8* \1 = ::shared;", source)
    path = folder / f"{module.name}.cpp"
    path.write_text(driver.replace("KERNEL", f"namespace {{\n{source}\n}}"))
    library = folder / f"{module.name}.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off",
         "-fno-strict-aliasing", "-fno-gnu-unique", f"-I{Path(__file__).parent}",
         *(f"-D{name}={value}" for name, value in module.macros), str(path), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def _with_includes(path: Path, seen: set[Path]) -> Iterator[str]:
    """A source with every file it includes, once, in its place."""
    seen.add(path)
    text, end = path.read_text().replace("#pragma once\n", ""), 0
    for found in _INCLUDE.finditer(text):
        yield text[end : found.start()]
        end = found.end()
        beside = path.parent / found[1]
        included = beside if beside.is_file() else _PACKAGE / found[1]
        if included not in seen:
            yield from _with_includes(included, seen)
    yield text[end:]
