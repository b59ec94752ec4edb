"""The GPU codec gives the CPU codec's bytes, for every input, and writes all of its output."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels.w12 import codec, layout
from specpilot_kernels.w12.encoded import EncodedW12, MalformedW12

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")
device = pytest.importorskip("specpilot_kernels.w12.device")
gpu_codec = pytest.importorskip("specpilot_kernels.w12.gpu_codec")

from w12_cases import little_memory  # noqa: E402

pytestmark = pytest.mark.gpu

Bits = npt.NDArray[np.uint16]
PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")


def on_gpu(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).cuda()


def to_host(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    wide = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
    host = wide.cpu().numpy()
    return host.view(np.uint16) if tensor.element_size() == 2 else host


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xA5)


def assert_same(parts: device.DeviceW12, expected: EncodedW12) -> None:
    for name in PARTS:
        actual, wanted = to_host(getattr(parts, name)), getattr(expected, name)
        assert actual.shape == wanted.shape, name
        assert np.array_equal(actual, wanted), name


def normal(rows: int, cols: int, *, seed: int = 3) -> Bits:
    values = np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_encode_gives_the_bytes_of_the_cpu_codec(bits: Bits) -> None:
    expected = codec.encode(bits)
    buffers = device.allocate(bits.shape, 0, capacity=expected.escapes + 3)
    parts = buffers.parts
    poison(*(getattr(parts, name) for name in PARTS), buffers.progress, buffers.total)
    device.encode_into(on_gpu(bits), buffers)
    assert buffers.total.item() == expected.escapes
    unused = to_host(parts.escape_bits)[expected.escapes :]
    assert unused.tolist() == [0xA5A5] * 3
    assert_same(
        replace(
            parts,
            escape_col=parts.escape_col[: expected.escapes],
            escape_bits=parts.escape_bits[: expected.escapes],
        ),
        expected,
    )


def test_decode_and_compare_agree_with_the_source(bits: Bits) -> None:
    source = on_gpu(bits)
    parts = device.encode(source)
    assert_same(parts, codec.encode(bits))
    out = torch.empty_like(source)
    poison(out)
    assert device.decode(parts, out) is out
    assert np.array_equal(to_host(out), bits)
    assert device.compare(source, parts).item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.uint16], ids=str)
def test_every_16_bit_dtype_is_taken_by_its_patterns(dtype: torch.dtype) -> None:
    bits = np.arange(65536, dtype=np.uint16).reshape(512, 128)
    source = on_gpu(bits).view(dtype)
    parts = device.encode(source)
    assert_same(parts, codec.encode(bits))
    assert np.array_equal(to_host(device.decode(parts, torch.empty_like(source))), bits)
    assert device.decode(parts).dtype == torch.bfloat16


@pytest.mark.parametrize("cols", [512, 515], ids=["aligned rows", "unaligned rows"])
@pytest.mark.parametrize("where", [(0, 0), (299, -1), (128, 64), (15, 511)], ids=str)
@pytest.mark.parametrize("bit", [0, 7, 15])
def test_compare_sees_one_flipped_bit(cols: int, where: tuple[int, int], bit: int) -> None:
    bits = normal(300, cols)
    parts = device.encode(on_gpu(bits))
    bits[where] ^= 1 << bit
    assert device.compare(on_gpu(bits), parts).item() == 1


@pytest.mark.parametrize("part", ["records", "window", "escape_col", "escape_bits"])
def test_compare_sees_a_damaged_part(part: str) -> None:
    bits = normal(128, 640)
    bits[5, 77] = 0x7FC1
    source = on_gpu(bits)
    damaged = device.encode(source)
    flat = getattr(damaged, part).view(torch.uint8).view(-1)
    flat[0] ^= 1
    assert device.compare(source, damaged).item() == 1


def test_a_misaligned_base_takes_the_other_kernels() -> None:
    bits = normal(40, 256)
    room = torch.empty(bits.size + 1, dtype=torch.int16, device="cuda")
    shifted = room[1:].view(40, 256)
    shifted.copy_(on_gpu(bits))
    assert shifted.data_ptr() % 16
    parts = device.encode(shifted)
    assert_same(parts, codec.encode(bits))
    assert device.compare(shifted, parts).item() == 0
    poison(room)
    assert np.array_equal(to_host(device.decode(parts, shifted)), bits)


def test_a_full_list_is_noticed_and_nothing_is_written_beyond_it() -> None:
    bits = np.random.default_rng(1).integers(0, 65536, (200, 700), dtype=np.uint16)
    expected = codec.encode(bits)
    kept = expected.escapes // 2
    buffers = device.allocate(bits.shape, 0, capacity=expected.escapes)
    col, pattern = buffers.parts.escape_col, buffers.parts.escape_bits
    poison(col, pattern)
    short = replace(buffers.parts, escape_col=col[:kept], escape_bits=pattern[:kept])
    device.encode_into(on_gpu(bits), replace(buffers, parts=short))
    assert buffers.total.item() == expected.escapes
    assert np.array_equal(to_host(col)[:kept], expected.escape_col[:kept])
    assert np.array_equal(to_host(pattern)[:kept], expected.escape_bits[:kept])
    assert set(to_host(col)[kept:].tolist()) == {np.uint32(0xA5A5A5A5).astype(np.int32).item()}
    assert set(to_host(pattern)[kept:].tolist()) == {0xA5A5}
    assert np.array_equal(to_host(buffers.parts.records), expected.records)
    assert_same(device.encode(on_gpu(bits), capacity=1), expected)


@pytest.mark.parametrize("share", [0.0, 0.002, 0.02], ids=["few", "sorted", "many"])
def test_bytes_are_equal_from_run_to_run(share: float) -> None:
    bits = normal(2048, 1024)
    bits[np.random.default_rng(2).random(bits.shape) < share] = 0
    source = on_gpu(bits)
    first = device.encode(source)
    for _ in range(10):
        again = device.encode(source)
        assert all(
            torch.equal(getattr(first, n).view(torch.uint8), getattr(again, n).view(torch.uint8))
            for n in PARTS
        )
    assert_same(first, codec.encode(bits))


def test_everything_replays_from_a_cuda_graph() -> None:
    device.warm()
    first, second = normal(512, 1024), normal(512, 1024, seed=4)
    second[::7] = 0
    source, out = on_gpu(first), torch.empty((512, 1024), dtype=torch.int16, device="cuda")
    buffers = device.allocate(first.shape, 0, capacity=100_000)
    fixed, differs = device.encode(source), torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.encode_into(source, buffers)
        device.decode(fixed, out)
        device.compare(source, fixed, differs)
    for bits, different in ((first, 0), (second, 1)):
        expected = codec.encode(bits)
        source.copy_(on_gpu(bits))
        poison(out, buffers.parts.records, buffers.parts.window)
        differs.zero_()
        graph.replay()
        assert np.array_equal(to_host(out), first)
        assert np.array_equal(to_host(buffers.parts.records), expected.records)
        assert np.array_equal(to_host(buffers.parts.window), expected.window)
        assert np.array_equal(to_host(buffers.parts.escape_ptr), expected.escape_ptr)
        assert (buffers.total.item(), differs.item()) == (expected.escapes, different)


def test_work_goes_to_the_current_stream() -> None:
    bits = normal(4096, 4096)
    side = torch.cuda.Stream()
    source = torch.zeros((4096, 4096), dtype=torch.int16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        source.copy_(torch.from_numpy(bits.view(np.int16)))
        parts = device.encode(source)
    assert_same(parts, codec.encode(bits))


def encode(bits: Bits) -> EncodedW12:
    """Through host memory, as a conversion does it."""
    records = np.empty((*layout.grid(*bits.shape), layout.RECORD_BYTES), np.uint8)
    encoded = gpu_codec.GpuStripeCodec().encode_stripe(bits, records, max_escapes=bits.size)
    assert encoded is not None
    return encoded


def decode(encoded: EncodedW12) -> Bits:
    """Through host memory, as a conversion does it."""
    bits = np.empty(encoded.shape, np.uint16)
    gpu_codec.GpuStripeCodec().decode_stripe(encoded, bits)
    return bits


def test_threads_share_the_launchers() -> None:
    inputs = [normal(256, 512, seed=seed) for seed in range(4)]
    failures: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not np.array_equal(decode(encode(inputs[index])), inputs[index]):
                    failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_arrays_larger_than_a_staging_buffer_survive() -> None:
    bits = normal(3001, 9000)
    encoded = encode(bits)
    assert codec.matches(bits, encoded)
    assert np.array_equal(decode(encoded), bits)


def test_a_tensor_larger_than_the_memory_is_refused_and_the_next_one_works() -> None:
    bits = normal(4096, 8192)
    with little_memory(32 << 20):
        with pytest.raises(gpu_codec.GpuMemoryError, match="does not fit"):
            encode(bits)
        small = bits[:64]
        assert gpu_codec.GpuStripeCodec().matches_stripe(small, codec.encode(small))


def test_hostile_lists_stay_inside_their_parts() -> None:
    bits = normal(128, 640)
    bits[::3, 5] = 0x7FC1
    parts = device.encode(on_gpu(bits))
    for name, value in (("escape_ptr", 2**31 - 1), ("escape_ptr", -5), ("escape_col", -1)):
        part = torch.full_like(getattr(parts, name), value)
        device.decode(replace(parts, **{name: part}))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.zeros(4, 4, dtype=torch.bfloat16), "CUDA tensors"),
        (lambda: torch.zeros(4, 4, device="cuda"), "16-bit"),
        (lambda: torch.zeros(4, dtype=torch.bfloat16, device="cuda"), "matrices"),
        (lambda: torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda").T, "contiguous"),
    ],
    ids=["host", "float32", "vector", "transposed"],
)
def test_other_inputs_are_refused(tensor, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        device.encode(tensor())


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_another_size_are_refused(part: str) -> None:
    parts = device.encode(on_gpu(np.full((8, 64), 0x7FC1, np.uint16)))
    with pytest.raises(MalformedW12, match=part):
        device.decode(replace(parts, **{part: getattr(parts, part)[:-1]}))


def test_lists_of_two_lengths_are_both_named() -> None:
    parts = device.encode(on_gpu(np.full((8, 64), 0x7FC1, np.uint16)))
    with pytest.raises(MalformedW12, match="escape_col has 512 entries, escape_bits 511"):
        device.decode(replace(parts, escape_bits=parts.escape_bits[:-1]))


def test_record_geometry_is_the_layouts() -> None:
    parts = device.encode(on_gpu(normal(129, 65)))
    assert tuple(parts.records.shape) == (*layout.grid(129, 65), layout.RECORD_BYTES)
