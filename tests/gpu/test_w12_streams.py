"""The W12 product in CUDA graphs, on several streams, and under torch.compile."""

from __future__ import annotations

from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")

from w12_cases import exact, inputs, same_bits  # noqa: E402

from specpilot_kernels.w12 import gemm, gemm_sm90, ops, selfcheck, workspace  # noqa: E402
from specpilot_kernels.w12.linear import W12Linear, w12_linear  # noqa: E402
from specpilot_kernels.w12.weight import W12Weight  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel")]

Layers = list[W12Weight]


@pytest.fixture(scope="module")
def layers() -> Layers:
    """Weights that can follow each other: shared tiles, whole tiles, both; one with escapes."""
    wide = selfcheck.normal_weights((18000, 1024))
    wide[::9, ::57] = 0
    back = selfcheck.normal_weights((1024, 18000), seed=2)
    return [exact(wide), exact(back), exact(selfcheck.normal_weights((5120, 1024), seed=3))]


def chain(x: torch.Tensor, layers: Layers, *, dependent: bool) -> torch.Tensor:
    """Every layer three times, each on the result of the one before; results around 1."""
    wide, back, last = layers
    for _ in range(3):
        x = w12_linear(w12_linear(x, wide, dependent=dependent), back, dependent=dependent)
        x = x * 0.5
    return w12_linear(x, last, dependent=dependent)


@pytest.mark.parametrize("rows", [1, 12, 64, 100])
@pytest.mark.parametrize("dependent", [True, False], ids=["dependent", "plain"])
def test_a_replayed_graph_gives_the_eager_result(
    layers: Layers, rows: int, dependent: bool
) -> None:
    gemm.warm()
    x = inputs(rows, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, layers, dependent=dependent)
    for seed in range(20):
        x.copy_(inputs(rows, 1024, seed=seed))
        out.fill_(torch.nan)
        graph.replay()
        assert same_bits(out, chain(x, layers, dependent=not dependent))


def test_streams_do_not_disturb_each_other(layers: Layers) -> None:
    gemm.warm()
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [inputs(rows, 1024, seed=rows) for rows in (3, 50)]
    expected = [chain(x, layers, dependent=False) for x in xs]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(30):
        for stream, x, found in zip(streams, xs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(chain(x, layers, dependent=True))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert all(same_bits(result, wanted) for result in found)


def test_more_streams_than_fit_on_a_gpu_take_turns(layers: Layers) -> None:
    """Kernels of which each waits for its own blocks: three at once could wait for ever."""
    gemm.warm()
    streams = [torch.cuda.Stream() for _ in range(5)]
    x = inputs(5, 1024)
    expected = chain(x, layers, dependent=False)
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(chain(x, layers, dependent=True))
    torch.cuda.synchronize()
    assert all(same_bits(result, expected) for result in found)


def test_a_graph_beside_eager_calls(layers: Layers) -> None:
    gemm.warm()
    x, other = inputs(4, 1024), inputs(33, 1024)
    expected = chain(x, layers, dependent=True), chain(other, layers, dependent=True)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        out = chain(x, layers, dependent=True)
    torch.cuda.synchronize()
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(stream):
            beside = chain(other, layers, dependent=True)
        torch.cuda.synchronize()
        assert same_bits(out, expected[0])
        assert same_bits(beside, expected[1])


def test_a_capture_without_a_workspace_says_what_to_do(
    layers: Layers, kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm.warm()
    monkeypatch.setattr(kernel, "workspaces", workspace.Pool(kernel._allocate, most_streams=2))
    x = inputs(1, 1024)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(workspace.NotWarmed, match="warm"), torch.cuda.graph(graph):
        w12_linear(x, layers[0])


def test_workspaces_are_left_as_they_were_found(layers: Layers, kernel: ModuleType) -> None:
    for rows in (1, 12, 30, 48, 64):
        chain(inputs(rows, 1024), layers, dependent=True)
    torch.cuda.synchronize()
    used = kernel.workspaces.of_current_stream(torch.cuda.current_device())
    if kernel is gemm_sm90:
        assert (used.partials == -1).all()
        assert (used.issuing == 0).all()
    else:
        assert (used.arrivals == 0).all()


@pytest.mark.parametrize("rows", [1, 33, 100])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_opcheck(layers: Layers, rows: int, bias: bool) -> None:
    weight = layers[2]
    some = torch.ones(5120, dtype=torch.bfloat16, device="cuda") if bias else None
    arguments = (inputs(rows, 1024), ops.tensors_of(weight), some, 5120)
    torch.library.opcheck(torch.ops.specpilot.w12_linear.default, arguments)
    torch.library.opcheck(torch.ops.specpilot.w12_linear_view.default, arguments)


def test_compiled_layers_give_the_eager_result(layers: Layers) -> None:
    modules = torch.nn.Sequential(*(W12Linear(weight) for weight in layers[:2]))
    compiled = torch.compile(modules, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (1, 8, 70):
        x = inputs(rows, 1024)
        assert same_bits(compiled(x), modules(x))


def test_a_call_on_tensors_seen_before_makes_no_tensor_map(
    layers: Layers, kernel: ModuleType
) -> None:
    if kernel is not gemm_sm90:
        pytest.skip("only the Hopper kernel has tensor maps")
    x = inputs(1, 1024)
    out = torch.empty((1, 5120), dtype=torch.bfloat16, device="cuda")
    gemm.gemm(x, layers[2], out=out)
    before = gemm_sm90._tensor_map.cache_info()
    for _ in range(100):
        gemm.gemm(x, layers[2], out=out)
    after = gemm_sm90._tensor_map.cache_info()
    assert after.misses == before.misses
    assert after.hits - before.hits == 100
