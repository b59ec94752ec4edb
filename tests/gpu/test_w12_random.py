"""Random shapes and contents, from fixed seeds: GPU and CPU codec give the same bytes.

A failing seed is a whole test case: `-k "seed-17"` repeats it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels.w12 import codec

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")
device = pytest.importorskip("specpilot_kernels.w12.device")
launch = pytest.importorskip("specpilot_kernels.launch")
modules = pytest.importorskip("specpilot_kernels.w12.modules")

pytestmark = pytest.mark.gpu

Bits = npt.NDArray[np.uint16]
PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")
SEEDS = range(60)
# Sizes on either side of every unit of the format and of the kernels are as likely as others.
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024, 2047, 2048)


def random_size(rng: np.random.Generator, largest: int) -> int:
    """A size from 1 to `largest`: an edge, or anything with small ones as likely as large ones."""
    if rng.random() < 0.5:
        return int(rng.choice([edge for edge in EDGES if edge <= largest]))
    return int(np.exp(rng.uniform(0, np.log(largest))))


def random_rows(rng: np.random.Generator, rows: int, cols: int) -> Bits:
    """Patterns [rows, cols], each row with a scale of its own.

    Every other matrix is tame, with few escapes like real weights; in the rest exponents are
    spread, rows are of every kind, and many places hold special patterns.
    """
    tame = rng.random() < 0.5
    scale = np.exp2(rng.integers(-120, 110, (rows, 1))).astype(np.float32)
    spread = rng.choice([0.0, 0.3] if tame else [0.0, 3.0, 20.0], (rows, 1))
    values = rng.standard_normal((rows, cols)) * np.exp2(spread * rng.standard_normal((rows, cols)))
    with np.errstate(over="ignore", under="ignore"):
        bits = ((values * scale).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    kind = np.full(rows, 7) if tame else rng.integers(0, 8, rows)
    bits[kind == 0] = rng.choice(np.array([0, 0x8000, 0x7F80, 0xFFFF, 0x3F80], np.uint16))
    bits[kind == 1] = rng.integers(0, 65536, (int((kind == 1).sum()), cols), dtype=np.uint16)
    share = rng.choice([0.0, 1e-3] if tame else [0.0, 0.05, 0.5], (rows, 1))
    odd = rng.choice(
        np.array([0, 0x8000, 1, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF], np.uint16), bits.shape
    )
    return np.where(rng.random(bits.shape) < share, odd, bits)


def random_bits(seed: int) -> Bits:
    """One tensor: a matrix, every third time a stack, at most a million weights."""
    rng = np.random.default_rng(seed)
    matrices = random_size(rng, 9) if seed % 3 == 0 else 1
    rows = random_size(rng, 700)
    cols = random_size(rng, min(20_000, 1_000_000 // (matrices * rows)))
    bits = random_rows(rng, matrices * rows, cols)
    return bits.reshape(matrices, rows, cols) if seed % 3 == 0 else bits


def host_parts(parts: device.DeviceW12) -> dict[str, bytes]:
    return {
        name: getattr(parts, name).reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        for name in PARTS
    }


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed-{seed}")
def test_random_tensors_give_the_bytes_of_the_cpu_codec(seed: int) -> None:
    bits = random_bits(seed)
    source = torch.from_numpy(bits.view(np.int16)).cuda()
    if seed % 2:  # rows that begin two bytes off a 16-byte piece, whatever their length
        room = torch.empty(source.numel() + 1, dtype=torch.int16, device="cuda")
        room[1:] = source.view(-1)
        source = room[1:].view(source.shape)
    expected = codec.encode(bits)
    parts = device.encode(source)
    assert host_parts(parts) == {name: getattr(expected, name).tobytes() for name in PARTS}
    out = torch.full_like(source, 0x5A5A)
    assert torch.equal(device.decode(parts, out), source)
    assert device.compare(source, parts).item() == 0
    place = np.random.default_rng(seed + 1000).integers(0, bits.size)
    source.view(-1)[int(place)] ^= 1 << seed % 15
    assert device.compare(source, parts).item() == 1


@pytest.mark.parametrize(
    "variant",
    [{"copies": 2}, {"copies": 4}, {"prefetch": 1}, {"threads": 512, "blocks": 2, "copies": 2}],
    ids=str,
)
def test_encoder_variants_give_the_same_bytes(
    variant: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = modules.encoder(**variant)
    threads, copies = variant.get("threads", 1024), variant.get("copies", 1)
    options = launch.Options(shared_bytes=modules.encode_shared_bytes(threads, copies))

    def encoder(index: int, aligned: bool) -> Callable[..., None]:
        entry = "w12_encode" if aligned else "w12_encode_unaligned"
        return launch.prepare(module, entry, block=(threads, 1, 1), device=index, options=options)

    monkeypatch.setattr(device, "_encoder", encoder)
    for seed in range(100, 110):
        bits = random_bits(seed)
        parts = device.encode(torch.from_numpy(bits.view(np.int16)).cuda())
        expected = codec.encode(bits)
        assert host_parts(parts) == {name: getattr(expected, name).tobytes() for name in PARTS}
