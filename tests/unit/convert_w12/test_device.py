"""`--device cuda`: the same folder as from the CPU, and what is said where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpilot_cli.convert_w12.device import open_codec
from specpilot_cli.errors import MachineError
from specpilot_cli.main import main
from tests import fake_gpu
from tests.unit.convert_w12.conftest import MakeCheckpoint, digests

torch = pytest.importorskip("torch")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_the_same_folder_from_both(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint()
    assert run("convert-w12", source, "-o", tmp_path / "cpu") == 0
    calls = fake_gpu.install(monkeypatch)
    assert run("convert-w12", source, "-o", tmp_path / "cuda", "--device", "cuda") == 0
    assert calls[0] == "warm"
    assert {"encode", "compare"} <= set(calls)
    assert digests(tmp_path / "cuda") == digests(tmp_path / "cpu")
    calls.clear()
    against = ("--against", source, "--device", "cuda")
    assert run("w12", "verify", tmp_path / "cuda", *against) == 0
    assert set(calls) == {"warm", "decode"}


def test_a_damaged_folder_is_a_mismatch_on_the_gpu_too(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("convert-w12", make_checkpoint(), "-o", tmp_path / "w12") == 0
    shard = tmp_path / "w12" / "model.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    fake_gpu.install(monkeypatch)
    capsys.readouterr()
    assert run("w12", "verify", tmp_path / "w12", "--device", "cuda") == 1
    assert "tensor `" in capsys.readouterr().out


@without_gpu
@pytest.mark.parametrize("how", ["convert", "dry run", "verify"])
def test_no_gpu_is_said_before_any_work(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even the source is looked at: it does not exist."""
    words: dict[str, tuple[object, ...]] = {
        "convert": ("convert-w12", tmp_path / "none", "-o", tmp_path / "w12"),
        "dry run": ("convert-w12", tmp_path / "none", "--dry-run"),
        "verify": ("w12", "verify", tmp_path / "none"),
    }
    assert run(*words[how], "--device", "cuda") == 3
    said = capsys.readouterr().err
    assert "no CUDA device" in said
    assert "--device cpu" in said
    assert list(tmp_path.iterdir()) == []


def test_too_little_gpu_memory_in_the_middle(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = make_checkpoint()
    fake_gpu.install(monkeypatch)
    from specpilot_kernels.w12 import device

    def full(bits: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(device, "encode", full)
    assert run("convert-w12", source, "-o", tmp_path / "w12", "--device", "cuda") == 3
    assert "does not fit into the GPU's memory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@without_gpu
def test_open_codec() -> None:
    assert type(open_codec("cpu")).__name__ == "CpuCodec"
    with pytest.raises(MachineError, match="no CUDA device"):
        open_codec("cuda")
