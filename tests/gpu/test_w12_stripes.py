"""Converting on the GPU: stripes have the CPU codec's bytes, and so has a whole folder."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.codec import CpuCodec
from specpilot_kernels.w12.encoded import EncodedW12
from specpilot_kernels.w12.stored import from_stored, stored_parts
from tests.gpu.conftest import normal_bits

torch = pytest.importorskip("torch", reason="no CUDA device: torch is not installed")
gpu_codec = pytest.importorskip("specpilot_kernels.w12.gpu_codec")

pytestmark = pytest.mark.gpu

Bits = npt.NDArray[np.uint16]
PARTS = ("records", "window", "escape_ptr", "escape_col", "escape_bits")


def encode(coder: CpuCodec | gpu_codec.GpuStripeCodec, bits: Bits) -> EncodedW12:
    records = np.full((*layout.grid(*bits.shape), layout.RECORD_BYTES), 0xA5, np.uint8)
    encoded = coder.encode_stripe(bits, records, max_escapes=bits.size)
    assert encoded is not None
    assert encoded.records is records
    return encoded


def test_a_stripe_has_the_cpu_codecs_bytes_and_comes_back(bits: Bits) -> None:
    if not bits.size:
        pytest.skip("a stripe has weights")
    bits = bits.reshape(-1, bits.shape[-1]).copy()
    cpu, gpu = CpuCodec(), gpu_codec.GpuStripeCodec()
    found, wanted = encode(gpu, bits), encode(cpu, bits)
    for part in PARTS:
        assert np.array_equal(getattr(found, part), getattr(wanted, part)), part
    stored = from_stored(bits.shape, stored_parts(found))
    assert gpu.matches_stripe(bits, stored)
    out = np.full_like(bits, 0xA5A5)
    gpu.decode_stripe(stored, out)
    assert np.array_equal(out, bits)
    survey = gpu.survey_stripe(bits)
    expected = cpu.survey_stripe(bits)
    assert np.array_equal(survey.window, expected.window)
    assert np.array_equal(survey.escape_counts, expected.escape_counts)
    if wanted.escapes:
        records = np.empty_like(wanted.records)
        assert gpu.encode_stripe(bits, records, max_escapes=wanted.escapes - 1) is None
    bits[-1, -1] ^= 1
    assert not gpu.matches_stripe(bits, stored)


def test_many_threads_at_once() -> None:
    gpu = gpu_codec.GpuStripeCodec()
    inputs = [normal_bits(np.random.default_rng(seed), 512, 4096) for seed in range(24)]

    def there_and_back(bits: Bits) -> bool:
        encoded, out = encode(gpu, bits), np.empty_like(bits)
        gpu.decode_stripe(encoded, out)
        same = all(
            np.array_equal(getattr(encoded, part), getattr(encode(CpuCodec(), bits), part))
            for part in PARTS
        )
        return same and gpu.matches_stripe(bits, encoded) and np.array_equal(out, bits)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, inputs))


def test_a_folder_converted_on_the_gpu_is_the_cpus(tmp_path: Path) -> None:
    convert = pytest.importorskip("specpilot_cli.convert_w12.convert")
    from specpilot_cli.convert_w12.device import open_codec
    from specpilot_cli.convert_w12.plan import Selection
    from specpilot_cli.convert_w12.verify import verify_folder
    from specpilot_cli.io.hf_folder import open_hf_folder
    from specpilot_cli.io.safetensors_stream import bf16_data, write_safetensors

    rng = np.random.default_rng(1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "x"}', encoding="utf-8")
    zeros = normal_bits(rng, 3000, 2048)
    zeros[rng.random(zeros.shape) < 0.2] = 0
    tensors = {
        "a.weight": bf16_data(normal_bits(rng, 5000, 2050)),
        "experts.up": bf16_data(normal_bits(rng, 3, 1000, 512)),
        "grows.weight": bf16_data(zeros),
    }
    write_safetensors(tmp_path / "model" / "model.safetensors", tensors, {"format": "pt"})
    codec = open_codec("cuda")
    for name, coder in (("cpu", None), ("cuda", codec)):
        convert.convert_folder(
            open_hf_folder(tmp_path / "model"), tmp_path / name, Selection(), threads=4, codec=coder
        )
    digests = [
        {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in (tmp_path / name).iterdir()
        }
        for name in ("cpu", "cuda")
    ]
    assert digests[0] == digests[1]
    found = verify_folder(tmp_path / "cuda", tmp_path / "model", threads=4, codec=codec)
    assert (found.verdict, found.converted) == ("identical", 2)
