"""Building a kernel: the cache, its keys, damage, concurrency, and errors a reader can act on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from specpilot_kernels import build, launch
from specpilot_kernels.registry import Entry, KernelModule

_SOURCE = '#include "scale.cuh"\nextern "C" __global__ void scale(float* x) { *x *= SCALE; }\n'

MODULE = KernelModule("scale", "scale.cu", (Entry("scale", "P", 32),), ("sm_80", "sm_90"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with one kernel, and an empty cache beside it."""
    try:
        build.compiler_version()
    except build.MissingGpuPackage as error:
        pytest.skip(f"kernels were not compiled: {error}")
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "scale.cu").write_text(_SOURCE, encoding="utf-8")
    (folder / "scale.cuh").write_text("#define SCALE 2.0f\n", encoding="utf-8")
    monkeypatch.setattr(build, "_PACKAGE", folder)
    monkeypatch.setenv("SPECPILOT_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one architecture with every real compilation."""
    seen: list[str] = []
    real = build.compile_module

    def counted(module: KernelModule, architecture: str) -> build.Binary:
        seen.append(architecture)
        return real(module, architecture)

    monkeypatch.setattr(build, "compile_module", counted)
    return seen


def _files() -> list[Path]:
    return sorted(build.cache_folder().iterdir())


def test_second_build_reads_the_cache(package: Path, compilations: list[str]) -> None:
    first = build.build(MODULE, "sm_90")
    assert build.build(MODULE, "sm_90") == first
    assert compilations == ["sm_90"]
    (file,) = _files()
    assert file.name.startswith("scale.sm_90.")


def test_each_architecture_is_its_own(package: Path, compilations: list[str]) -> None:
    cubins = {build.build(MODULE, name).cubin for name in ("sm_80", "sm_90")}
    assert len(cubins) == 2
    assert compilations == ["sm_80", "sm_90"]


@pytest.mark.parametrize("file", ["scale.cu", "scale.cuh"])
def test_a_changed_file_is_built_again(package: Path, compilations: list[str], file: str) -> None:
    build.build(MODULE, "sm_80")
    with (package / file).open("a", encoding="utf-8") as stream:
        stream.write("// changed\n")
    build.build(MODULE, "sm_80")
    assert len(compilations) == 2


def test_macros_reach_the_compiler_and_the_key(package: Path, compilations: list[str]) -> None:
    (package / "scale.cuh").write_text("", encoding="utf-8")
    cubins = {
        build.build(replace(MODULE, macros=(("SCALE", value),)), "sm_80").cubin
        for value in ("2.0f", "3.0f")
    }
    assert len(cubins) == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not a header"])
def test_a_damaged_file_is_built_again(package: Path, compilations: list[str], damage: str) -> None:
    sound = build.build(MODULE, "sm_80")
    (file,) = _files()
    content = file.read_bytes()
    file.write_bytes(
        {
            "truncated": content[:-7],
            "flipped": content[:-50] + bytes([content[-50] ^ 1]) + content[-49:],
            "empty": b"",
            "not a header": b"[]\n" + content,
        }[damage]
    )
    assert build.build(MODULE, "sm_80") == sound
    assert len(compilations) == 2
    assert file.read_bytes() == content


def test_threads_compile_once(package: Path, compilations: list[str]) -> None:
    found: list[build.Binary] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.build(MODULE, "sm_80")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(binary == found[0] for binary in found)
    assert compilations == ["sm_80"]
    assert len(_files()) == 1


def test_a_cache_that_cannot_be_written_costs_a_warning(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SPECPILOT_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="compiled kernel not kept"):
        assert build.build(MODULE, "sm_80").cubin


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECPILOT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build.cache_folder() == Path(os.environ["HOME"]) / ".cache/specpilot/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "specpilot/kernels"
    monkeypatch.setenv("SPECPILOT_CACHE", str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own/kernels"


def test_an_error_shows_the_compilers_log(package: Path) -> None:
    (package / "scale.cu").write_text("int broken = ;\n", encoding="utf-8")
    with pytest.raises(build.KernelBuildError, match=r"(?s)scale does not compile.*scale\.cu\(1\)"):
        build.build(MODULE, "sm_80")
    assert not build.cache_folder().exists()


def test_a_missing_entry_point_is_named(package: Path) -> None:
    module = replace(MODULE, entries=(*MODULE.entries, Entry("absent", "P", 32)))
    with pytest.raises(build.KernelBuildError, match="defines no kernel absent"):
        build.build(module, "sm_80")


def test_the_compilers_log_is_not_needed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = build.build(MODULE, "sm_80")
    monkeypatch.setattr(build, "_text", lambda *_: "")
    assert build.compile_module(MODULE, "sm_80") == expected
    assert expected.usage["scale"].registers > 0


def test_code_without_usage_is_no_success(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build._bytes
    # Without its name, the section with the attributes of all kernels is not found.
    monkeypatch.setattr(build, "_bytes", lambda *a: real(*a).replace(b".nv.info\0", b".nv.none\0"))
    with pytest.raises(build.KernelBuildError, match="no registers or stack frame for scale"):
        build.build(MODULE, "sm_80")
    assert not build.cache_folder().exists()


def test_a_cached_file_without_usage_is_built_again(package: Path) -> None:
    sound = build.build(MODULE, "sm_80")
    (file,) = _files()
    head, _, cubin = file.read_bytes().partition(b"\n")
    damaged = cubin.replace(b".nv.info\0", b".nv.none\0")
    header = json.loads(head) | {"sha256": hashlib.sha256(damaged).hexdigest()}
    file.write_bytes(json.dumps(header).encode() + b"\n" + damaged)
    assert build.build(MODULE, "sm_80") == sound


@pytest.mark.parametrize(
    ("version", "passed"), [((12, 6), False), ((12, 9), True), ((13, 0), True), ((13, 5), True)]
)
def test_the_compilers_own_cache_is_off_where_it_has_one(
    package: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], passed: bool
) -> None:
    real, seen = build._nvrtc(), []

    class Recorder:
        nvrtcVersion = staticmethod(lambda: (real.nvrtcResult.NVRTC_SUCCESS, *version))

        def nvrtcCompileProgram(self, program: object, count: int, options: list[bytes]) -> object:
            seen.extend(options)
            assert count == len(options)
            return real.nvrtcCompileProgram(program, count, options)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    recorder = Recorder()
    monkeypatch.setattr(build, "_nvrtc", lambda: recorder)
    build.compile_module(MODULE, "sm_80")
    assert (b"--no-cache" in seen) is passed


def test_missing_bindings_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    build._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(build.MissingGpuPackage, match=r"pip install 'specpilot\[gpu\]'"):
        build.compiler_version()


@pytest.mark.parametrize(
    ("offered", "capability", "chosen"),
    [
        (("sm_80", "sm_90", "sm_90a"), (9, 0), "sm_90a"),
        (("sm_80", "sm_90"), (8, 9), "sm_80"),
        (("sm_80", "sm_89", "sm_90"), (8, 9), "sm_89"),
        (("sm_80", "sm_89"), (8, 6), "sm_80"),
        (("sm_100", "sm_120a"), (12, 0), "sm_120a"),
        (("sm_100",), (10, 3), "sm_100"),
    ],
)
def test_choice_of_architecture(
    offered: tuple[str, ...], capability: tuple[int, int], chosen: str
) -> None:
    assert build.architecture_for(replace(MODULE, architectures=offered), capability) == chosen


@pytest.mark.parametrize(
    ("offered", "capability"),
    [(("sm_80", "sm_90"), (7, 5)), (("sm_90a",), (9, 1)), (("sm_80",), (12, 0))],
)
def test_an_unsupported_gpu_is_named(offered: tuple[str, ...], capability: tuple[int, int]) -> None:
    module = replace(MODULE, architectures=offered)
    with pytest.raises(build.UnsupportedGpu, match=rf"{capability[0]}\.{capability[1]}"):
        build.architecture_for(module, capability)


def test_parameters_are_laid_out_as_in_c() -> None:
    assert launch.parameter_offsets("PiqI128sQf") == [0, 8, 16, 24, 28, 160, 168]
    assert launch.parameter_sizes("PiqI128sQf") == [8, 4, 8, 4, 128, 8, 4]


def test_without_a_device_the_gpu_codec_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    import numpy as np

    from specpilot_kernels.w12 import gpu_codec

    for call in (gpu_codec.require_gpu, lambda: gpu_codec.encode(np.zeros((2, 2), np.uint16))):
        with pytest.raises(gpu_codec.GpuUnavailable, match="no CUDA device"):
            call()


def test_one_class_holds_every_error_of_the_machine() -> None:
    pytest.importorskip("torch")
    from specpilot_kernels.w12 import gpu_codec

    errors = (
        build.KernelBuildError, build.MissingGpuPackage, build.UnsupportedGpu,
        launch.CudaError, launch.NoCudaDevice, gpu_codec.GpuMemoryError,
    )  # fmt: skip
    assert all(issubclass(error, gpu_codec.GpuError) for error in errors)
    assert not issubclass(gpu_codec.GpuError, ValueError)  # that is a fault of the input


def test_too_little_gpu_memory_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import numpy as np

    from specpilot_kernels.w12 import gpu_codec

    def full(array: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB. If reserved memory is large")

    monkeypatch.setattr(launch, "capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_codec, "_to_device", full)
    bits = np.zeros((2, 2), np.uint16)
    for call in (gpu_codec.encode, gpu_codec.survey):
        with pytest.raises(gpu_codec.GpuMemoryError, match=r"memory: CUDA.*Tried 2 GiB\.$"):
            call(bits)


def test_an_empty_compiler_log_changes_no_byte_of_the_interpreter(
    package: Path, compilations: list[str]
) -> None:
    """NVRTC writes where it is told: once into the one object that Python has for b" "."""
    build.build(MODULE, "sm_90")
    assert compilations == ["sm_90"]
    every = bytes(range(256))
    assert [every[i : i + 1][0] for i in range(256)] == list(range(256))
