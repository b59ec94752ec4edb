"""Every registered kernel compiles for every architecture, without spills and within its limits."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from specpilot_kernels import build, registry
from specpilot_kernels.registry import KernelModule

# Most shared memory of one block, in bytes: CUDA's limits by compute capability.
_SHARED_LIMIT = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}

_CASES = [
    pytest.param(module, architecture, id=f"{module.name}-{architecture}")
    for module in registry.all_modules()
    for architecture in module.architectures
]


@pytest.fixture(scope="module")
def _compiler() -> None:
    try:
        build.compiler_version()
    except build.MissingGpuPackage as error:
        pytest.skip(f"kernels were not compiled: {error}")


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(("module", "architecture"), _CASES)
def test_kernel_compiles_within_its_limits(module: KernelModule, architecture: str) -> None:
    binary = build.build(module, architecture)
    assert binary.cubin[:4] == b"\x7fELF"
    for entry in module.entries:
        usage = binary.usage[entry.name]
        assert usage.stack_bytes == 0  # spilled registers would be in it
        assert 0 < usage.registers <= entry.max_registers
        number = re.sub(r"\D", "", architecture)
        assert usage.shared_bytes <= _SHARED_LIMIT[number] * 1024


def test_names_are_unique_and_sources_exist() -> None:
    modules = registry.all_modules()
    assert modules
    assert max(Counter(module.name for module in modules).values()) == 1
    package = Path(registry.__file__).parent
    for module in modules:
        assert (package / module.source).is_file()
        assert module.architectures


def test_every_cuda_source_is_registered() -> None:
    package = Path(registry.__file__).parent
    sources = {path.relative_to(package).as_posix() for path in package.rglob("*.cu")}
    assert sources == {module.source for module in registry.all_modules()}
