"""What the host gives to the kernels, and the operators with the kernel replaced."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from w12_cases import exact, normal, same_bits  # noqa: E402

from specpilot_kernels.build import UnsupportedGpu  # noqa: E402
from specpilot_kernels.w12 import (  # noqa: E402
    gemm,
    gemm_mma,
    gemm_sm90,
    modules,
    ops,
    plans,
    prefill,
    reference_gemm,
    workspace,
)
from specpilot_kernels.w12.linear import W12Linear, w12_linear  # noqa: E402

BF16 = torch.bfloat16
SOURCES = Path(gemm_sm90.__file__).parent / "csrc"
HOPPER, PORTABLE = SOURCES / "gemm_sm90_work.cuh", SOURCES / "gemm_mma.cu"


def struct_fields(source: Path = HOPPER) -> list[tuple[str, str]]:
    """(struct code, name) of each field of `struct Params` in a source."""
    body = re.search(r"struct Params \{(.*?)\n\};", source.read_text("utf-8"), re.DOTALL)
    assert body
    found = re.findall(r"^  ([\w ]+?)\s*(\*?)\s*(\w+);", body[1], re.MULTILINE)
    codes = {"int": "i", "long long": "q"}
    return [("P" if star else codes[kind], name) for kind, star, name in found]


def test_parameters_are_packed_as_the_source_declares_them() -> None:
    codes = "".join(code for code, _ in struct_fields())
    assert codes == "P" * 9 + "q" + "i" * 9
    packed = struct.calcsize(modules.GEMM_SM90_PARAMS)
    assert packed == struct.calcsize("@" + codes + "0q")
    assert all(m.entries[0].signature == f"128s{packed}s" for m in modules.gemm_sm90_modules())
    codes = "".join(code for code, _ in struct_fields(PORTABLE))
    assert "@" + re.sub(r"(.)\1+", lambda run: f"{len(run[0])}{run[1]}", codes) == (
        modules.GEMM_MMA_PARAMS
    )
    assert struct.calcsize(modules.GEMM_MMA_PARAMS) % 8 == 0


def test_rings_fill_the_shared_memory_of_half_an_sm() -> None:
    stages = {rows: modules.gemm_sm90_stages(rows, view_only=False) for rows in modules.GEMM_ROWS}
    assert stages == {8: 8, 16: 7, 32: 6, 48: 5, 64: 5}
    for rows in modules.GEMM_ROWS:
        for view_only in (False, True):
            used = modules.gemm_sm90_shared_bytes(rows, view_only=view_only)
            assert 100 * 1024 < used <= 112 * 1024
            used = modules.gemm_mma_shared_bytes(rows, view_only=view_only)
            assert 80 * 1024 < used <= 99 * 1024 - 128


@dataclass
class Recorder:
    """Stands for the launcher, the tensor map encoder and the workspace."""

    source: Path = HOPPER
    packing: str = modules.GEMM_SM90_PARAMS
    grid: tuple[int, ...] = ()
    params: dict[str, int] = field(default_factory=dict)
    tensor_map: tuple[int, ...] = ()
    variant: tuple[Any, ...] = ()

    def launcher(self, *variant: Any) -> Any:
        self.variant = variant

        def call(grid: tuple[int, ...], *arguments: bytes) -> None:
            values = struct.unpack(self.packing, arguments[-1])
            names = (name for _, name in struct_fields(self.source))
            self.params = dict(zip(names, values, strict=True))
            self.grid = grid

        return call

    def encode(self, *arguments: int) -> bytes:
        self.tensor_map = arguments
        return bytes(128)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The launch path on CPU tensors, as far as the driver."""
    found = Recorder()
    some = torch.zeros(1, dtype=torch.int32)
    scratch = gemm_sm90.Workspace(some, some, some)
    monkeypatch.setattr(gemm_sm90, "launcher", found.launcher)
    monkeypatch.setattr(gemm_sm90, "_tensor_map", found.encode)
    monkeypatch.setattr(gemm_sm90.workspaces, "of_current_stream", lambda device: scratch)
    monkeypatch.setattr(workspace, "multiprocessors", lambda device: 132)
    return found


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The same for the portable kernel."""
    found = Recorder(PORTABLE, modules.GEMM_MMA_PARAMS)
    some = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(gemm_mma, "launcher", found.launcher)
    scratch = gemm_mma.Workspace(some, some)
    monkeypatch.setattr(gemm_mma.workspaces, "of_current_stream", lambda device: scratch)
    monkeypatch.setattr(workspace, "multiprocessors", lambda device: 132)
    return found


def test_a_launch_passes_the_split_and_the_pointers(recorder: Recorder) -> None:
    weight = exact(normal(torch.Generator().manual_seed(1), 5000, 640))
    x, out = torch.zeros((20, 640), dtype=BF16), torch.zeros((20, 6000), dtype=BF16)[:, 8:5008]
    bias = torch.zeros(5000, dtype=BF16)
    gemm_sm90.gemm(x, weight, bias, out)
    p = recorder.params
    assert recorder.grid == (132, 1, 1)
    assert (p["workers"], p["split_tiles"], p["share"], p["longer"], p["whole_tiles"]) == (
        120, 40, 3, 40, 0,
    )  # fmt: skip
    assert (p["rows"], p["channels"], p["blocks"], p["y_stride"]) == (20, 5000, 10, 6000)
    assert p["linger"] > 0
    for name in ("records", "scale", "escape_ptr", "escapes"):
        assert p[name] == getattr(weight, name).data_ptr()
    assert (p["bias"], p["y"]) == (bias.data_ptr(), out.data_ptr())
    assert recorder.variant == (None, 32, False, True, False)
    gemm_sm90.gemm(x, weight, None, out, dependent=False, view_only=True)
    assert recorder.grid == (120, 1, 1)
    assert (recorder.params["linger"], recorder.params["bias"]) == (0, 0)
    assert recorder.variant == (None, 32, True, False, False)


def test_a_portable_launch_passes_the_split_and_the_pointers(
    portable: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = exact(normal(torch.Generator().manual_seed(1), 5000, 643))
    x, out = torch.zeros((20, 643), dtype=BF16), torch.zeros((20, 6000), dtype=BF16)[:, 8:5008]
    bias = torch.zeros(5000, dtype=BF16)
    gemm_mma.gemm(x, weight, bias, out, view_only=True)
    p = portable.params
    assert portable.grid == (132, 1, 1)
    assert (p["blocks"], p["share"], p["longer"]) == (11, 440 // 132, 440 % 132)
    assert (p["rows"], p["inputs"], p["channels"], p["y_stride"]) == (20, 643, 5000, 6000)
    assert (p["x_stride"], p["x"] % 16) == (648, 0)
    assert p["x"] != x.data_ptr()  # rows of 1286 bytes cannot be read as they are
    for name in ("records", "scale", "escape_ptr", "escapes"):
        assert p[name] == getattr(weight, name).data_ptr()
    assert (p["bias"], p["y"]) == (bias.data_ptr(), out.data_ptr())
    assert portable.variant == (None, 32, True, True)
    gemm_mma.gemm(x[:1, :640], exact(normal(torch.Generator().manual_seed(1), 40, 640)), None,
                  out[:1, :40], dependent=False)  # fmt: skip
    assert (portable.params["x"], portable.params["bias"]) == (x.data_ptr(), 0)
    assert portable.variant == (None, 8, False, False)
    monkeypatch.setattr(gemm_mma, "_MOST_TILES", 39)
    with pytest.raises(ValueError, match="4992 channels"):
        gemm_mma.gemm(x, weight, bias, out)


@pytest.mark.parametrize(
    ("capability", "module"),
    [((8, 0), gemm_mma), ((8, 6), gemm_mma), ((8, 9), gemm_mma), ((9, 0), gemm_sm90),
     ((10, 0), gemm_mma), ((12, 0), gemm_mma), ((12, 1), gemm_mma)],
)  # fmt: skip
def test_hopper_has_a_kernel_of_its_own_and_others_the_portable_one(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], module: Any
) -> None:
    monkeypatch.setattr(gemm.launch, "capability", lambda device: capability)
    assert gemm.kernel.__wrapped__(0) is module


def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm.launch, "capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedGpu, match=r"compute capability 7\.5"):
        gemm.kernel.__wrapped__(0)


@pytest.mark.parametrize("rows", [1, 8, 9, 33, 48, 49, 64])
def test_the_smallest_variant_that_fits_is_taken(recorder: Recorder, rows: int) -> None:
    weight = exact(normal(torch.Generator().manual_seed(1), 128, 64))
    gemm_sm90.gemm(torch.zeros((rows, 64), dtype=BF16), weight, None, torch.zeros((rows, 128)))
    taken = recorder.variant[1]
    assert taken >= rows
    assert not [size for size in modules.GEMM_ROWS if rows <= size < taken]
    assert recorder.tensor_map[1:] == (rows, 64, 64, taken)


@pytest.mark.parametrize(
    ("arrange", "copied", "pitch"),
    [
        (lambda x: x, False, 72),
        (lambda x: x[:, :65], False, 72),
        (lambda x: x[::2], False, 144),
        (lambda x: x[:, 1:], True, 72),
        (lambda x: x[:, 8:], False, 72),
        (lambda x: x[:, ::2], True, 40),
        (lambda x: x[:1].expand(8, -1), True, 72),
        (lambda x: x[:1, :65], False, 72),
        (lambda x: x.T.contiguous().T, True, 72),
        (lambda x: x[:, :65].contiguous(), True, 72),
    ],
    ids=["whole", "odd width", "every second row", "shifted", "shifted by 16 bytes",
         "every second column", "expanded", "one row", "transposed", "odd pitch"],
)  # fmt: skip
def test_x_is_copied_only_where_a_tensor_map_cannot_describe_it(
    recorder: Recorder, arrange: Any, copied: bool, pitch: int
) -> None:
    x = arrange(torch.zeros((8, 72), dtype=BF16))
    weight = exact(normal(torch.Generator().manual_seed(1), 128, x.shape[1]))
    gemm_sm90.gemm(x, weight, None, torch.zeros((8, 128)))
    pointer, rows, cols, its_pitch, _ = recorder.tensor_map
    assert (rows, cols, its_pitch) == (*x.shape, pitch)
    assert (pointer != x.data_ptr()) == copied
    assert pitch % 8 == 0


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the reference in the kernel's place, so that the operators run without a GPU."""

    def product(x: torch.Tensor, weight: Any, bias: Any = None, *, out: torch.Tensor,
                view_only: bool = False, dependent: bool = True) -> torch.Tensor:  # fmt: skip
        assert x.shape[0] <= gemm.MAX_ROWS
        return out.copy_(reference_gemm.linear(x, weight, bias, view_only=view_only))

    def by_decoding(x: torch.Tensor, weight: Any, bias: Any, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.linear(x.float(), weight.to_bf16().float()))

    monkeypatch.setattr(gemm, "gemm", product)
    monkeypatch.setattr(gemm, "check", lambda x, weight, bias: None)
    monkeypatch.setattr(prefill, "by_decoding", by_decoding)
    monkeypatch.setattr(ops, "_gpu_name", lambda device: "none")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("shape", [(320,), (5, 320), (2, 3, 320), (65, 320), (0, 320)], ids=str)
def test_operators_are_registered_as_torch_wants_them(shape: tuple[int, ...]) -> None:
    weight = exact(normal(torch.Generator().manual_seed(1), 256, 320))
    x, bias = torch.randn(shape).bfloat16(), torch.ones(256, dtype=BF16)
    for some in (None, bias):
        arguments = (x, ops.tensors_of(weight), some, 256)
        torch.library.opcheck(torch.ops.specpilot.w12_linear.default, arguments)
        torch.library.opcheck(torch.ops.specpilot.w12_linear_view.default, arguments)


@pytest.mark.usefixtures("on_cpu")
def test_compiled_layers_give_the_eager_result() -> None:
    generator = torch.Generator().manual_seed(1)
    layers = torch.nn.Sequential(
        W12Linear(exact(normal(generator, 256, 320)), torch.ones(256, dtype=BF16)),
        torch.nn.GELU(),
        W12Linear(exact(normal(generator, 130, 256))),
    )
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (1, 8, 70, 200):
        x = torch.randn((rows, 320)).bfloat16()
        assert same_bits(compiled(x), layers(x))


@pytest.mark.usefixtures("on_cpu")
def test_the_way_follows_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    monkeypatch.setattr(plans, "plan_for", lambda *_: plans.Plan(passes_rows=150))
    for name in ("in_passes", "by_decoding"):
        original = getattr(prefill, name)

        def noted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> None:
            ways.append(name)
            original(*args, **kwargs)

        monkeypatch.setattr(prefill, name, noted)
    weight = exact(normal(torch.Generator().manual_seed(1), 130, 64))
    for rows in (64, 65, 150, 151):
        x = torch.randn((rows, 64)).bfloat16()
        expected = reference_gemm.linear(x, weight)
        assert torch.allclose(w12_linear(x, weight).double(), expected, rtol=2.0**-8, atol=1e-6)
    assert ways == ["in_passes", "in_passes", "by_decoding"]


@pytest.mark.usefixtures("on_cpu")
def test_a_copy_serves_more_rows_than_the_limit() -> None:
    weights = normal(torch.Generator().manual_seed(1), 130, 64)
    layer = W12Linear(exact(weights), copy_above=8)
    layer.copy.zero_()
    assert layer(torch.ones((8, 64), dtype=BF16)).abs().sum() > 0
    assert layer(torch.ones((9, 64), dtype=BF16)).abs().sum() == 0
