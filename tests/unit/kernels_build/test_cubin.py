"""What is read from a cubin is what the assembler reports, and damage is an error."""

from __future__ import annotations

import re

import pytest

from specpilot_kernels import build
from specpilot_kernels.cubin import NotACubin, Usage, kernel_usage

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")

# More values that live across a barrier than `compile_with_log` allows registers.
_SPILL = (
    "".join(f"float v{i} = p[{i} * n]; " for i in range(96))
    + "__syncthreads(); "
    + "".join(f"p[{i} * n + 1] = v{i} * v{95 - i}; " for i in range(96))
)
SOURCE = f"""
extern "C" __global__ void plain(float* p) {{ *p *= 2; }}

extern "C" __global__ void shared(float* p)
{{
    __shared__ float s[300];
    s[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    *p = s[299 - threadIdx.x];
}}

__device__ __noinline__ float pick(const float* p, int n)
{{
    float l[40];
    for (int i = 0; i < 40; ++i)
        l[i] = p[i * 3];
    return l[n] + l[n + 1];
}}
extern "C" __global__ void calls(float* p, int n) {{ *p = pick(p, n); }}

extern "C" __global__ void spills(float* p, int n) {{ {_SPILL} }}

template <int N> __global__ void generic(float* p) {{ *p += N; }}
template __global__ void generic<1>(float*);
"""


def compile_with_log(architecture: str) -> tuple[bytes, str]:
    """The machine code of SOURCE and the compiler's log with the assembler's report."""
    nvrtc = build._nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"source.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--ptxas-options=-v", b"--no-cache"]
    options.append(b"--maxrregcount=32")
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = build._text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log
    return build._bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log


def reported(log: str) -> dict[str, Usage]:
    """The assembler's report on each kernel."""
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        numbers = [
            re.search(pattern, part)
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes cumulative stack",
                r"(\d+) bytes smem",
            )
        ]
        found[name] = Usage(*(int(number[1]) if number else 0 for number in numbers))
    return found


@pytest.fixture(scope="module")
def cubin() -> bytes:
    """SOURCE for sm_90a."""
    _skip_without_compiler()
    return compile_with_log("sm_90a")[0]


def _skip_without_compiler() -> None:
    try:
        build.compiler_version()
    except build.MissingGpuPackage as error:
        pytest.skip(f"kernels were not compiled: {error}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_usage_is_the_assemblers_report(architecture: str) -> None:
    _skip_without_compiler()
    cubin, log = compile_with_log(architecture)
    usage = kernel_usage(cubin)
    assert usage == reported(log)
    assert set(usage) == {"plain", "shared", "calls", "spills", "_Z7genericILi1EEvPf"}
    assert usage["shared"].shared_bytes == 1200
    assert usage["calls"].stack_bytes >= 160  # the callee's array
    assert usage["spills"].registers == 32
    assert usage["spills"].stack_bytes > 0


def test_every_cut_is_an_error_or_harmless(cubin: bytes) -> None:
    whole = kernel_usage(cubin)
    for size in range(0, len(cubin), 97):
        try:
            found = kernel_usage(cubin[:size])
        except NotACubin:
            continue
        assert found == whole  # only what does not matter here was cut off


def test_no_kernel_of_another_file(cubin: bytes) -> None:
    for wrong in (b"", b"\x7fELF", b"// PTX text", cubin[1:]):
        with pytest.raises(NotACubin):
            kernel_usage(wrong)
