"""Who may use which scratch memory, and how many streams a kernel may run on; without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from specpilot_kernels import launch  # noqa: E402
from specpilot_kernels.w12 import gemm, gemm_mma, gemm_sm90, modules, workspace  # noqa: E402


class Stream:
    """A CUDA stream as far as a pool asks it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.waited_for: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.handle)

    def synchronize(self) -> None:
        """Nothing is under way."""


class Gpu:
    """The current stream, and whether it is being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = [Stream(handle) for handle in range(6)]
        self.current, self.capturing, self.made = self.streams[0], False, 0
        monkeypatch.setattr(launch, "current_stream", lambda device: self.current.handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def allocate(self, device: int) -> int:
        self.made += 1
        return self.made

    def on(self, pool: workspace.Pool[int], handle: int) -> tuple[int, list[int]]:
        """One launch on a stream: its workspace, and the streams that it waited for."""
        self.current = self.streams[handle]
        self.current.waited_for.clear()
        return pool.of_current_stream(0), list(self.current.waited_for)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_every_stream_has_its_own_workspace(gpu: Gpu) -> None:
    pool = workspace.Pool(gpu.allocate)
    found = [gpu.on(pool, handle)[0] for handle in (0, 1, 2, 1, 0)]
    assert found == [1, 2, 3, 2, 1]


def test_any_number_of_streams_without_a_limit(gpu: Gpu) -> None:
    pool = workspace.Pool(gpu.allocate)
    assert not any(gpu.on(pool, handle)[1] for handle in (0, 1, 2, 3, 0))


def test_a_third_stream_waits_for_the_one_that_came_first(gpu: Gpu) -> None:
    pool = workspace.Pool(gpu.allocate, most_streams=2)
    launches = (0, 1, 0, 1, 2, 1, 2, 0, 0, 2, 1)
    waits = [gpu.on(pool, handle)[1] for handle in launches]
    #       two run freely   2 for 0    0 for 1          1 for 2
    assert waits == [[], [], [], [], [0], [], [], [1], [], [], [2]]


def test_at_no_time_do_more_streams_run_than_may(gpu: Gpu) -> None:
    """A stream runs from its launch until another one has waited for it."""
    pool = workspace.Pool(gpu.allocate, most_streams=2)
    running: set[int] = set()
    for step in range(500):
        handle = step * step % 6
        running -= set(gpu.on(pool, handle)[1])
        running.add(handle)
        assert len(running) <= 2


def test_devices_do_not_count_together(gpu: Gpu) -> None:
    pool = workspace.Pool(gpu.allocate, most_streams=2)
    for handle, device in enumerate((0, 0, 1, 1)):
        gpu.current = gpu.streams[handle]
        pool.of_current_stream(device)
        assert gpu.current.waited_for == []


def test_captures_have_spares_and_wait_for_nobody(gpu: Gpu) -> None:
    """An event of a stream outside would break a capture."""
    pool = workspace.Pool(gpu.allocate, most_streams=2)
    pool.warm(0)
    for handle in (1, 2):
        gpu.on(pool, handle)
    gpu.capturing = True
    assert gpu.on(pool, 3)[1] == gpu.on(pool, 4)[1] == []
    with pytest.raises(workspace.NotWarmed, match="no W12 workspace was prepared"):
        gpu.on(pool, 5)


def test_only_the_kernel_whose_blocks_wait_is_held_to_two_streams() -> None:
    assert gemm_sm90.workspaces._most_streams == 2
    assert gemm_mma.workspaces._most_streams is None


@pytest.mark.parametrize("kernel", [gemm_sm90, gemm_mma], ids=["sm90", "mma"])
def test_warming_builds_and_loads_every_variant(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    loaded: list[tuple[object, ...]] = []
    warmed: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(gemm.launch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm.build, "build_all", lambda all_, _: built.extend(m.name for m in all_))
    monkeypatch.setattr(kernel, "launcher", lambda *key: loaded.append(key))
    monkeypatch.setattr(kernel.workspaces, "warm", warmed.append)
    gemm.warm(0, view_only=True, use=kernel)
    assert built == [kernel.variant(rows, view_only=True).name for rows in modules.GEMM_ROWS]
    every = [(0, rows, True, after) for rows in modules.GEMM_ROWS for after in (False, True)]
    assert loaded == every
    assert warmed == [0]
