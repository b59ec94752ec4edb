"""The W12 product is as exact as cuBLAS's, and every row's result is always the same."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")

from w12_cases import (  # noqa: E402
    CONTENTS,
    INPUT_SCALE,
    content,
    exact,
    fields,
    inputs,
    normal,
    same_bits,
)

from specpilot_kernels.w12 import gemm, prefill, reference_gemm, selfcheck, shapes  # noqa: E402
from specpilot_kernels.w12.linear import W12Linear, w12_linear, w12_linear_view  # noqa: E402
from specpilot_kernels.w12.weight import W12Weight  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel")]

ROWS = (1, 7, 16, 33, 48, 64)


@pytest.fixture(scope="module")
def square() -> W12Weight:
    """A weight [1000, 1544] with a few escapes; the number of inputs is a multiple of 8."""
    weights = normal(torch.Generator(device="cuda").manual_seed(2), 1000, 1544)
    weights[::37, ::41] = 0
    return exact(weights)


def guarded(rows: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output [rows, channels] full of NaN, and the larger tensor it lies in."""
    room = torch.full((rows + 2, channels + 9), torch.nan, dtype=torch.bfloat16, device="cuda")
    return room[1:-1, 4:-5], room


def assert_only_inside_written(room: torch.Tensor, channels: int) -> None:
    outside = room.clone()
    outside[1:-1, 4 : 4 + channels] = torch.nan
    assert same_bits(outside, torch.full_like(room, torch.nan))


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"-{rows}-")
@pytest.mark.parametrize("name", CONTENTS, ids=str)
def test_every_element_is_the_rounded_product(name: str, rows: int) -> None:
    weights = content(name)
    x = inputs(rows, weights.shape[1], scale=INPUT_SCALE.get(name, 1.0))
    out, room = guarded(rows, weights.shape[0])
    assert gemm.gemm(x, exact(weights), out=out) is out
    assert selfcheck.wrong_elements(out, x, weights) == 0
    assert_only_inside_written(room, weights.shape[0])
    expected = x.double() @ weights.double().T
    cublas = torch.nn.functional.linear(x, weights)
    limit = selfcheck.RELATIVE_TO_CUBLAS * selfcheck.relative_error(cublas, expected)
    # Results of a few elements round by chance to either side of cuBLAS's.
    slack = 0.0 if out.numel() > 10_000 else 2.0**-9
    assert selfcheck.relative_error(out, expected) <= limit + slack


@pytest.mark.parametrize("rows", range(1, 65))
def test_every_row_count_gives_the_rows_of_the_full_batch(square: W12Weight, rows: int) -> None:
    x = inputs(64, 1544)
    out, room = guarded(rows, 1000)
    gemm.gemm(x[:rows], square, out=out)
    assert same_bits(out, gemm.gemm(x, square)[:rows])
    assert_only_inside_written(room, 1000)


@pytest.mark.parametrize("shape", [(5120, 6144), (14336, 512), (20000, 256), (128, 8192)], ids=str)
def test_a_row_alone_gives_what_it_gives_in_a_batch(shape: tuple[int, int]) -> None:
    weight = W12Weight.from_bits(selfcheck.normal_weights(shape))
    x = inputs(64, shape[1])
    together = gemm.gemm(x, weight)
    alone = torch.cat([gemm.gemm(row[None], weight) for row in x])
    assert same_bits(together, alone)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("shape", [(5120, 6144), (20000, 256)], ids=["shared tiles", "both kinds"])
def test_fifty_runs_give_the_same_bits(shape: tuple[int, int], rows: int) -> None:
    weights = selfcheck.normal_weights(shape)
    weights[::5, ::97] = 0
    weight, x = exact(weights), inputs(rows, shape[1])
    first = gemm.gemm(x, weight)
    for _ in range(50):
        assert same_bits(gemm.gemm(x, weight), first)


@pytest.mark.parametrize("shape", shapes.distinct(), ids=lambda shape: "x".join(map(str, shape)))
def test_projections_of_the_supported_models(shape: tuple[int, int]) -> None:
    weights = selfcheck.normal_weights(shape)
    weight = W12Weight.from_bits(weights)
    x = inputs(17, shape[1])
    out = torch.full((17, shape[0]), torch.nan, dtype=torch.bfloat16, device="cuda")
    gemm.gemm(x, weight, out=out)
    channels = slice(None, None, max(1, shape[0] // 4096))
    assert selfcheck.wrong_elements(out[:, channels], x, weights[channels]) == 0
    assert out.isfinite().all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "name", ["normal", "odd", "zeros among ones", "special channels", "mixed exponents"]
)
def test_the_view_pass_multiplies_by_the_view(name: str, rows: int) -> None:
    weight = exact(content(name))
    x = inputs(rows, weight.in_features)
    out, room = guarded(rows, weight.out_features)
    gemm.gemm(x, weight, out=out, view_only=True)
    view = reference_gemm.weights(weight, view_only=True)
    assert selfcheck.wrong_elements(out, x, view) == 0
    assert_only_inside_written(room, weight.out_features)
    assert same_bits(w12_linear_view(x, weight), out)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF], ids=hex)
def test_weights_that_are_not_finite(pattern: int, rows: int) -> None:
    weights = normal(torch.Generator(device="cuda").manual_seed(3), 260, 200)
    as_words = weights.view(torch.int16)
    as_words[[3, 130, 259], [0, 77, 199]] = pattern - (1 << 16 if pattern >> 15 else 0)
    x = inputs(rows, 200)
    assert selfcheck.wrong_elements(gemm.gemm(x, exact(weights)), x, weights) == 0


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_inputs_that_are_not_finite_spoil_their_row_alone(value: float) -> None:
    weights = selfcheck.normal_weights((5120, 6144))
    weight, x = W12Weight.from_bits(weights), inputs(8, 6144)
    good = gemm.gemm(x, weight)
    x[3, 4000] = value
    out = gemm.gemm(x, weight)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert same_bits(out[others], good[others])
    assert not out[3].isfinite().any()
    assert same_bits(gemm.gemm(x[others], weight), good[others])  # nothing is left behind


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: torch.cat([x[:, :3], x], 1)[:, 3:],
        lambda x: x.T.contiguous().T,
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x.repeat_interleave(2, 0)[::2],
    ],
    ids=["wide rows", "misaligned", "transposed", "every second column", "every second row"],
)
def test_strides_of_x_do_not_matter(square: W12Weight, rows: int, arrange: object) -> None:
    x = inputs(rows, 1544)
    strided = arrange(x)
    assert torch.equal(strided, x)
    assert same_bits(gemm.gemm(strided, square), gemm.gemm(x, square))


def test_one_row_seen_many_times(square: W12Weight) -> None:
    x = inputs(1, 1544)
    assert same_bits(gemm.gemm(x.expand(9, -1), square), gemm.gemm(x.repeat(9, 1), square))


@pytest.mark.parametrize("rows", [1, 64, 65, 300])
def test_bias_is_added_before_rounding(square: W12Weight, rows: int) -> None:
    x, bias = inputs(rows, 1544), normal(torch.Generator("cuda").manual_seed(4), 1, 1000)[0]
    out = w12_linear(x, square, bias)
    assert selfcheck.wrong_elements(out, x, square.to_bf16(), bias) == 0


@pytest.mark.parametrize("rows", [65, 128, 129, 300])
@pytest.mark.parametrize("way", [prefill.in_passes, prefill.by_decoding])
def test_many_rows(monkeypatch: pytest.MonkeyPatch, rows: int, way: object) -> None:
    monkeypatch.setattr(prefill, "SCRATCH_BYTES", 1 << 20)  # several stripes
    weights = content("inputs not of eight")
    weights = torch.cat([weights, weights.flip(0)])
    x = inputs(rows, 4101)
    out, room = guarded(rows, 600)
    way(x, exact(weights), None, out)
    assert selfcheck.wrong_elements(out, x, weights) == 0
    assert_only_inside_written(room, 600)
    assert selfcheck.wrong_elements(w12_linear(x, exact(weights)), x, weights) == 0


@pytest.mark.parametrize("shape", [(1544,), (0, 1544), (2, 3, 1544), (2, 0, 1544), (2, 65, 1544)])
def test_leading_dimensions_are_kept(square: W12Weight, shape: tuple[int, ...]) -> None:
    x = inputs(1000, 1544)[: torch.Size(shape[:-1]).numel()].reshape(shape)
    out = w12_linear(x, square)
    assert out.shape == (*shape[:-1], 1000)
    if x.numel():
        flat = x.reshape(-1, 1544)
        assert selfcheck.wrong_elements(out.reshape(-1, 1000), flat, square.to_bf16()) == 0


def test_a_layer_gives_what_the_function_gives(square: W12Weight) -> None:
    linear = torch.nn.Linear(1544, 1000, device="cuda", dtype=torch.bfloat16)
    linear.weight.data = square.to_bf16()
    layer = W12Linear.from_linear(linear, max_escape_ratio=1.0)
    x = inputs(5, 1544)
    assert same_bits(layer(x), w12_linear(x, square, linear.bias.detach()))


def test_tensors_that_do_not_fit_are_refused(square: W12Weight) -> None:
    x = inputs(4, 1544)
    for wrong, words in (
        (x.cpu(), "on cpu"),
        (x.half(), "float16"),
        (x[:, :-1], "does not fit"),
        (inputs(65, 1544), "at most 64 rows"),
        (x[0], "at most 64 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            gemm.gemm(wrong, square)
    with pytest.raises(ValueError, match="bias must be"):
        gemm.gemm(x, square, torch.zeros(1000, device="cuda"))
    with pytest.raises(ValueError, match="out must be"):
        gemm.gemm(x, square, out=x)


def test_a_damaged_window_is_not_the_original(square: W12Weight) -> None:
    weights = fields(torch.Generator(device="cuda").manual_seed(1), 112, 127, 128, 64)
    weight = exact(weights)
    weight.scale[5] *= 2
    x = inputs(8, 64)
    assert selfcheck.wrong_elements(gemm.gemm(x, weight), x, weights) == 8
